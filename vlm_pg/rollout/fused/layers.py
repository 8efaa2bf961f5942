"""A language model's layers on fused kernels, for the time of a decode step.

transformers' modules stay what they are: within ``with`` an instance has another forward, or finds another rotation.
Whatever hangs on calling a module (hooks, adapters of linear layers) is called as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from types import FunctionType, MethodType, TracebackType
from typing import Any

import torch

from vlm_pg.models.layer_globals import layer_global, with_globals
from vlm_pg.rollout.fused.gate import silu_mul
from vlm_pg.rollout.fused.norm import rms_norm
from vlm_pg.rollout.fused.packed import packed_linears
from vlm_pg.rollout.fused.rotation import rotate

ROTATION = "apply_rotary_pos_emb"
_MISSING = object()


class FusedLayers:
    """Inside ``with``: norms, gates and rotary positions of ``language_model`` are one kernel each, and linear layers
    of one input one product.

    Not for gradients. One at a time, and by one thread.

    Args:
        kinds: which of these, by the names in ``choice.py``.
    """

    def __init__(self, language_model: torch.nn.Module, kinds: Collection[str]):
        self._places = [place for module in language_model.modules() for place in _replaced(module, kinds)]
        self._packed, _ = packed_linears(language_model)
        self._places += [(layer, "forward", forward) for one in self._packed for layer, forward in one.forwards()]
        self._before: list[Any] = []
        self._pack()

    def _pack(self) -> None:
        for one in self._packed:
            one.pack()

    def __enter__(self) -> None:
        assert not self._before
        self._pack()  # where weights have been moved
        for module, name, forward in self._places:
            self._before.append(module.__dict__.get(name, _MISSING))
            module.__dict__[name] = forward

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        before, self._before = self._before, []
        for (module, name, _), forward in zip(self._places, before, strict=True):
            if forward is _MISSING:
                del module.__dict__[name]
            else:
                module.__dict__[name] = forward


def _replaced(
    module: torch.nn.Module, kinds: Collection[str]
) -> Iterator[tuple[torch.nn.Module, str, Callable[..., Any]]]:
    """(module, name of its attribute, what stands there meanwhile)"""
    # accelerate's hooks, and tiles of rows (row_tiles.py), stand in the forward's place and call it by another name.
    name = "vlm_pg_whole_forward" if hasattr(module, "vlm_pg_whole_forward") else "forward"
    name = "_old_forward" if hasattr(module, "_hf_hook") else name
    if "norms" in kinds and is_norm(module):
        yield module, name, norm_of(module)
    elif "gates" in kinds and is_gated(module):
        yield module, name, gated_of(module)
    elif "rotary positions" in kinds and rotates(module):
        yield module, name, MethodType(with_globals(module, {ROTATION: rotation_of(module)}), module)


def is_norm(module: torch.nn.Module) -> bool:
    """One with a weight and nothing else: a bias of zeros would differ from none only when it has trained."""
    named = type(module).__name__.endswith("RMSNorm")
    return named and [name for name, _ in module.named_parameters(recurse=False)] == ["weight"]


def is_gated(module: torch.nn.Module) -> bool:
    """What looks like a feed-forward layer down(silu(gate(x)) * up(x)); whether it is one, ``product_of`` shows."""
    parts = all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj"))
    # torch's own, or the one that transformers puts in its place.
    return parts and type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")


def rotates(module: torch.nn.Module) -> bool:
    forward = module.__dict__.get("_old_forward", module.forward)
    function = getattr(forward, "__func__", forward)
    return isinstance(function, FunctionType) and ROTATION in function.__code__.co_names


def norm_of(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Qwen2's and Qwen3's norms call their epsilon otherwise than Qwen3.5's, which are around one."""
    around_one = not hasattr(module, "variance_epsilon")

    def forward(x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, module.weight, module.eps if around_one else module.variance_epsilon, around_one)

    return forward


def gated_of(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return module.down_proj(silu_mul(module.gate_proj(x), module.up_proj(x)))

    return forward


def rotation_of(module: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    usual = layer_global(module, ROTATION)

    def turn(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Under autocast projections are narrower than positions, and the result is as wide as these.
        if rest or named or not q.dtype == k.dtype == cos.dtype == sin.dtype:
            return usual(q, k, cos, sin, *rest, **named)
        return rotate(q, k, cos, sin)

    return turn
