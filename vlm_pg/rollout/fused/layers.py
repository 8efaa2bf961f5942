"""A language model's layers on fused kernels, for the duration of a decode step.

transformers' modules are not changed: within ``with`` an instance has another forward, or another rotation function.
Hooks of modules and adapters of linear layers run as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from types import FunctionType, MethodType, TracebackType
from typing import Any, NamedTuple

import torch

from vlm_pg.models.kernel_trials import is_gated
from vlm_pg.models.layer_globals import layer_function, layer_global, with_globals
from vlm_pg.rollout.fused.norms import add_norm, rms_norm, silu_mul
from vlm_pg.rollout.fused.packed import packed_linears

ROTATION = "apply_rotary_pos_emb"
_MISSING = object()
# Submodules whose outputs a layer adds to the residual stream.
_ADDENDS = ("self_attn", "linear_attn", "mlp")


class FusedLayers:
    """Inside ``with``: norms of ``language_model``, residual sums with the norms behind them, and gates are one kernel
    each, and linear layers of one input one product.

    Not for gradients. One at a time, and by one thread.

    Args:
        kinds: which of these, by the names in ``choice.py``.

    Attributes:
        deferred: these layers for a context that applies rotary positions itself; None where no kernel does.
    """

    def __init__(self, language_model: Any, kinds: Collection[str]):
        self._sums = ResidualSums()
        modules = list(language_model.modules())
        self._replaced: list[_Replacement] = []
        for module in modules:
            if "norms" in kinds and is_norm(module):
                self._replaced.append((module, _forward_name(module), partial(normed, module, self._sums)))
            elif "gates" in kinds and is_gated(module):
                self._replaced.append((module, _forward_name(module), partial(gated, module)))
        if "residual sums" in kinds:
            layers = list(getattr(language_model, "layers", ()))
            followed_by = [getattr(layer, "input_layernorm", None) for layer in layers[1:]]
            for layer, following in zip(layers, [*followed_by, language_model.norm], strict=True):
                if has_sums(layer):
                    self._replaced.append((layer, _forward_name(layer), layer_of(layer, self._sums, following)))
        self.deferred: DeferredRotation | None = None
        if "rotary positions" in kinds:
            self.deferred = DeferredRotation(self)
            for attention in filter(rotates, modules):
                self._replaced += deferred_of(attention, self.deferred, "norms" in kinds)
        self._packed, _ = packed_linears(language_model)
        self._replaced += [(layer, "forward", forward) for one in self._packed for layer, forward in one.forwards()]
        self._before: list[Any] = []
        for one in self._packed:
            one.pack()

    def __enter__(self) -> None:
        assert not self._before
        for one in self._packed:
            one.pack()  # where weights have been moved
        for module, name, forward in self._replaced:
            self._before.append(module.__dict__.get(name, _MISSING))
            module.__dict__[name] = forward

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        before, self._before = self._before, []
        self._sums.last = None
        # In reverse: norms of heads are replaced twice.
        for (module, name, _), forward in zip(self._replaced[::-1], before[::-1], strict=True):
            if forward is _MISSING:
                del module.__dict__[name]
            else:
                module.__dict__[name] = forward


# A module, the name of its attribute, and the replacement.
_Replacement = tuple[Any, str, Callable[..., Any]]


def _forward_name(module: Any) -> str:
    # accelerate's hooks, and tiles of rows (stream_memory.py), replace the forward and call it by another name.
    if hasattr(module, "_hf_hook"):
        return "_old_forward"
    return "vlm_pg_whole_forward" if hasattr(module, "vlm_pg_whole_forward") else "forward"


class ModuleView:
    """A module, as its own code sees it, with some attributes replaced."""

    def __init__(self, module: Any, **replaced: Any):
        self.__dict__.update(replaced, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)

    @property
    def forward(self) -> Any:
        """transformers' layers ask their type for it, to find out which of several wrappers checkpoints."""
        return self.__dict__.get("forward", self._module.forward)


