"""What a run saves and how it finds its way back."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from vlm_pg.config import RunConfig
from vlm_pg.distributed import ALONE, RankLayout, barrier
from vlm_pg.errors import CheckpointError
from vlm_pg.models.policy import Policy
from vlm_pg.observe.run_folder import free_name
from vlm_pg.training import checkpoints, history
from vlm_pg.training.engines import Engine
from vlm_pg.training.fit import misfit
from vlm_pg.training.state_files import Contents

# torch writes its files in C++, which says of a full disk that a stream failed.
_WRITE_FAILED = re.compile(r"PytorchStreamWriter|iostream|unexpected pos|write", re.IGNORECASE)


def save_checkpoint(folder: Path, step: int, policy: Policy, engine: Engine, state: dict[str, Any]) -> None:
    """A transformers checkpoint with processor and optimizer state; called on every rank, committed by rank 0.

    Of a model with a LoRA adapter transformers saves the adapter alone, in peft's format.

    Raises:
        CheckpointError: it could not be written; earlier ones are untouched.
    """
    temporary = folder / f".tmp-step-{step:06d}"
    try:
        if engine.ranks.is_first:
            checkpoints.begin(folder, step)
        barrier()
        engine.save_weights(temporary)
        if engine.ranks.is_first:
            policy.processor.save_pretrained(temporary)
        engine.save_optimizer(temporary)
        barrier()
        if engine.ranks.is_first:
            checkpoints.commit(temporary, step, state)
        barrier()
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _WRITE_FAILED.search(str(error)):
            raise
        if engine.ranks.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"The checkpoint of step {step} could not be written to {folder}: {error}. Make room or correct the "
            "permissions there, then go on from the newest one with run.resume=auto."
        ) from error


def checkpoint_to_resume(
    config: RunConfig,
    folder: Path,
    warn: Callable[[str], None],
    refused: Mapping[Path, str] | None = None,
    ranks: RankLayout = ALONE,
) -> Path | None:
    """The checkpoint ``run.resume`` asks for, its files verified by rank 0; None to start anew.

    ``auto`` takes the newest one that is whole and says which newer ones are not.

    Args:
        refused: checkpoints that could not be loaded, and why.

    Raises:
        CheckpointError: a named checkpoint is missing or damaged, or was written under settings that do not fit; with
            ``auto``: the folder holds a run, and no checkpoint of it can be used.
    """
    if config.run.resume == "never":
        return None
    choice = ranks.first_says(lambda: _choose(config, folder, warn, refused or {}))
    if isinstance(choice, str):
        raise CheckpointError(choice)
    return choice


def _choose(
    config: RunConfig, folder: Path, warn: Callable[[str], None], refused: Mapping[Path, str]
) -> Path | str | None:
    """The checkpoint, None, or what is wrong with the one asked for."""
    if config.run.resume == "auto":
        return _newest(config, folder, warn, refused)
    path = Path(config.run.resume)
    if not path.is_dir():
        return (
            f"run.resume is {config.run.resume!r}, which is not a folder. Give never, auto, or a checkpoint folder "
            f"such as {folder}/step-000100."
        )
    problem = _problem_with(path)
    if problem is not None:
        return (
            f"{path} is not a usable checkpoint: {problem}. Choose another one of its run, or run.resume=auto to go on "
            "from the newest complete one."
        )
    return misfit(config, path) or path


def _newest(
    config: RunConfig, folder: Path, warn: Callable[[str], None], refused: Mapping[Path, str]
) -> Path | str | None:
    try:
        found = checkpoints.candidates(folder)
    except OSError as error:
        return history.refusal(folder.parent, [f"{folder} cannot be read ({error.strerror or error})"])
    problems = []
    for _, path in reversed(found):
        problem = refused.get(path) or _problem_with(path)
        if problem is None:
            return misfit(config, path) or path
        problems.append(f"{path}: {problem}")
        if path not in refused:
            warn(f"{path} is passed over: {problem}")
    reason = None if problems else history.why_no_new_start(folder.parent, config.training.checkpoint_every)
    if reason is not None:
        problems.append(reason)
    return history.refusal(folder.parent, problems) if problems else None


def _problem_with(path: Path) -> str | None:
    return checkpoints.problem_with(path, check_hashes=True) or _state_problem(path) or _optimizer_problem(path)


def _optimizer_problem(path: Path) -> str | None:
    try:
        Contents.read(path)
    except CheckpointError as error:
        return str(error)
    return None


def _state_problem(path: Path) -> str | None:
    """What is wrong with the trainer's state of a checkpoint whose files are those of its manifest."""
    try:
        state = checkpoints.read_state(path)
    except (OSError, ValueError, RecursionError) as error:
        return f"{checkpoints.STATE} cannot be read ({type(error).__name__})"
    if not isinstance(state, dict):
        return f"{checkpoints.STATE} holds no object"
    counts = [name for name in ("step", "questions", "updates") if not _is_count(state.get(name, 0))]
    sums = [name for name in ("tokens_computed", "tokens_repeated") if not _is_sum(state.get(name, 0.0))]
    seconds, settings = state.get("seconds", {}), state.get("settings")
    if "step" not in state or counts or sums:
        return f"{checkpoints.STATE} has no usable value of {', '.join([*counts, *sums]) or 'step'}"
    if not isinstance(seconds, dict) or not all(map(_is_sum, seconds.values())):
        return f"{checkpoints.STATE} has no usable value of seconds"
    return None if isinstance(settings, dict) else f"{checkpoints.STATE} does not say the settings it was written under"


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= history.MAX_STEP


def _is_sum(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e30


def abandon_others(folder: Path, resumed: Path, step: int, warn: Callable[[str], None]) -> None:
    """Move checkpoints aside, whole or not, whose branch is left by going on from ``resumed``, which is at ``step``.

    Those are the later ones; all of them, where ``resumed`` itself lies elsewhere.
    """
    found = checkpoints.candidates(folder)
    elsewhere = resumed.resolve().parent != folder.resolve()
    later = [path for number, path in found if elsewhere or number > step]
    if not later:
        return
    aside = free_name(folder / "abandoned", f"{datetime.now():%Y%m%d-%H%M%S}", "-")
    aside.mkdir()
    for path in later:
        path.rename(aside / path.name)
    warn(f"resuming after step {step}: moved {len(later)} checkpoint(s) of another branch to {aside}")


def changed_settings(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """Settings that differ between two configurations, as ``key: old -> new``."""
    lines = []
    for key in sorted(set(before) | set(now)):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += changed_settings(old, new, f"{prefix}{key}.")
        elif old != new:
            lines.append(f"{prefix}{key}: {old} -> {new}")
    return lines
