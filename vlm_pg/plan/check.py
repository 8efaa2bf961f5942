"""Whether a run fits into memory: asked before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vlm_pg.errors import ConfigError, ModelError, VlmPgError
from vlm_pg.memory import GIB
from vlm_pg.plan.memory import plan_memory, plan_to_fit
from vlm_pg.plan.report import size_text, verdict
from vlm_pg.plan.setup import setup_of
from vlm_pg.plan.shape import ModelShape, counted_shape_of, shape_of

# Plans are within so much of what was measured: what exceeds a GPU by less may fit.
ERROR = 0.15


def model_shape(config: Any, counted: bool = False) -> ModelShape:
    """Of the model that a run's configuration names, from its config.json; an adapter's folder names its base.

    ``counted``: its activations are counted on the model's own code, in seconds; else formulas say what they take.

    Raises:
        ModelError: no config there, or no registered family.
    """
    from vlm_pg.models.loading import load_config
    from vlm_pg.models.lora import adapter_base

    path = adapter_base(config.model.path) or config.model.path
    loaded = load_config(str(path), config.model)
    try:
        return (counted_shape_of if counted else shape_of)(loaded, config.model)
    except VlmPgError:
        raise
    except Exception as error:  # of odd values in the file, anything
        raise ModelError(
            f"The model at {str(path)!r} has a config of which no model can be made: {error} Copy config.json from "
            "the checkpoint the model comes from."
        ) from error


def sequence_ranks(config: Any) -> int:
    """Ranks that work on one sequence; 1 where the configuration has no such setting."""
    return int(getattr(config.training, "sequence_parallel", 1))


def check_fits(
    config: Any,
    ranks: int,
    gpu_bytes: int | None,
    say: Callable[[str], None],
) -> None:
    """Say in a line what a rank will need, and whether that fits; refuse what cannot fit, were the plan ``ERROR`` off.

    Args:
        config: the run's ``RunConfig``.
        ranks: processes of the run.
        gpu_bytes: memory of this rank's GPU; None on a CPU, where only the line is said.

    Raises:
        ConfigError: it needs more than the GPU has; with the first setting to change.
        ModelError: as ``model_shape``.
    """
    shape = model_shape(config, counted=gpu_bytes is not None)
    setup = setup_of(config, shape, ranks, sequence_ranks(config))
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
