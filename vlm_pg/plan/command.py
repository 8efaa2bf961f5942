"""``vlm-pg plan``: bytes by part and phase and the time to expect, before anything is loaded."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import Any

from vlm_pg.bench.shapes import PUBLISHED
from vlm_pg.errors import ConfigError, VlmPgError
from vlm_pg.models.settings import ModelSettings
from vlm_pg.plan.check import model_shape, sequence_ranks
from vlm_pg.plan.memory import plan_to_fit
from vlm_pg.plan.report import published_lines, verdict_lines
from vlm_pg.plan.setup import Setup, setup_of
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
    print(expected_line(config, setup))
    return plan_to_fit(shape, setup, gpu_gib).fits(gpu_gib)


def expected_line(config: Any, setup: Setup) -> str:
    """Expected seconds of one question with the largest prompt on one GPU, by kind of GPU; or why there are none.

    Counted on the model's own code with few layers (``vlm-pg bench paper``), which takes seconds.
    """
    from vlm_pg.bench.paper.contestants import tried
    from vlm_pg.bench.paper.devices import DEVICES
    from vlm_pg.bench.paper.plan import Model, phases_of
    from vlm_pg.bench.paper.record import entry_of
    from vlm_pg.bench.paper.roofline import LAUNCH_SECONDS
    from vlm_pg.bench.paper.table import seconds_words
    from vlm_pg.models.lora import adapter_base

    model, lora = config.model, config.model.lora
    spec = {"model": str(adapter_base(model.path) or model.path), "dtype": model.dtype, "liger": model.liger}
    spec |= {"checkpointing": model.gradient_checkpointing, "lora": lora and lora.rank}
    point = {"prefix": setup.prefix, "generations": setup.generations, "new_tokens": setup.response + 1}
    try:
        known = Model.of(spec["model"])
    except VlmPgError as error:
        return f"expected time: not counted: {error}"
    if known.linear:
        return (
            "expected time: not counted: torch's code runs linear-attention layers chunk by chunk, which would take "
            "minutes; vlm-pg bench paper counts it"
        )
    phases = phases_of(point, known, Namespace(few_layers=True, reference=False))
    times: dict[str, list[str]] = {name: [] for name in DEVICES}
    for phase in phases.values():
        entry = entry_of(spec | phase, tried(spec | phase), LAUNCH_SECONDS)
        if "not_counted" in entry:
            return f"expected time: not counted: {entry['not_counted']}"
        for name, words in times.items():
            words.append(seconds_words(entry["roofline"][name]["expected_seconds"]))
    of_gpus = "; ".join(f"{name} {' + '.join(words)}" for name, words in times.items())
    return f"expected time of such a question's {' + '.join(phases)} on one GPU, without tower and optimizer: {of_gpus}"


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
