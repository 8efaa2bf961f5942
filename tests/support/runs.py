"""Whole runs as a user starts them: a config file, the command line, a run folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.support.tiny import tiny_model, tiny_processor

ROOT = Path(__file__).parents[2]


def save_tiny_model(folder: Path) -> Path:
    """The random tiny model as a checkpoint folder."""
    tiny_model().save_pretrained(folder)
    tiny_processor().save_pretrained(folder)
    return folder


def write_config(path: Path, sections: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(sections))
    return path


def run_cli(*arguments: str, timeout_seconds: float = 600, **environment: str) -> subprocess.CompletedProcess[str]:
    """``vlm-pg ARGUMENTS`` in a process of its own, on one thread."""
    return subprocess.run(
        [sys.executable, "-m", "vlm_pg.cli", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environment,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
