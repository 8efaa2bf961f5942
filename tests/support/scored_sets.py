"""An evaluation set end to end through the commands: published files, prepared, asked, outputs written by hand, scored.

``Row`` is a line of a table that a reader can check: an output to a question, what each reader says of it, the score.
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
from tests.support.published.case import Published, lay_out, refusals
from vlm_pg.cli import main

MODEL = str(ROOT / "assets" / "tiny-qwen2_5-vl")
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
    assert refusals(out) == list(case.refused)
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
