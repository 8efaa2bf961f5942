"""What DeepSpeed, or this program with it, would stumble over in a DeepSpeed file: refused before loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlm_pg.errors import ConfigError

# What this program decides itself; a config file that sets them would be contradicted in silence.
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
# About checkpoints of DeepSpeed's own, of which none is written.
_CHECKPOINT_KEYS = ("checkpoint", "datastates_ckpt", "nebula")
_OFFLOADS = ("offload_optimizer", "offload_param")


def check_deepspeed_config(path: Path, config: dict[str, Any]) -> None:
    """
    Raises:
        ConfigError: the file in ``path``, with this content, cannot be trained with.
    """
    zero = config.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ConfigError(f'{path} sets zero_optimization to {zero!r}. Allowed is an object, such as {{"stage": 2}}.')
    _refuse_stages(path, zero)
    clashes = sorted(set(config) & set(OWN_KEYS))
    if clashes:
        raise ConfigError(
            f"{path} sets {', '.join(clashes)}, which the training and model sections decide. Remove them from the "
            "file and use training.micro_batch_tokens, training.learning_rate, training.max_grad_norm and model.dtype."
        )
    if unused := sorted(set(config) & set(_CHECKPOINT_KEYS)):
        raise ConfigError(
            f"{path} sets {', '.join(unused)}, which is about checkpoints of DeepSpeed's own, and none is written. "
            "Remove it; see training.checkpoint_every and training.keep_checkpoints."
        )
    _refuse_offloads(path, zero)
    _ask_deepspeed(path, zero)


def _refuse_stages(path: Path, zero: dict[str, Any]) -> None:
    stage = zero.get("stage", 0)
    if stage not in (1, 2, 3):
        raise ConfigError(
            f"{path} has ZeRO stage {stage}, under which DeepSpeed steps without telling the gradient's norm. Set "
            "zero_optimization.stage to 1, 2 or 3."
        )
    for name in _OFFLOADS:
        if not isinstance(zero.get(name) or {}, dict):
            raise ConfigError(
                f"{path} sets zero_optimization.{name} to {zero[name]!r}. Allowed is an object, such as "
                '{"device": "cpu"}.'
            )
    if old := sorted(name for name in zero if name.startswith("cpu_offload")):
        raise ConfigError(
            f"{path} sets zero_optimization.{', '.join(old)}, DeepSpeed's old names for offloading. Set "
            'zero_optimization.offload_optimizer, or in stage 3 offload_param, to {"device": "cpu"} instead.'
        )
    if zero.get("compute_grad_norm") is False:
        raise ConfigError(
            f"{path} sets zero_optimization.compute_grad_norm to false, but every step clips by the gradient's norm "
            "and logs it. Remove it."
        )


def _refuse_offloads(path: Path, zero: dict[str, Any]) -> None:
    stage = zero["stage"]
    devices = {name: (zero.get(name) or {}).get("device", "none") for name in _OFFLOADS}
    if stage < 3 and devices["offload_param"] != "none":
        raise ConfigError(
            f"{path} offloads weights (zero_optimization.offload_param) in stage {stage}, in which every rank holds "
            "all of them. Set zero_optimization.stage to 3, or remove offload_param."
        )
    on_nvme = [name for name, device in devices.items() if device == "nvme"]
    if stage < 3 and on_nvme:
        raise ConfigError(
            f"{path} sets zero_optimization.{on_nvme[0]} to device nvme in stage {stage}. DeepSpeed reaches NVMe in "
            "stage 3 only. Set zero_optimization.stage to 3, or device to cpu."
        )
    for name in on_nvme:
        if not zero[name].get("nvme_path"):
            raise ConfigError(
                f"{path} sets zero_optimization.{name} to device nvme without nvme_path. Set nvme_path to a folder on "
                "the NVMe disk of each host."
            )
    _refuse_states_elsewhere(path, zero)
    if on_nvme:
        _refuse_without_async_io(path, on_nvme)


def _refuse_states_elsewhere(path: Path, zero: dict[str, Any]) -> None:
    """Optimizer states that a checkpoint does not reach, or that do not follow the run's learning rate."""
    offload = zero.get("offload_optimizer") or {}
    if offload.get("ratio", 1.0) < 1.0:
        raise ConfigError(
            f"{path} offloads a part of the optimizer's states (zero_optimization.offload_optimizer.ratio). DeepSpeed "
            "updates the rest at the learning rate the run began with. Remove ratio."
        )
    if name := "offload_optimizer.super_offload" if offload.get("super_offload") else "zenflow" * ("zenflow" in zero):
        raise ConfigError(
            f"{path} sets zero_optimization.{name}, which keeps optimizer states where a checkpoint does not reach "
            "them. Remove it; offload_optimizer alone keeps them in the host's memory."
        )


def _refuse_without_async_io(path: Path, names: list[str]) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise ConfigError(
            f"{path} sets zero_optimization.{' and '.join(names)} to device nvme, and DeepSpeed's async_io cannot be "
            "built on this machine: it needs a C++ compiler and libaio with its headers (libaio-dev, libaio-devel). "
            "Install them, or set device to cpu (configs/deepspeed/zero3_offload.json)."
        )


def _ask_deepspeed(path: Path, zero: dict[str, Any]) -> None:
    """Whether DeepSpeed itself reads the section: unknown names, values out of range, what it cannot combine."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    try:
        DeepSpeedZeroConfig(**zero)
    except Exception as error:  # pydantic's, and whatever a validator of DeepSpeed's raises
        raise ConfigError(f"{path} has a section zero_optimization that DeepSpeed refuses: {error}") from error
