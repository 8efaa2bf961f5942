"""Linear layers of the same input as one matrix product: a decode step is bound by memory traffic.

Their weights are views of one storage, and stay the parameters that optimizers and files know. D inputs, R rows, O
outputs of all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch.nn import functional as F

# In the order in which they are called, or the first of them at least before the others.
_OF_ONE_INPUT = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
)


class PackedLinears:
    """Layers of one input as one product: the first one that is called computes all, the others hand out their part.

    A call with another tensor computes that layer alone.
    """

    def __init__(self, layers: Sequence[torch.nn.Module]):
        self._layers = layers
        self._sizes = [layer.out_features for layer in layers]
        self._weight: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None
        self._input: torch.Tensor | None = None
        self._outputs: dict[int, torch.Tensor] = {}

    def pack(self) -> None:
        """Find or make the packed weights. Parameters may have been moved since the last call."""
        self._weight, self._bias = (*map(pack, _weights(self._layers)), None)[:2]
        self._input, self._outputs = None, {}

    def forwards(self) -> list[tuple[torch.nn.Module, Callable[[torch.Tensor], torch.Tensor]]]:
        """Each layer and its replacement forward: [..., D] -> [..., its outputs], a strided part of [..., O]."""
        return [(layer, partial(self._forward, index)) for index, layer in enumerate(self._layers)]

    def _forward(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if index == 0:
            assert self._weight is not None
            parts = F.linear(x, self._weight, self._bias).split(self._sizes, -1)
            self._input, self._outputs = x, dict(enumerate(parts))
        elif x is not self._input or index not in self._outputs:
            layer: Any = self._layers[index]
            return F.linear(x, layer.weight, layer.bias)
        part = self._outputs.pop(index)
        if not self._outputs:
            self._input = None
        return part


def packed_linears(language_model: torch.nn.Module) -> tuple[list[PackedLinears], str | None]:
    """Layers that can be one product; which others read one input, and why their products stay separate."""
    found: list[PackedLinears] = []
    separate: dict[str, str] = {}
    for module in language_model.modules():
        for names in _OF_ONE_INPUT:
            if all(hasattr(module, name) for name in names):
                layers = [getattr(module, name) for name in names]
                while any(hasattr(layer, "base_layer") for layer in layers):  # beneath adapters
                    layers = [getattr(layer, "base_layer", layer) for layer in layers]
                if because := _obstacle(layers):
                    separate[", ".join(names)] = because
                else:
                    found.append(PackedLinears(layers))
    return found, "; ".join(f"{names} separate: {because}" for names, because in separate.items()) or None


def _obstacle(layers: Sequence[Any]) -> str | None:
    """Why these layers cannot be one product."""
    for layer in layers:
        if type(layer).__name__ == "Linear4bit":
            return "in 4 bits, unless rollout.merge_adapter writes them out for a generation"
        if type(layer) is not torch.nn.Linear:
            return f"one is a {type(layer).__name__}"
        if "forward" in vars(layer) or hasattr(layer, "_hf_hook"):
            return "one has a forward of its own"
    if len({(x.weight.dtype, x.weight.device, x.in_features, x.bias is None) for x in layers}) > 1:
        return "they differ in dtype, device, inputs or biases"
    for parts in _weights(layers):
        fill = [x.is_contiguous() and x.untyped_storage().nbytes() == x.numel() * x.element_size() for x in parts]
        if _joined(parts) is None and not all(fill):
            return "their weights are parts of a buffer, in which others lie between them"
    return None


def _weights(layers: Sequence[Any]) -> list[list[torch.Tensor]]:
    """Weights, and biases if there are any."""
    return [[getattr(x, name) for x in layers] for name in ("weight", "bias") if getattr(layers[0], name) is not None]


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Rows of all parts as one tensor, where they lie so in memory already."""
    first = parts[0].detach()
    ends = accumulate((part.numel() for part in parts), initial=first.storage_offset())
    storage = first.untyped_storage()._cdata
    for part, start in zip(parts, ends, strict=False):
        if not part.is_contiguous() or (part.untyped_storage()._cdata, part.storage_offset()) != (storage, start):
            return None
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def pack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of all parameters as one tensor, of which each becomes a view; where they are that, nothing changes."""
    joined = _joined(parts)
    if joined is None:
        joined = torch.cat([part.detach() for part in parts])
        for part, rows in zip(parts, joined.split([len(part) for part in parts]), strict=True):
            part.data = rows
    return joined
