"""What a run saves and how it finds its way back."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from vlm_pg.config import RunConfig
from vlm_pg.errors import CheckpointError
from vlm_pg.models.policy import Policy
from vlm_pg.training import checkpoints
from vlm_pg.training.distributed import barrier, gather_objects, rank
from vlm_pg.training.engines import Engine

# What a checkpoint was written under that does not say: there was no choice then.
UNSAID = {"model.positions": "transformers"}


def save_checkpoint(folder: Path, step: int, policy: Policy, engine: Engine, state: dict[str, Any]) -> None:
    """A transformers checkpoint with processor and optimizer state; called on every rank, committed by rank 0.

    Of a model with a LoRA adapter transformers saves the adapter alone, in peft's format.
    """
    temporary = folder / f".tmp-step-{step:06d}"
    if rank() == 0:
        checkpoints.begin(folder, step)
    barrier()
    with engine.full_weights():
        if rank() == 0:
            policy.model.save_pretrained(temporary)
            policy.processor.save_pretrained(temporary)
    engine.save_optimizer(temporary)
    barrier()
    if rank() == 0:
        checkpoints.commit(temporary, step, state)
    barrier()


def checkpoint_settings(config: RunConfig) -> dict[str, Any]:
    """Settings that decide what a checkpoint holds, and at which positions its weights were trained.

    Resuming under others would lose or invent optimizer state, or change the model's input in the middle of a run.
    """
    return {
        "training.engine": config.training.engine,
        "model.dtype": config.model.dtype,
        "model.train_vision": config.model.train_vision,
        "model.positions": config.model.positions,
        "model.lora": None if config.model.lora is None else config.model.lora.model_dump(mode="json"),
        "run.seed": config.run.seed,
    }


def checkpoint_to_resume(config: RunConfig, folder: Path, warn: Callable[[str], None]) -> Path | None:
    """The checkpoint ``run.resume`` asks for, its files verified by rank 0; None to start anew.

    ``auto`` takes the newest one that is whole and says which ones are not.

    Raises:
        CheckpointError: a named checkpoint is missing or damaged, or was written under settings that do not fit.
    """
    if config.run.resume == "never":
        return None
    choice = gather_objects(_choose(config, folder, warn) if rank() == 0 else None)[0]
    if isinstance(choice, str):
        raise CheckpointError(choice)
    return choice


def _choose(config: RunConfig, folder: Path, warn: Callable[[str], None]) -> Path | str | None:
    """The checkpoint, None, or what is wrong with the one asked for."""
    if config.run.resume == "auto":
        for _, path in reversed(checkpoints.find_checkpoints(folder)):
            problem = checkpoints.problem_with(path, check_hashes=True)
            if problem is None:
                return _misfit(config, path) or path
            warn(f"{path} is passed over: {problem}")
        return None
    path = Path(config.run.resume)
    if not path.is_dir():
        return (
            f"run.resume is {config.run.resume!r}, which is not a folder. Give never, auto, or a checkpoint folder "
            f"such as {folder}/step-000100."
        )
    problem = checkpoints.problem_with(path, check_hashes=True)
    if problem is not None:
        return (
            f"{path} is not a usable checkpoint: {problem}. Choose another one of its run, or run.resume=auto to go on "
            "from the newest complete one."
        )
    return _misfit(config, path) or path


def _misfit(config: RunConfig, path: Path) -> str | None:
    """Which settings of this run do not fit the checkpoint, in words."""
    then, now = UNSAID | checkpoints.read_state(path)["settings"], checkpoint_settings(config)
    changed = ", ".join(f"{key}={now[key]} (it has {then.get(key)})" for key in now if now[key] != then.get(key))
    if not changed:
        return None
    return (
        f"{path} cannot be continued with {changed}. Resume with the settings it was written under, or start a new run "
        f"with model.path={path}."
    )


def abandon_later(folder: Path, step: int, warn: Callable[[str], None]) -> None:
    """Move checkpoints beyond ``step`` aside: they belong to a branch that is left by resuming from an earlier one."""
    later = [path for number, path in checkpoints.find_checkpoints(folder) if number > step]
    if not later:
        return
    aside = folder / f"abandoned-{datetime.now():%Y%m%d-%H%M%S}"
    aside.mkdir()
    for path in later:
        path.rename(aside / path.name)
    warn(f"resuming after step {step}: moved {len(later)} later checkpoint(s) to {aside}")


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
