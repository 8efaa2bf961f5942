"""``vlm-pg plan``, and the same check at a run's start, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vlm_pg.errors import ConfigError, ModelError, VlmPgError
from vlm_pg.memory import GIB
from vlm_pg.models.settings import ModelSettings
from vlm_pg.plan.memory import plan_memory, plan_to_fit
from vlm_pg.plan.report import published_lines, size_text, verdict, verdict_lines
from vlm_pg.plan.setup import setup_of
from vlm_pg.plan.shape import PUBLISHED, ModelShape, published_config, shape_of
from vlm_pg.plan.time import expected_line

TABLE = tuple(name for name in PUBLISHED if name.startswith("Qwen2.5-VL"))
# Plans are within so much of measured peaks: a run that exceeds a GPU by less may fit.
ERROR = 0.15


def plan(config: Any, gpu_gib: float, gpus: int) -> bool:
    """Print the plan of a run (``RunConfig``); whether it fits.

    Raises:
        ConfigError: GPUs that sequence parallelism does not divide, or a DeepSpeed file that cannot be used.
        ModelError: no config there, or no registered family.
    """
    sequence_parallel = config.training.sequence_parallel
    if gpus % sequence_parallel:
        raise ConfigError(
            f"training.sequence_parallel is {sequence_parallel}, which does not divide {gpus} GPUs. Choose a divisor."
        )
    shape = model_shape(config)
    setup = setup_of(config, shape, gpus)
    for line in verdict_lines(shape, setup, gpu_gib):
        print(line)
    print(expected_line(shape, setup, fused=config.model.liger is not False))
    return plan_to_fit(shape, setup, gpu_gib).fits(gpu_gib)


def print_published(gpu_gib: float) -> None:
    """Print the table of Qwen2.5-VL's four sizes."""
    for line in published_lines([published_shape(name) for name in TABLE], gpu_gib):
        print(line)


def published_shape(name: str) -> ModelShape:
    return replace(shape_of(published_config(name), ModelSettings(path=name)), name=name)


def model_shape(config: Any) -> ModelShape:
    """Of the model that a run's configuration names, from its config.json; an adapter's folder names its base.

    Raises:
        ModelError: no config there, or no registered family.
    """
    from vlm_pg.models.loading import load_config
    from vlm_pg.models.lora import adapter_base

    path = adapter_base(config.model.path) or config.model.path
    loaded = load_config(str(path), config.model)
    try:
        return shape_of(loaded, config.model)
    except VlmPgError:
        raise
    except Exception as error:  # odd values in the file raise anything
        raise ModelError(
            f"The model at {str(path)!r} has a config of which no model can be made: {error} Copy config.json from "
            "the checkpoint the model comes from."
        ) from error


def check_fits(config: Any, ranks: int, gpu_bytes: int | None, say: Callable[[str], None]) -> None:
    """Report in a line the memory a rank needs, and whether it fits; refuse runs that cannot, even ``ERROR`` off.

    Args:
        config: the run's ``RunConfig``.
        ranks: processes of the run.
        gpu_bytes: memory of this rank's GPU; None on a CPU, where only the line is reported.

    Raises:
        ConfigError: it needs more than the GPU has; with the first setting to change.
        ModelError: as ``model_shape``.
    """
    shape = model_shape(config)
    setup = setup_of(config, shape, ranks)
    if gpu_bytes is None:
        plan = plan_memory(shape, setup)
        say(f"memory: about {size_text(plan.peak, 2)} a process, most in the phase {plan.phase} (vlm-pg plan)")
        return
    line = verdict(shape, setup, gpu_bytes / GIB)
    if plan_to_fit(shape, setup, gpu_bytes / GIB).peak > (1 + ERROR) * gpu_bytes:
        raise ConfigError(
            f"The run's memory {line}. Nothing was loaded. vlm-pg plan CONFIG shows what takes how much, and the "
            "largest prompt and token budget that fit."
        )
    say(f"memory: {line}")
