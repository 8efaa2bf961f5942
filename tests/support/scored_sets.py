"""An evaluation set end to end through the commands: published files, prepared, prompted, outputs scored."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.support.processes import ROOT
from tests.support.published.case import Published, lay_out, refusals
from vlm_pg.cli import main

MODEL = str(ROOT / "assets" / "tiny-qwen2_5-vl")


@dataclass(frozen=True)
class Scored:
    """``row``: the set's entry in result.json. ``answers``: the lines of its answers by question id."""

    row: dict[str, Any]
    answers: dict[str, dict[str, Any]] = field(hash=False)

    @property
    def counts(self) -> dict[str, int]:
        """The counts of questions and of unread outputs that are not 0, without ``n_``."""
        counts = {name[2:]: value for name, value in self.row.items() if name.startswith("n_") and value}
        return {name: value for name, value in counts.items() if name != "outputs"}

    @property
    def figures(self) -> dict[str, float | None]:
        """Figures of the whole set, each in its own unit."""
        return {name: one["value"] for name, one in self.row["figures"].items()}

    def group(self, key: str) -> dict[str, tuple[float | None, int]]:
        """Mean and number of scored questions of each group."""
        groups = {name: (one["value"], one["n"]) for name, one in self.row["groups"][key].items()}
        return {name: (None if value is None else round(value, 6), n) for name, (value, n) in groups.items()}


@dataclass(frozen=True)
class Prepared:
    """``records``: as commands take the split to evaluate on. ``media_root``: the folder of the media."""

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
