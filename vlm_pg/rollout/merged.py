"""LoRA adapters merged into the weights during generation, so that no token pays for products of the adapter.

W of an adapted layer becomes W + s B A, computed in fp32 and rounded once, in place, for prefill and decode steps
alike. The original weights are backed up and copied back. Layers in 4 bits are replaced by a copy in the model's dtype.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from vlm_pg.distributed import SINGLE_SP_RANK, SequenceGroup
from vlm_pg.errors import ConfigError
from vlm_pg.memory import GIB, free_bytes
from vlm_pg.models.lora import has_adapter
from vlm_pg.models.policy import Policy
from vlm_pg.models.weights import is_quantized, is_sharded, num_elements
from vlm_pg.rollout.settings import SHARE_OF_FREE, RolloutSettings

# Weights that are updated at a time, so that fp32 copies stay small.
_CHUNK = 2**25
_NO_WEIGHT = torch.empty(0)


def mergeable_layers(policy: Policy, settings: RolloutSettings) -> tuple[list[Any], str | None]:
    """peft's layers whose adapters are merged for a generation, and why others, or all, are not.

    Raises:
        ConfigError: ``rollout.merge_adapter`` is true, and some cannot be.
    """
    if not has_adapter(policy.language_model):
        return [], None
    because, layers = _off_because(policy, settings), []
    if because is None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        adapted = [module for module in policy.language_model.modules() if isinstance(module, BaseTunerLayer)]
        found = [(layer, _obstacle(layer)) for layer in adapted if not (layer.merged or layer.disable_adapters)]
        layers = [layer for layer, obstacle in found if obstacle is None]
        others = Counter(obstacle for _, obstacle in found if obstacle is not None)
        because = ", ".join(f"not {count}: {obstacle}" for obstacle, count in others.items()) or None
    if because is not None and settings.merge_adapter is True:
        raise ConfigError(
            f"rollout.merge_adapter is true, but the adapter cannot be merged into the weights while answers are "
            f"sampled ({because}). Set rollout.merge_adapter=auto, which samples with the adapter beside them."
        )
    return layers, because


def _off_because(policy: Policy, settings: RolloutSettings) -> str | None:
    if settings.merge_adapter is False:
        return "rollout.merge_adapter is false"
    if settings.merge_adapter == "auto" and policy.device.type != "cuda":
        return f"the model is on {policy.device.type}"
    if policy.lockstep is not None or is_sharded(policy.language_model):
        return "weights are scattered over ranks"
    return None


def _obstacle(layer: Any) -> str | None:
    """Why a peft layer computes something else than W + s B A, or why that cannot replace W."""
    base = layer.get_base_layer()
    active = _active(layer)
    # peft has classes of the same names for both; others adapt embeddings, convolutions or experts.
    if type(layer).__name__ not in ("Linear", "Linear4bit") or type(base).__name__ not in ("Linear", "Linear4bit"):
        return f"{type(layer).__name__} of {type(base).__name__}"
    if any(name in layer.lora_variant for name in active):
        return "a variant of LoRA such as DoRA"
    if any(layer.lora_bias[name] for name in active):
        return "lora_bias"
    if "forward" in vars(base) or hasattr(base, "_hf_hook"):
        return "a forward of its own"
    return None


def _active(layer: Any) -> list[str]:
    return [name for name in layer.active_adapters if name in layer.lora_A]


def adapter_line(policy: Policy, settings: RolloutSettings) -> str | None:
    """How a generation treats the adapter, for the user; None without one."""
    layers, because = mergeable_layers(policy, settings)
    line = f"merged into {len(layers)} layers for each generation where memory allows" if layers else "not merged"
    return f"{line} ({because})" if because else line if layers else None


def adapter_state(model: torch.nn.Module) -> list[Any]:
    """State that decides which products the adapted layers make: a recorded step holds those it was recorded with."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "merged_adapters")]
    return [(x.disable_adapters, tuple(x.active_adapters), tuple(x.merged_adapters)) for x in layers]


class Merge(NamedTuple):
    """``note``: why memory did not allow it, or weights wait on the host; None where all is as planned.

    ``copies``: of layers in 4 bits there are copies, which are gone afterwards.
    """

    note: str | None = None
    copies: bool = False


