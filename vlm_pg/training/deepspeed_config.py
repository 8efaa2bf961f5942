"""The user's DeepSpeed file: read, checked, completed, and the optimizer that fits it."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vlm_pg.distributed import max_over_ranks
from vlm_pg.errors import ConfigError
from vlm_pg.training.deepspeed_checks import check_deepspeed_config
from vlm_pg.training.settings import TrainingSettings

logger = logging.getLogger(__name__)


def read_deepspeed_config(settings: TrainingSettings) -> dict[str, Any]:
    """The user's DeepSpeed file with the parts this program decides.

    Raises:
        ConfigError: no file, not JSON, or what ``check_deepspeed_config`` refuses.
    """
    if settings.deepspeed_config is None:
        raise ConfigError(
            "training.engine is deepspeed but training.deepspeed_config is not set. Give a DeepSpeed JSON file, for "
            "example training.deepspeed_config=configs/deepspeed/zero2.json."
        )
    path = Path(settings.deepspeed_config)
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"training.deepspeed_config {str(path)!r} cannot be read: {error}.") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"training.deepspeed_config {str(path)!r} is not JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"training.deepspeed_config {str(path)!r} holds no JSON object. See configs/deepspeed/.")
    check_deepspeed_config(path, config)
    return config | {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.max_grad_norm,
        "zero_allow_untested_optimizer": True,
    }


def offloads_optimizer(config: dict[str, Any]) -> bool:
    """Whether optimizer states lie outside the device's memory."""
    place = config["zero_optimization"].get("offload_optimizer") or {}
    return place.get("device", "none") != "none"


def make_optimizer(
    groups: Sequence[dict[str, Any]], settings: TrainingSettings, config: dict[str, Any], device: torch.device
) -> torch.optim.Optimizer:
    """AdamW over groups of weights: torch's, or DeepSpeed's for CPUs where optimizer states are offloaded.

    DeepSpeed's compiles a C++ extension at its first use on a machine. Where that fails, or where the file has
    ``zero_force_ds_cpu_optimizer: false``, offloaded states are updated by torch's AdamW: the same update, slower.
    ``config`` is changed so that DeepSpeed accepts the choice.
    """
    values: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": settings.betas,
        "eps": settings.adam_epsilon,
        "weight_decay": settings.weight_decay,
    }
    if offloads_optimizer(config) and config.get("zero_force_ds_cpu_optimizer", True):
        if _cpu_adam_builds(device):
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            optimizer = DeepSpeedCPUAdam(list(groups), adamw_mode=True, **values)
            optimizer.register_step_pre_hook(_forget_products)
            return optimizer
        config["zero_force_ds_cpu_optimizer"] = False
    return torch.optim.AdamW(list(groups), **values)


def _forget_products(optimizer: Any, *_: Any) -> None:
    """Before a step of ``DeepSpeedCPUAdam``: its bias corrections become a function of the step's number alone.

    Its native part multiplies the powers of the betas up from step to step in fp32, but computes them anew after a
    jump, and a run that is resumed begins with a jump. The two differ in the last bits. A call with step 0 makes every
    step such a jump.
    """
    group, nothing = optimizer.param_groups[0], [torch.zeros(1) for _ in range(4)]
    beta1, beta2 = group["betas"]
    optimizer.ds_opt_adam.adam_update(optimizer.opt_id, 0, 0.0, beta1, beta2, 1.0, 0.0, False, *nothing)


def _cpu_adam_builds(device: torch.device) -> bool:
    """On all ranks, for two optimizers in one run would be two updates."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    failure = ""
    # ninja comes with DeepSpeed into the folder of the interpreter, which is on the path only where that was activated.
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    try:
        CPUAdamBuilder().load(verbose=False)
    except Exception as error:  # whatever a compiler, a linker or an installation may lack
        failure = f"{type(error).__name__}: {error}"[:300]
    if max_over_ranks({"failed": float(bool(failure))}, device)["failed"] == 0:
        return True
    logger.warning(
        "DeepSpeed's Adam for CPUs cannot be built (%s): offloaded optimizer states are updated by torch's AdamW, "
        "which gives the same weights and takes longer. It needs a C++ compiler and ninja; to choose torch's on "
        'purpose, set "zero_force_ds_cpu_optimizer": false in training.deepspeed_config.',
        failure or "on another rank",
    )
    return False
