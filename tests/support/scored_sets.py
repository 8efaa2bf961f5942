"""An evaluation set end to end through the commands: published files, prepared, asked, outputs written by hand, scored.

Two kinds of tables: ``Row``, with what two readers say of several outputs to a question (``check_table``); and
``Table``, with one output a question and what each of several readers says of it as (answer, score): ("C", 1) is a
right C, (None, 0) is unparsed; ``OUT`` is left out of the denominator, ``WORTHLESS`` is a question without a value,
``SILENT`` one without an output, which is None (``check_scores``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.processes import ROOT
from tests.support.published.case import Published, lay_out, records, refusals
from vlm_pg.cli import main
from vlm_pg.types import Sample

MODEL = str(ROOT / "assets" / "tiny-qwen2_5-vl")
Said = tuple[str | None, float] | str
Table = Sequence[tuple[Any, ...]]
OUT, WORTHLESS, SILENT = "left out", "without a value", "nobody answered"
_COUNTS = ("total", "scored", "bad_media", "no_output", "no_value", "unparsed", "left_out", "not_asked")
# What a reader says: the answer, None for none, and the score.
Says = tuple[str | None, float | None]


@dataclass(frozen=True)
class Row:
    """``name``: the question's id. ``ours``, ``published``: what the two readers say of ``output``."""

    name: str
    output: str
    ours: Says
    published: Says


@dataclass(frozen=True)
class Scored:
    """``row``: the set's entry in result.json. ``answers``: the lines of its answers by question id."""

    row: dict[str, Any]
    answers: dict[str, dict[str, Any]] = field(hash=False)

    @property
    def counts(self) -> tuple[int, int, int, int, int]:
        """Questions, scored ones, unparsed outputs, unusable media, questions without an output."""
        names = ("n_total", "n_scored", "n_unparsed", "n_bad_media", "n_no_output")
        total, valued, unparsed, bad, silent = (self.row[name] for name in names)
        return total, valued, unparsed, bad, silent

    def group(self, key: str) -> dict[str, tuple[float | None, int]]:
        """The means of a grouping and how many questions each is of."""
        groups = {name: (one["value"], one["n"]) for name, one in self.row["groups"][key].items()}
        return {name: (None if value is None else round(value, 6), n) for name, (value, n) in groups.items()}

    def figure(self, name: str) -> float | None:
        """A figure of the set by name, in its own unit."""
        value = self.row["figures"][name]["value"]
        return None if value is None else round(value, 6)


@dataclass(frozen=True)
class Prepared:
    """``records``: as commands take the split to evaluate on. ``media_root``: where the media lie."""

    records: str
    media_root: str


def prepare(name: str, folder: Path, case: Published) -> Prepared:
    """``vlm-pg prepare NAME`` on a set laid out as published, with its refusals as expected."""
    raw, out = folder / "raw", folder / "prepared"
    lay_out(raw, case.files)
    arguments = [one.replace("{}", str(raw)) for one in case.arguments]
    assert main(["prepare", name, *arguments, "--out", str(out)]) == 0
    assert case.refused is None or refusals(out) == list(case.refused)
    report = json.loads((out / "report.json").read_text())
    return Prepared(f"{out}:eval", report.get("media_root", str(raw)))


def config_of(folder: Path, prepared: Prepared, protocol: str | None, **sections: Any) -> Path:
    """A configuration that evaluates the tiny model on a set named "mine"."""
    whole: dict[str, Any] = {
        "run": {"dir": str(folder / "runs" / "unused")},
        "model": {"path": MODEL},
        "data": {"eval": {"mine": prepared.records}, "media_root": prepared.media_root},
        "media": {"workers": 0},
        "training": {"steps": 1, "torch_threads": 1},
        "eval": {} if protocol is None else {"protocols": {"mine": protocol}},
        "observe": {"trackers": [], "report": False},
    }
    for name, values in sections.items():
        whole[name] = whole.get(name, {}) | values
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(whole))
    return path


def prompts(folder: Path, prepared: Prepared, protocol: str | None, **sections: Any) -> dict[str, dict[str, Any]]:
    """``vlm-pg eval --prompts``: the line of each question by its id."""
    config = config_of(folder, prepared, protocol, **sections)
    assert main(["eval", "--config", str(config), "--prompts", "mine"]) == 0
    lines = (folder / "runs" / "unused" / "prompts" / "prompts_mine.jsonl").read_text("utf-8").splitlines()
    return {row["id"]: row for row in map(json.loads, lines)}


def score(
    folder: Path,
    records: str,
    outputs: Mapping[str, str | Sequence[str]],
    protocol: str | None = None,
    reader: str | None = None,
) -> Scored:
    """``vlm-pg score SET OUTPUTS.json``; in its default folder, beside the outputs."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "outputs.json"
    path.write_text(json.dumps(outputs), encoding="utf-8")
    options = [] if protocol is None else ["--protocol", protocol]
    options += [] if reader is None else ["--reader", reader]
    assert main(["score", records, str(path), *options]) == 0
    out = folder / "scored-outputs"
    [(name, row)] = json.loads((out / "result.json").read_text())["sets"].items()
    lines = map(json.loads, (out / f"answers_{name}.jsonl").read_text("utf-8").splitlines())
    assert (out / "report.html").is_file()
    return Scored(row, {line["sample_id"]: line for line in lines})


def check_table(folder: Path, prepared: Prepared, table: Sequence[Row], protocol: str) -> tuple[Scored, Scored]:
    """Score the table's outputs by both readers: each says of every output what the table has; their results.

    Several rows of one question are its outputs, in order.
    """
    outputs: dict[str, list[str]] = {}
    for row in table:
        outputs.setdefault(row.name, []).append(row.output)
    found = []
    for reader in ("ours", "published"):
        scored = score(folder / reader, prepared.records, outputs, protocol, reader)
        said = {name: iter(line["outputs"]) for name, line in scored.answers.items()}
        other = []
        for row in table:
            one, (answer, value) = next(said[row.name]), getattr(row, reader)
            close = value if value is None else pytest.approx(value, abs=1e-6)
            if (one["answer"], one["score"]) != (answer, close):
                other.append((row.name, row.output, "read", one["answer"], one["score"], "expected", answer, value))
        assert not other, f"{reader}: {other}"
        found.append(scored)
    return found[0], found[1]


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
        self._prepared = prepare(pipeline, folder, Published(files, arguments=arguments, refused=None))
        self.samples: dict[str, Sample] = {one.sample_id: one for one in records(self.out, "eval")}
        self.refused = {name: reason for _, name, reason in refusals(self.out)}
        self.report: dict[str, Any] = json.loads((self.out / "report.json").read_text())

    def prompts(self, protocol: str) -> dict[str, dict[str, Any]]:
        """The lines of ``vlm-pg eval --prompts``, by question."""
        return prompts(self.folder, self._prepared, protocol)

    def score(self, table: Table, place: int, protocol: str, reader: str) -> tuple[dict[str, Any], dict[str, Said]]:
        """``vlm-pg score`` of a table's outputs: the set's figures, and what was said of each question's output."""
        outputs = {question: output for question, output, *_ in table if output is not None}
        scored = score(self.folder / f"scored-{place}", self._prepared.records, outputs, protocol, reader)
        return scored.row, {name: _said(line) for name, line in scored.answers.items()}


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
