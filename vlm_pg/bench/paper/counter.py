"""A run in which numbers are fake and whole numbers real: everything is counted, nothing is computed.

Floating-point tensors are torch's fake ones: shapes, dtypes and memory, no values. Integers and masks are computed for
real. So lengths of sequences, rows that a mask picks and what the host asks for are known, and shapes that depend on
them too; what depends on a floating-point value (an argmax, a comparison) is 0 or False for whoever asks.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from vlm_pg.bench.paper.counts import Counts
from vlm_pg.bench.paper.live import LiveMemory
from vlm_pg.bench.paper.operations import WAITS, bytes_of, flops_of, kernels_of, kind_of, tensors_in
from vlm_pg.bench.paper.triton_launches import noted_launches

# Factories that take torch's default dtype where none is given.
_DEFAULT_DTYPE = frozenset(("empty", "zeros", "ones", "rand", "randn", "empty_strided"))
# Of a real tensor they give the same one.
_SAME = frozenset(("lift_fresh", "alias", "detach"))
_INDEXED = frozenset(("index", "index_put", "index_put_"))


def fake_mode() -> FakeTensorMode:
    """Where floating-point tensors of a count live: models are built under it, then counted beside real integers."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def count(run: Callable[[], Any], fakes: FakeTensorMode) -> Counts:
    """Counts of ``run``, whose tensors with numbers are of ``fakes``.

    Raises:
        DataDependentOutputException: a shape depends on floating-point values.
    """
    # What is there now need not be looked through at every collection.
    gc.collect()
    gc.freeze()
    counting = _Counting(fakes)
    try:
        with counting, noted_launches(counting.note_launch):
            run()
    finally:
        gc.unfreeze()
    gc.collect()
    counting.counts.peak_bytes, counting.counts.end_bytes = counting.live.peak, counting.live.now
    return counting.counts


class _Counting(TorchDispatchMode):
    def __init__(self, fakes: FakeTensorMode):
        super().__init__()
        self.counts, self.live = Counts(), LiveMemory()
        self._fakes = fakes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if name in _PARTS:
            with self:
                return _PARTS[name](*args, **kwargs)
        for tensor in tensors_in((args, kwargs)):
            if isinstance(tensor, FakeTensor):
                self.live.was_there(tensor)
        if name in WAITS:
            self._wait()
        out = self._run(func, name, args, kwargs)
        for tensor in tensors_in(out):
            if isinstance(tensor, FakeTensor):
                self.live.has_come(tensor)
        self._note(name, args, kwargs, out)
        return out

    def _run(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in((args, kwargs))
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors) and not _makes_numbers(name, tensors, kwargs):
            out = func(*args, **kwargs)
            return out if name in _SAME else tree_map_only(torch.Tensor, self._fake_if_number, out)
        if name == "_local_scalar_dense":
            return torch.zeros((), dtype=tensors[0].dtype, device="cpu").tolist()
        if name in _INDEXED:
            args = (args[0], self._rows(args[1]), *args[2:])
        flat, spec = tree_flatten((args, kwargs))
        flat = [self._fakes.from_tensor(x) if _is_real(x) else x for x in flat]
        args, kwargs = tree_unflatten(flat, spec)
        with self._fakes:
            return func(*args, **kwargs)

    def _rows(self, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Masks as the numbers of their places: the host waits for how many there are."""
        found: list[torch.Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype == torch.bool and _is_real(index):
                self._wait()
                found += index.nonzero(as_tuple=True)
            else:
                found.append(index)
        return found

    def _fake_if_number(self, tensor: torch.Tensor) -> torch.Tensor:
        is_number = tensor.dtype.is_floating_point and not isinstance(tensor, FakeTensor)
        return self._fakes.from_tensor(tensor) if is_number else tensor

    def _note(self, name: str, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        if kernels := kernels_of(name):
            kind = kind_of(name)
            self.counts.launches[name] += kernels
            self.counts.bytes[kind, name] += bytes_of(name, args, kwargs, out)
            self.counts.flops[kind] += flops_of(name, args, kwargs)

    def note_launch(self, name: str, amount: int) -> None:
        """A kernel that no dispatcher sees: fused, of values from their own places (``triton_launches``)."""
        self.counts.launches[name] += 1
        self.counts.bytes["elementwise", name] += amount

    def _wait(self) -> None:
        self.counts.waits[_caller()] += 1


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)


def _makes_numbers(name: str, tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> bool:
    """Whether an operation on real tensors takes or gives floating-point values."""
    if any(tensor.dtype.is_floating_point for tensor in tensors):
        return name not in _SAME
    dtype = kwargs.get("dtype")
    if dtype is None and name in _DEFAULT_DTYPE:
        dtype = torch.get_default_dtype()
    return dtype is not None and dtype.is_floating_point


def _logsumexp(x: torch.Tensor, dim: Any, keepdim: bool = False) -> torch.Tensor:
    """As torch's own kernels do it, which is several: with a tensor of all exponentials on the way."""
    (axis,) = dim if isinstance(dim, (list, tuple)) else (dim,)
    top = x.amax(axis, keepdim=True)
    total = (x - top).exp_().sum(axis, keepdim=keepdim)
    return total.log_().add_(top if keepdim else top.squeeze(axis))


# Operations that run as several kernels with memory between them.
_PARTS: dict[str, Callable[..., Any]] = {"logsumexp": _logsumexp}


def _caller() -> str:
    """The line outside of torch and of this package that asked for something."""
    frame = sys._getframe(2)
    while frame.f_back and any(part in frame.f_code.co_filename for part in ("/torch/", "/bench/paper/")):
        frame = frame.f_back
    return f"{'/'.join(frame.f_code.co_filename.split('/')[-3:])}:{frame.f_lineno}"
