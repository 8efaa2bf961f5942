"""Accuracy of a kernel against the operators it replaces: both on random numbers, against float64.

A compiler may leave out a rounding that separate operators of torch make: that is no fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from vlm_pg.models.weights import whole_shape

# Allowed ratio of a kernel's error to that of the replaced operators, both against float64: sums of other orders leave
# errors that differ by chance. In fp32, where nothing is rounded on the way, exponentials of other libraries differ.
_ALLOWED, _ALLOWED_WIDE = 1.05, 1e-6


@dataclass(frozen=True)
class Trial:
    """One result by a kernel, by the operators it replaces, and in float64."""

    name: str
    got: Tensor
    usual: Tensor
    truth: Tensor

    def fault(self) -> str | None:
        if self.got.dtype != self.usual.dtype:
            return f"{self.name} is {self.got.dtype}, not {self.usual.dtype}"
        error, usual = (
            float((one.double() - self.truth).abs().sum() / self.truth.abs().sum()) for one in (self.got, self.usual)
        )
        is_wide = self.usual.dtype in (torch.float32, torch.float64)
        bound = _ALLOWED * usual + (_ALLOWED_WIDE if is_wide else 0.0)
        return None if error <= bound else f"{self.name} is {error:.1e} off, by modules {usual:.1e}"


def faults(trials: Mapping[str, Callable[[], Iterable[Trial]]]) -> dict[str, str]:
    """The kernels of these trials that are less accurate than the operators they replace, and why."""
    found: dict[str, str] = {}
    for kernel, tried in trials.items():
        try:
            if why := next(filter(None, (trial.fault() for trial in tried())), None):
                found[kernel] = why
        except Exception as error:  # compilers and drivers raise anything
            lines = str(error).splitlines()
            found[kernel] = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    return found


def with_gradients(
    name: str,
    by: Callable[..., Any],
    usual: Callable[..., Any],
    inputs: Mapping[str, Tensor],
    truth: Callable[..., Any] | None = None,
) -> Iterator[Trial]:
    """Trials of all outputs of ``by``, and of the gradient of each of its ``inputs``, for a random upstream one.

    ``truth``: called with inputs in float64; default: ``usual``.
    """
    narrow = [x.detach() for x in inputs.values()]
    results = [_back(by, narrow), _back(usual, narrow), _back(truth or usual, [x.double() for x in narrow])]
    outputs = len(results[0]) - len(narrow)
    names = [f"{name}'s output"] * outputs + [f"{name}'s gradient of {key}" for key in inputs]
    for of, *found in zip(names, *results, strict=True):
        yield Trial(of, *found)


@torch.enable_grad()
def _back(run: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    # A kernel may work in place on a product of a leaf, as on a layer's output.
    found = run(*(leaf * 1 for leaf in leaves))
    outputs = found if isinstance(found, tuple) else (found,)
    generator = torch.Generator().manual_seed(1)
    # The same numbers in any dtype.
    upstream = [torch.randn(out.shape, generator=generator).bfloat16().to(out) for out in outputs]
    values = [out.detach().clone() for out in outputs]
    return [*values, *torch.autograd.grad(outputs, leaves, upstream)]


def kinds(model: torch.nn.Module, chosen: Callable[[Any], bool]) -> Iterator[Any]:
    """One module for each type, for each size of its own weight, and for each set of parts."""
    seen: set[Any] = set()
    for module in model.modules():
        if chosen(module):
            shapes = (whole_shape(weight) for weight in module.parameters(recurse=False))
            kind = (type(module), *shapes, *(name for name, _ in module.named_children()))
            if kind not in seen:
                seen.add(kind)
                yield module


def twin(module: Any, **weights: Tensor) -> Any:
    """A copy with these weights, its class's forward and no hooks."""
    other = copy(module)
    for name in ("forward", "_old_forward", "_hf_hook", "vlm_pg_whole_forward"):
        other.__dict__.pop(name, None)
    other.__dict__["_parameters"] = {**module._parameters, **weights}
    return other


def is_gated(module: Any) -> bool:
    """Whether a module has the parts of down(silu(gate(x)) * up(x)); that it computes this ``product_of`` checks."""
    return is_silu(module) and all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj"))


def is_silu(module: Any) -> bool:
    """Whether its activation is torch's own SiLU, or transformers' replacement."""
    return type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")


def product_of(module: Any, gate: Tensor, up: Tensor, forward: Any = None) -> Tensor:
    """A feed-forward layer's input to its last projection, where the other two return ``gate`` and ``up``.

    ``forward``: unbound, instead of the class's.

    Raises:
        AttributeError: it works with more than its projections and its activation.
    """
    parts = {"gate_proj": lambda _: gate, "up_proj": lambda _: up, "down_proj": lambda x: x, "act_fn": module.act_fn}
    return (forward or type(module).forward)(SimpleNamespace(**parts), gate)
