"""The user's DeepSpeed file: read, checked, completed; and its optimizer."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from vlm_pg.distributed import max_over_ranks
from vlm_pg.errors import ConfigError
from vlm_pg.training.settings import TrainingSettings

logger = logging.getLogger(__name__)


def read_deepspeed_config(settings: TrainingSettings) -> dict[str, Any]:
    """The user's DeepSpeed file with the settings of this program.

    Raises:
        ConfigError: no JSON file, or one that cannot be trained with.
    """
    assert settings.deepspeed_config is not None  # ``TrainingSettings.impossible``
    path = Path(settings.deepspeed_config)
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"training.deepspeed_config {str(path)!r} cannot be read as JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"training.deepspeed_config {str(path)!r} holds no JSON object. See configs/deepspeed/.")
    for fault in _faults(config):
        raise ConfigError(f"{path} {fault}")
    return config | {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.max_grad_norm,
        "zero_allow_untested_optimizer": True,
    }


def offloads_optimizer(config: dict[str, Any]) -> bool:
    """Whether optimizer states lie outside the device's memory."""
    return (config["zero_optimization"].get("offload_optimizer") or {}).get("device", "none") != "none"


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
            optimizer.register_step_pre_hook(_reset_bias_corrections)
            return optimizer
        config["zero_force_ds_cpu_optimizer"] = False
    return torch.optim.AdamW(list(groups), **values)


def _reset_bias_corrections(optimizer: Any, *_: Any) -> None:
    """Before a step of ``DeepSpeedCPUAdam``: make its bias corrections a function of the step's number alone.

    Its native part accumulates powers of the betas from step to step in fp32, but recomputes them after a jump, with
    which a resumed run begins; the two differ in the last bits. A call with step 0 makes every step such a jump.
    """
    group, empty = optimizer.param_groups[0], [torch.zeros(1) for _ in range(4)]
    beta1, beta2 = group["betas"]
    optimizer.ds_opt_adam.adam_update(optimizer.opt_id, 0, 0.0, beta1, beta2, 1.0, 0.0, False, *empty)


def _cpu_adam_builds(device: torch.device) -> bool:
    """The same on all ranks: two optimizers in one run would be two updates."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    failure = ""
    # DeepSpeed installs ninja into the interpreter's folder, which is on the path only of an activated environment.
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    try:
        CPUAdamBuilder().load(verbose=False)
    except Exception as error:  # of any compiler, linker or installation
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


# Decided by this program; a file that sets them would be overridden silently.
OWN_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "gradient_allreduce_op",
    "prescale_gradients",
    "gradient_predivide_factor",
    "optimizer",
    "scheduler",
    "bf16",
    "fp16",
    "data_types",
    "communication_data_type",
)
# Of DeepSpeed's own checkpoints, of which none is written.
_CHECKPOINT_KEYS = ("checkpoint", "datastates_ckpt", "nebula")
_OFFLOADS = ("offload_optimizer", "offload_param")


def _faults(config: dict[str, Any]) -> Iterator[str]:
    """Messages without their subject, lazily: a check may rely on those before it."""
    zero = config.get("zero_optimization", {})
    if not isinstance(zero, dict):
        yield f'sets zero_optimization to {zero!r}. Allowed is an object, such as {{"stage": 2}}.'
    stage = zero.get("stage", 0)
    if stage not in (1, 2, 3):
        yield (
            f"has ZeRO stage {stage}, under which DeepSpeed steps without telling the gradient's norm. Set "
            "zero_optimization.stage to 1, 2 or 3."
        )
    if old := sorted(name for name in zero if name.startswith("cpu_offload")):
        yield (
            f"sets zero_optimization.{', '.join(old)}, DeepSpeed's old names for offloading. Set "
            'zero_optimization.offload_optimizer, or in stage 3 offload_param, to {"device": "cpu"} instead.'
        )
    if zero.get("compute_grad_norm") is False:
        yield (
            "sets zero_optimization.compute_grad_norm to false, but every step clips by the gradient's norm and logs "
            "it. Remove it."
        )
    if clashes := sorted(set(config) & set(OWN_KEYS)):
        yield (
            f"sets {', '.join(clashes)}, which the training and model sections decide. Remove them from the file and "
            "use training.micro_batch_tokens, training.learning_rate, training.max_grad_norm and model.dtype."
        )
    if unused := sorted(set(config) & set(_CHECKPOINT_KEYS)):
        yield (
            f"sets {', '.join(unused)}, which is about checkpoints of DeepSpeed's own, and none is written. Remove it; "
            "see training.checkpoint_every and training.keep_checkpoints."
        )
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    try:
        DeepSpeedZeroConfig(**zero)  # unknown names, values of another kind or out of range, impossible combinations
    except Exception as error:  # pydantic's, and any of DeepSpeed's validators
        yield f"has a section zero_optimization that DeepSpeed refuses: {error}"
    yield from _offload_faults(zero)


def _offload_faults(zero: dict[str, Any]) -> Iterator[str]:
    stage, optimizer = zero["stage"], zero.get("offload_optimizer") or {}
    devices = {name: (zero.get(name) or {}).get("device", "none") for name in _OFFLOADS}
    on_nvme = [name for name, device in devices.items() if device == "nvme"]
    if stage < 3 and devices["offload_param"] != "none":
        yield (
            f"offloads weights (zero_optimization.offload_param) in stage {stage}, in which every rank holds all of "
            "them. Set zero_optimization.stage to 3, or remove offload_param."
        )
    if stage < 3 and on_nvme:
        yield (
            f"sets zero_optimization.{on_nvme[0]} to device nvme in stage {stage}. DeepSpeed reaches NVMe in stage 3 "
            "only. Set zero_optimization.stage to 3, or device to cpu."
        )
    for name in on_nvme:
        if not zero[name].get("nvme_path"):
            yield (
                f"sets zero_optimization.{name} to device nvme without nvme_path. Set nvme_path to a folder on the "
                "NVMe disk of each host."
            )
    # Optimizer states that a checkpoint does not reach, or that do not follow the run's learning rate.
    if optimizer.get("ratio", 1.0) < 1.0:
        yield (
            "offloads a part of the optimizer's states (zero_optimization.offload_optimizer.ratio). DeepSpeed updates "
            "the rest at the learning rate the run began with. Remove ratio."
        )
    if name := "offload_optimizer.super_offload" if optimizer.get("super_offload") else "zenflow" * ("zenflow" in zero):
        yield (
            f"sets zero_optimization.{name}, which keeps optimizer states where a checkpoint does not reach them. "
            "Remove it; offload_optimizer alone keeps them in the host's memory."
        )
    if on_nvme:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        if not AsyncIOBuilder().is_compatible(verbose=False):
            yield (
                f"sets zero_optimization.{' and '.join(on_nvme)} to device nvme, and DeepSpeed's async_io cannot be "
                "built on this machine: it needs a C++ compiler and libaio with its headers (libaio-dev, "
                "libaio-devel). Install them, or set device to cpu (configs/deepspeed/zero3_offload.json)."
            )
