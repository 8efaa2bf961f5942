"""``vlm-pg plan``: bytes by part and phase, before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vlm_pg.bench.shapes import PUBLISHED
from vlm_pg.errors import ConfigError
from vlm_pg.models.settings import ModelSettings
from vlm_pg.plan.check import model_shape, sequence_ranks
from vlm_pg.plan.memory import plan_to_fit
from vlm_pg.plan.report import published_lines, verdict_lines
from vlm_pg.plan.setup import setup_of
from vlm_pg.plan.shape import ModelShape, counted_shape_of, published_config

TABLE = tuple(name for name in PUBLISHED if name.startswith("Qwen2.5-VL"))


def plan(config: Any, gpu_gib: float, gpus: int) -> bool:
    """Print the plan of a run (``RunConfig``); whether it fits.

    Raises:
        ConfigError: as ``check_ranks``, or a DeepSpeed file that cannot be used.
        ModelError: no config there, or no registered family.
    """
    sequence_parallel = sequence_ranks(config)
    check_ranks(gpus, sequence_parallel)
    shape = model_shape(config, counted=True)
    setup = setup_of(config, shape, gpus, sequence_parallel)
    for line in verdict_lines(shape, setup, gpu_gib):
        print(line)
    return plan_to_fit(shape, setup, gpu_gib).fits(gpu_gib)


def print_published(gpu_gib: float) -> None:
    """The table of Qwen2.5-VL's four sizes."""
    for line in published_lines([published_shape(name) for name in TABLE], gpu_gib):
        print(line)


def published_shape(name: str) -> ModelShape:
    return replace(counted_shape_of(published_config(name), ModelSettings(path=name)), name=name)


def check_ranks(ranks: int, sequence_parallel: int) -> None:
    """Raise ConfigError for processes that cannot be divided so."""
    if ranks % sequence_parallel:
        raise ConfigError(
            f"training.sequence_parallel is {sequence_parallel}, which does not divide {ranks} GPUs. Choose a divisor."
        )