@contextmanager
def adapter_merged(
    policy: Policy,
    settings: RolloutSettings,
    largest_group: Callable[[], int],
    sequence: SequenceGroup = SINGLE_SP_RANK,
    reusable: int = 0,
) -> Iterator[Merge]:
    """Inside, the language model's adapters are merged into its weights, which are restored bit for bit afterwards.

    Not for gradients.

    Args:
        largest_group: bytes of keys, values and states that generation must have room for.
        sequence: processes that sample the same prompts: all of them merge, or none.
        reusable: bytes of the last generation's buffers, which are not free.

    Raises:
        ConfigError: ``rollout.merge_adapter`` is true, and there is no memory for it.
    """
    layers, _ = mergeable_layers(policy, settings)
    if not layers:
        yield Merge()
        return
    small = _in_4_bits(policy.language_model, layers)
    weights = [layer.get_base_layer().weight for layer in layers]
    plain = {id(weight): weight.nbytes for weight in weights if not is_quantized(weight)}
    needed = sum(plain.values())
    needed += sum(num_elements(base.weight) * policy.dtype.itemsize for _, _, base in small)
    backup = min(sequence.gather(_backup(policy.device, settings, needed, largest_group(), bool(small), reusable)))
    if backup == _NOWHERE:
        problem = f"{needed / GIB:.3g} GiB for merging the adapter do not fit beside generation's keys and values"
        if settings.merge_adapter is True:
            raise ConfigError(f"{problem}. Lower rollout.memory_gb, or set rollout.merge_adapter=auto.")
        yield Merge(f"{problem}: every token pays for the adapter's own products")
        return
    with ExitStack() as restored:
        for parent, name, base in small:
            _write_out(parent, name, base, policy.dtype, restored)
        for layer in layers:
            weight = layer.get_base_layer().weight
            if id(weight) in plain:
                restored.callback(_restore, weight, _copied(weight, backup))
            _add_adapters(layer, weight)
            # By this peft calls the layer beneath alone.
            restored.callback(layer.merged_adapters.clear)
            layer.merged_adapters.extend(_active(layer))
        host = f"the weights without the adapter ({needed / GIB:.3g} GiB) wait in host memory"
        yield Merge(host if backup == _ON_HOST and policy.device.type != "cpu" else None, bool(small))


_NOWHERE, _ON_HOST, _ON_DEVICE = range(3)


def _backup(
    device: torch.device, settings: RolloutSettings, needed: int, largest_group: int, copies: bool, reusable: int = 0
) -> int:
    """Where the original weights are meanwhile. Copies of layers in 4 bits can only be on the device."""
    left = free_bytes(device) - needed - 3 * 4 * _CHUNK
    room = SHARE_OF_FREE * (left + reusable) >= largest_group and left >= needed
    if settings.memory_gb is not None:
        room = left + reusable >= settings.memory_gb * GIB
    if room:
        return _ON_DEVICE
    return _ON_HOST if not copies and free_bytes(torch.device("cpu")) >= 2 * needed else _NOWHERE


def _in_4_bits(language_model: torch.nn.Module, layers: list[Any]) -> list[tuple[torch.nn.Module, str, Any]]:
    """Layers in 4 bits, with the module that has each and its name there; none beneath an adapter that stays."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    stay = {id(m) for m in language_model.modules() if isinstance(m, BaseTunerLayer)} - {id(layer) for layer in layers}
    return [
        (parent, name, child)
        for parent in language_model.modules()
        for name, child in parent.named_children()
        # A layer of peft has the weight of the one beneath it.
        if is_quantized(getattr(child, "weight", _NO_WEIGHT)) and not hasattr(child, "base_layer")
        if id(parent) not in stay
    ]


def _write_out(parent: torch.nn.Module, name: str, base: Any, dtype: torch.dtype, restored: ExitStack) -> None:
    from bitsandbytes.functional import dequantize_4bit

    with torch.device("meta"):
        dense = torch.nn.Linear(base.in_features, base.out_features, bias=False)
    values = dequantize_4bit(base.weight.data, base.weight.quant_state).to(dtype)
    dense.weight, dense.bias = torch.nn.Parameter(values, requires_grad=False), base.bias
    setattr(parent, name, dense)
    restored.callback(setattr, parent, name, base)


def _copied(weight: torch.Tensor, backup: int) -> torch.Tensor:
    if backup == _ON_DEVICE or weight.device.type == "cpu":
        return weight.detach().clone()
    pinned = torch.empty(weight.shape, dtype=weight.dtype, pin_memory=True)
    return pinned.copy_(weight.detach(), non_blocking=True)


def _restore(weight: torch.Tensor, copied: torch.Tensor) -> None:
    # By ``data``, so that tensors saved for a backward count as unchanged.
    weight.data.copy_(copied, non_blocking=True)


@torch.no_grad()
def _add_adapters(layer: Any, weight: torch.Tensor) -> None:
    """W + s B A for all adapters at work, in fp32, rounded once to the dtype of W, in its place."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    rows = max(1, _CHUNK // weight.shape[1])
    for start in range(0, len(weight), rows):
        part = weight.data[start : start + rows]
        total = part.to(wide, copy=True)
        for name in _active(layer):
            a, b = layer.lora_A[name].weight, layer.lora_B[name].weight[start : start + rows]
            total.addmm_(b.to(wide), a.to(wide), alpha=layer.scaling[name])
        part.copy_(total)
