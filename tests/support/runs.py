"""Whole runs as a user starts them: a config file, the command line, a run folder."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.support.processes import ROOT as ROOT
from tests.support.processes import ModuleProcess
from tests.support.tiny import tiny_model, tiny_processor


def save_tiny_model(folder: Path, family: str = "qwen2_5_vl") -> Path:
    """The random tiny model as a checkpoint folder."""
    tiny_model(family).save_pretrained(folder)
    tiny_processor(family).save_pretrained(folder)
    return folder


def write_config(path: Path, sections: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(sections))
    return path


def deepspeed_config(folder: Path, stage: int) -> Path:
    """The shipped file, except that under ZeRO-3 no weight is too small to be sharded."""
    settings = json.loads((ROOT / f"configs/deepspeed/zero{stage}.json").read_text())
    if stage == 3:
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    path = folder / "deepspeed.json"
    path.write_text(json.dumps(settings))
    return path


def run_cli(*arguments: str, timeout_seconds: float = 600, **environment: str) -> subprocess.CompletedProcess[str]:
    """``vlm-pg ARGUMENTS`` in a process of its own, on one thread."""
    return ModuleProcess("vlm_pg.cli", *arguments, environment=environment).finish(timeout_seconds)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def eval_config(folder: Path, sets: Mapping[str, Path | str], **sections: Mapping[str, Any]) -> Path:
    """A configuration in ``folder`` that evaluates the tiny model on prepared sets, results in its folder ``runs``."""
    whole: dict[str, Any] = {
        "run": {"dir": str(folder / "runs" / "unused")},
        "model": {"path": str(ROOT / "assets/tiny-qwen2_5-vl")},
        "data": {"eval": {name: str(records) for name, records in sets.items()}},
        "media": {"workers": 0},
        "training": {"steps": 1, "torch_threads": 1},
        "observe": {"trackers": [], "report": False},
    }
    return write_config(folder / "run.yaml", whole | sections)