class ResidualSums:
    """The last sum of a residual stream and its norm, computed by one kernel and handed to the norm that follows."""

    # The sum, its version, the norm and its result.
    last: tuple[torch.Tensor, int, Any, torch.Tensor] | None = None

    def add(self, residual: torch.Tensor, x: torch.Tensor, norm: Any) -> torch.Tensor:
        """residual + x, which ``norm`` takes next."""
        alike = (residual.shape, residual.dtype) == (x.shape, x.dtype) and residual.is_contiguous()
        # Offloaded weights arrive when the norm is called.
        if not alike or not x.is_contiguous() or not is_norm(norm) or norm.weight.device != x.device:
            return residual + x
        total, normed = add_norm(x, residual, norm.weight, *_constants(norm))
        self.last = (total, _version(total), norm, normed)
        return total

    def take(self, x: torch.Tensor, norm: Any) -> torch.Tensor | None:
        """The norm of x, if x is the last sum, unchanged, and this norm was to follow."""
        last, self.last = self.last, None
        if last is None or last[0] is not x or last[1] != _version(x) or last[2] is not norm:
            return None
        return last[3]


def _version(x: torch.Tensor) -> int:
    """Changes with the tensor."""
    return 0 if x.is_inference() else x._version


class _Addend:
    """An output that a layer's code adds to the residual stream, on either side of the plus."""

    def __init__(self, x: torch.Tensor, sums: ResidualSums, norm: Any):
        self._x, self._sums, self._norm = x, sums, norm

    def __radd__(self, residual: torch.Tensor) -> torch.Tensor:
        return self._sums.add(residual, self._x, self._norm)

    __add__ = __radd__


def has_sums(module: Any) -> bool:
    """Whether a module has the parts of a layer x + attention(norm(x)), then x + mlp(norm(x)); that its code only adds
    is checked by running it. Its code must be a method, which can be run on the layer as ``ModuleView``."""
    named = all(hasattr(module, name) for name in ("input_layernorm", "post_attention_layernorm", "mlp"))
    attends = any(hasattr(module, name) for name in _ADDENDS[:-1])
    return named and attends and isinstance(getattr(module, _forward_name(module)), MethodType)


def layer_of(module: Any, sums: ResidualSums, following: Any) -> Callable[..., Any]:
    """The layer's own code, in which each residual sum and the norm that follows are one kernel.

    Args:
        following: the norm behind the layer.
    """
    norms = (module.post_attention_layernorm, module.post_attention_layernorm, following)
    parts = [(name, norm) for name, norm in zip(_ADDENDS, norms, strict=True) if hasattr(module, name)]
    replaced = {name: partial(_addend, getattr(module, name), sums, norm) for name, norm in parts}
    return partial(layer_function(module), ModuleView(module, **replaced))


def _addend(part: Any, sums: ResidualSums, norm: Any, *args: Any, **named: Any) -> Any:
    out = part(*args, **named)
    if isinstance(out, tuple):  # with attention's weights, or a router's logits
        return _Addend(out[0], sums, norm), *out[1:]
    return _Addend(out, sums, norm)


def is_norm(module: Any) -> bool:
    """An RMS norm with a weight and no bias: one of zeros would differ from none only after training."""
    named = type(module).__name__.endswith("RMSNorm")
    return named and [name for name, _ in module.named_parameters(recurse=False)] == ["weight"]


def rotates(module: Any) -> bool:
    function = layer_function(module)
    return isinstance(function, FunctionType) and ROTATION in function.__code__.co_names


def _constants(norm: Any) -> tuple[float, bool]:
    """Its epsilon, and whether the weight is around one, as Qwen3.5's is, whose epsilon has another name."""
    around_one = not hasattr(norm, "variance_epsilon")
    return (norm.eps if around_one else norm.variance_epsilon), around_one


def normed(module: Any, sums: ResidualSums, x: torch.Tensor) -> torch.Tensor:
    """The forward of an RMS norm, behind a sum that may have computed it."""
    found = sums.take(x, module)
    return rms_norm(x, module.weight, *_constants(module)) if found is None else found


