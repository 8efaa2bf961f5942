"""One evaluation set the whole way through the commands: files as published, prepared, asked, and outputs scored.

A table has a row for each question: its id, the output, and what each of several readers says of it. What is said is
written as (answer, score): ("C", 1) is a right C, (None, 0) is unparsed; ``OUT`` is left out of the denominator,
``WORTHLESS`` is a question without a value, ``SILENT`` one that nobody answered (its output is None).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT
from tests.support.published.case import lay_out, records, refusals
from tests.support.runs import read_lines, write_config
from vlm_pg.cli import main
from vlm_pg.types import Sample

Said = tuple[str | None, float] | str
Table = Sequence[tuple[Any, ...]]
OUT, WORTHLESS, SILENT = "left out", "without a value", "nobody answered"
_MODEL = str(ROOT / "assets" / "tiny-qwen2_5-vl")
_COUNTS = ("total", "scored", "bad_media", "no_output", "no_value", "unparsed", "left_out", "not_asked")


@dataclass(frozen=True)
class Scores:
    """What ``vlm-pg score`` is to make of a table's outputs.

    ``protocol``, ``reader``: as the command takes them; ``read_by``: the name in the result. ``main``: the figure that
    is cited. ``figures``: of the whole set. ``groups``: (mean, scored questions) by group, of some of the result's
    groups. ``counts``: those that are not 0, without "n_". ``notes``: part of each.
    """

    protocol: str
    reader: str
    read_by: str
    main: float | None
    figures: Mapping[str, float | None]
    counts: Mapping[str, int]
    groups: Mapping[str, Mapping[str, tuple[float | None, int]]] = field(default_factory=dict)
    notes: Sequence[str] = ()


class PreparedSet:
    """A set laid out as published in a folder of its own, and prepared by its pipeline.

    ``samples``: by id. ``refused``: reason by question. ``report``: what the pipeline wrote about it.
    """

    def __init__(self, folder: Path, pipeline: str, files: Mapping[str, Any], arguments: Sequence[str] = ("{}",)):
        self.folder, self.raw, self.out = folder, folder / "raw", folder / "prepared"
        lay_out(self.raw, files)
        given = [one.replace("{}", str(self.raw)) for one in arguments]
        assert main(["prepare", pipeline, *given, "--out", str(self.out)]) == 0
        self.samples: dict[str, Sample] = {one.sample_id: one for one in records(self.out, "eval")}
        self.refused = {name: reason for _, name, reason in refusals(self.out)}
        self.report: dict[str, Any] = json.loads((self.out / "report.json").read_text())

    def prompts(self, protocol: str) -> dict[str, dict[str, Any]]:
        """The lines of ``vlm-pg eval --prompts``, by question."""
        config = {
            "run": {"dir": str(self.folder / "run")},
            "model": {"path": _MODEL},
            "data": {"eval": {"set": f"{self.out}:eval"}, "media_root": self.report["media_root"]},
            "media": {"workers": 0},
            "training": {"steps": 1, "torch_threads": 1},
            "eval": {"protocols": {"set": protocol}},
        }
        path = write_config(self.folder / "run.yaml", config)
        assert main(["eval", "--config", str(path), "--prompts", "set"]) == 0
        lines = read_lines(self.folder / "run" / "prompts" / "prompts_set.jsonl")
        return {line["id"]: line for line in lines}

    def score(self, table: Table, place: int, protocol: str, reader: str) -> tuple[dict[str, Any], dict[str, Said]]:
        """``vlm-pg score`` of a table's outputs: the set's figures, and what was said of each question's output."""
        given, out = self.folder / f"outputs-{place}.json", self.folder / f"scored-{place}"
        given.write_text(json.dumps({question: output for question, output, *_ in table if output is not None}))
        options = ["--protocol", protocol, "--reader", reader, "--out", str(out)]
        assert main(["score", f"{self.out}:eval", str(given), *options]) == 0
        ((name, result),) = json.loads((out / "result.json").read_text())["sets"].items()
        return result, {row["sample_id"]: _said(row) for row in read_lines(out / f"answers_{name}.jsonl")}


def check_scores(prepared: PreparedSet, table: Table, place: int, expected: Scores) -> None:
    """Column ``place`` of a table, and the figures that are made of it."""
    result, said = prepared.score(table, place, expected.protocol, expected.reader)
    _equal("what is said", said, {question: _approximately(says[place]) for question, _, *says in table})
    _equal("the reader", result["reader"], expected.read_by)
    _equal("counts", {name: result[f"n_{name}"] for name in _COUNTS if result[f"n_{name}"]}, dict(expected.counts))
    _equal("the main figure", result["accuracy"], pytest.approx(expected.main))
    values = {name: one["value"] for name, one in result["figures"].items()}
    _equal("figures", values, {name: pytest.approx(value) for name, value in expected.figures.items()})
    for key, wanted in expected.groups.items():
        found = {name: (one["value"], one["n"]) for name, one in result["groups"][key].items()}
        _equal(f"by {key}", found, {name: (pytest.approx(value), n) for name, (value, n) in wanted.items()})
    notes = [next((part for part in expected.notes if part in note), note) for note in result["notes"]]
    _equal("notes", notes, list(expected.notes))


def _equal(what: str, found: Any, wanted: Any) -> None:
    if isinstance(found, dict) and found != wanted:
        names = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]
        lines = [f"{name}: {found.get(name, 'nothing')!r}, expected {wanted.get(name, 'nothing')!r}" for name in names]
        raise AssertionError(f"{what}: " + "; ".join(lines))
    assert found == wanted, f"{what}: {found!r}, expected {wanted!r}"


def _approximately(says: Said) -> Any:
    return says if isinstance(says, str) else (says[0], pytest.approx(says[1]))


def _said(row: Mapping[str, Any]) -> Said:
    if not row["outputs"]:
        return SILENT
    (output,) = row["outputs"]
    if not output["counts"]:
        return OUT
    return WORTHLESS if output["score"] is None else (output["answer"], output["score"])
