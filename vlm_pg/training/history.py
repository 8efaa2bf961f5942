"""What a run's folder says about earlier steps, so that a run with a past is never begun anew in the same place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from vlm_pg.files import parse_json_line
from vlm_pg.observe.run_folder import RunFolder

# Beyond any run: a larger number stands in a damaged line.
MAX_STEP = 10**12


def why_no_new_start(run: Path, checkpoint_every: int) -> str | None:
    """Why a run without a checkpoint must not begin at step 1 in this folder; None if it may.

    Before the first checkpoint was due nothing is lost: the same steps are sampled again, alike. Afterwards there was
    one, and somebody or something has taken it away.

    Args:
        checkpoint_every: of this run; that of the folder's own configuration counts where it can be read.
    """
    folder = RunFolder(run)
    try:
        last = last_step(folder.metrics)
        has_rollouts = folder.rollouts.is_file() and folder.rollouts.stat().st_size > 0
        finished = _mapping(folder.summary).get("finished") is True
        every = _mapping(folder.config, "training").get("checkpoint_every")
        came_from = _mapping(folder.config, "run").get("resume")
    except OSError as error:
        return f"{error.filename or run} cannot be read ({error.strerror or error})"
    every = every if type(every) is int else checkpoint_every
    if last and isinstance(came_from, str) and came_from not in ("never", "auto"):
        return (
            f"{folder.config} says that the run went on from {came_from}, and it has no checkpoint of its own yet: "
            f"name that one again, run.resume={came_from}"
        )
    if finished:
        return f"{folder.summary} says that the run is finished, but there is no checkpoint in {folder.checkpoints}"
    if last is None and has_rollouts:
        return f"{folder.rollouts} has an earlier run's rollouts, but neither its metrics nor a checkpoint is there"
    if last is not None and every and last > every:
        return (
            f"{folder.metrics} goes to step {last}, with a checkpoint every {every} steps, but there is none in "
            f"{folder.checkpoints}"
        )
    return None


def last_step(metrics: Path) -> int | None:
    """The largest step in the file; damaged lines count as one step each. None for no file and no line."""
    if not metrics.is_file():
        return None
    largest, lines = 0, 0
    with metrics.open("rb") as file:
        for line in file:
            lines += 1
            step = (parse_json_line(line) or {}).get("step")
            if type(step) is int and 0 <= step <= MAX_STEP:
                largest = max(largest, step)
    return max(largest, lines) if lines else None


def refusal(run: Path, reasons: Sequence[str]) -> str:
    """The message of a run that stops because it could only erase what is there."""
    listed = "".join(f"\n  {reason}" for reason in reasons)
    return (
        f"{run} holds an earlier run that cannot be continued, and nothing in it was changed:{listed}\n"
        "Bring one of its checkpoints back (or name one with run.resume=FOLDER), or begin again in another folder with "
        f"run.dir={run}-2 run.resume=never. With run.resume=never alone this folder is moved aside first."
    )


def set_aside(run: Path) -> list[Path]:
    """Move logs of steps that are sampled again out of the way; their new places."""
    folder = RunFolder(run)
    stamp = f"{datetime.now():%Y%m%d-%H%M%S}"
    moved = []
    for path in (folder.metrics, folder.rollouts):
        if path.is_file() and path.stat().st_size:
            moved.append(path.rename(path.with_name(f"{path.name}.begun-again-{stamp}")))
    return moved


def _mapping(path: Path, *keys: str) -> dict[str, Any]:
    """What a YAML or JSON file holds under ``keys``; empty for what is absent, damaged or no mapping."""
    if not path.is_file():
        return {}
    text = path.read_bytes()
    try:
        value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError):
        return {}
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}
