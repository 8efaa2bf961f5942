"""``vlm-pg eval``: which config and which weights are meant."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from vlm_pg.errors import CheckpointError, ConfigError
from vlm_pg.observe.text import visible

CHECKPOINTS = "checkpoints"
_HOW = "Give a checkpoint, a run's folder, or a model folder together with --config CONFIG."


@dataclass(frozen=True)
class Evaluation:
    """``checkpoint`` None means the model that the config itself names."""

    config: Path
    checkpoint: Path | None


def choose_evaluation(target: str | None, config: Path | None, default_run: str) -> Evaluation:
    """What to evaluate.

    ``target`` may be a run's folder (its newest checkpoint), a checkpoint, a model folder (with ``config``), or a
    config file. Without a target it is ``default_run``, unless there is a ``config``: then the model which that names.

    Raises:
        ConfigError: the target does not exist, or no config belongs to it.
        CheckpointError: the run has no complete checkpoint, or the one given is not complete.
    """
    if target is None and config is not None:
        return Evaluation(config, None)
    path = Path(default_run if target is None else target)
    if not path.exists():
        hint = "Run bash scripts/train_video.sh first, or name another." if target is None else _HOW
        raise ConfigError(f"{path} does not exist. It must be a checkpoint or a run's folder. {hint}")
    if path.is_file():
        return _from_file(path, config)
    if (path / "config.yaml").is_file():
        return Evaluation(config or path / "config.yaml", _newest_checkpoint(path))
    config = config or _config_above(path)
    if config is None:
        raise ConfigError(
            f"{path} lies in no run's folder, so there is no config.yaml to take data and prompts from. {_HOW}"
        )
    if path.resolve().parent.name == CHECKPOINTS:
        _refuse_incomplete(path)
    return Evaluation(config, path)


def _from_file(path: Path, config: Path | None) -> Evaluation:
    if config is not None or path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{path} is a file. Weights are given as a folder, a config as --config CONFIG. {_HOW}")
    return Evaluation(path, None)


def _config_above(path: Path) -> Path | None:
    from vlm_pg.eval.folder import run_above

    run = run_above(path)
    return None if run is None else run / "config.yaml"


def _newest_checkpoint(run_dir: Path) -> Path:
    from vlm_pg.training.checkpoints import candidates, find_checkpoints, problem_with

    found = find_checkpoints(run_dir / CHECKPOINTS)
    for step, path in candidates(run_dir / CHECKPOINTS):
        if not found or step > found[-1][0]:
            print(visible(f"warning: {path} is passed over: {problem_with(path)}"), file=sys.stderr)
    if not found:
        raise CheckpointError(
            f"{run_dir} holds no complete checkpoint. A run saves one at its end, and every training.checkpoint_every "
            f"steps. Finish it with run.resume=auto, or evaluate the model it starts from: "
            f"vlm-pg eval --config {run_dir / 'config.yaml'}."
        )
    return found[-1][1]


def _refuse_incomplete(path: Path) -> None:
    from vlm_pg.training.checkpoints import problem_with

    problem = problem_with(path)
    if problem is not None:
        raise CheckpointError(
            f"{path} is not a complete checkpoint: {problem}. Only checkpoints that were saved to their end are used. "
            "Give the run's folder to take its newest complete one."
        )