def gated(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The forward of a SwiGLU layer."""
    return module.down_proj(silu_mul(module.gate_proj(x), module.up_proj(x)))


class Rotation(NamedTuple):
    """Arguments of ``rotation.rotate_append`` for the norms and rotations left out so far; cos and sin are [R, C]."""

    cos: torch.Tensor
    sin: torch.Tensor
    weights: list[torch.Tensor]
    epsilon: float
    around_one: bool


class DeferredRotation:
    """Inside ``with``, beside ``FusedLayers``: norms of heads and rotations return their inputs unchanged, and the
    context must ``take`` the deferred work before it attends.

    A context that does not raises AssertionError in the next layer, or at the end.
    """

    def __init__(self, layers: FusedLayers):
        self._layers = layers
        self._on = False
        # Norms that returned their inputs unchanged, queries' and keys'.
        self._norms: list[Any] = []
        self._rotation: Rotation | None = None

    def __enter__(self) -> None:
        self._layers.__enter__()
        self._on = True

    def __exit__(self, *error: Any) -> None:
        left, self._rotation, self._on = self._rotation, None, False
        self._norms.clear()
        self._layers.__exit__(*error)
        assert left is None or error[0] is not None, "a context has attended with queries that were not rotated"

    def take(self) -> Rotation | None:
        """The work deferred for queries and keys of this layer; None where there is none."""
        rotation, self._rotation = self._rotation, None
        return rotation

    def head_norm(self, norm: Any, x: torch.Tensor) -> torch.Tensor:
        """The forward of a norm of queries, then of one of keys: deferred inside ``with``."""
        if not self._on:
            return rms_norm(x, norm.weight, *_constants(norm))
        self._norms.append(norm)
        return x

    def defer_rotation(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        """Whether the rotation may return these arguments of ``apply_rotary_pos_emb`` unchanged."""
        assert self._rotation is None, "a context has attended with queries that were not rotated"
        # Under autocast projections are narrower than positions, and the result is as wide as these.
        if not self._on or len(cos) != 1 or not q.dtype == k.dtype == cos.dtype == sin.dtype:
            return False
        if any(norm.weight.dtype != q.dtype for norm in self._norms):
            return False
        norms, self._norms = self._norms, []
        assert len(norms) in (0, 2)
        epsilon, around_one = _constants(norms[0]) if norms else (0.0, False)
        self._rotation = Rotation(cos[0], sin[0], [norm.weight for norm in norms], epsilon, around_one)
        return True

    def deferred_norm(self, x: torch.Tensor) -> torch.Tensor:
        """Queries, then keys, with their deferred norm."""
        if not self._norms:
            return x
        norm = self._norms.pop(0)
        return rms_norm(x.contiguous(), norm.weight, *_constants(norm))


def deferred_of(attention: Any, deferred: DeferredRotation, norms: bool) -> Iterator[_Replacement]:
    """Replacements in an attention layer. ``norms``: also its norms of heads, where these have no hooks."""
    usual = layer_global(attention, ROTATION)

    def rotate(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not rest and not named and deferred.defer_rotation(q, k, cos, sin):
            return q, k
        return usual(deferred.deferred_norm(q), deferred.deferred_norm(k), cos, sin, *rest, **named)

    yield attention, _forward_name(attention), MethodType(with_globals(attention, {ROTATION: rotate}), attention)
    of_heads = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    if norms and all(map(_can_be_deferred, of_heads)) and len(set(map(_constants, of_heads))) == 1:
        for norm in of_heads:
            yield norm, "forward", partial(deferred.head_norm, norm)


def _can_be_deferred(norm: Any) -> bool:
    """Not with hooks, which see its output or load its weight."""
    if norm is None or not is_norm(norm):
        return False
    return not (hasattr(norm, "_hf_hook") or norm._forward_hooks or norm._forward_pre_hooks)
