"""A run in which numbers are fake and whole numbers real: everything is counted, nothing is computed.

Floating-point tensors are torch's fake ones: shapes, dtypes and memory, no values. Integers and masks are computed for
real. So lengths of sequences, rows that a mask picks and what the host asks for are known, and shapes that depend on
them too; what depends on a floating-point value (an argmax, a comparison) is 0 or False for whoever asks.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, cached_property
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from vlm_pg.bench.paper.counts import Counts
from vlm_pg.bench.paper.cuda_kernels import NO_KERNEL, kernels_of, nonzero_kernels, tensors_in
from vlm_pg.bench.paper.host import caller, is_on_host
from vlm_pg.bench.paper.live import LiveMemory
from vlm_pg.bench.paper.operations import bytes_of, flops_of, kind_of, waits_of
from vlm_pg.bench.paper.parts import PARTS, PARTS_ON_GPU
from vlm_pg.bench.paper.triton_launches import noted_launches

# Factories that take torch's default dtype where none is given.
_DEFAULT_DTYPE = frozenset(("empty", "zeros", "ones", "rand", "randn", "empty_strided"))
# Of a real tensor they give the same one.
_SAME = frozenset(("lift_fresh", "alias", "detach"))
_INDEXED = frozenset(("index", "index_put", "index_put_"))


class _Fakes(FakeTensorMode):
    @cached_property
    def avoid_device_init(self) -> bool:
        """Asked once. torch asks for every tensor, and once DeepSpeed is imported that is a search for NVML on disk."""
        return super().avoid_device_init


def fake_mode(allow_non_fake_inputs: bool = True) -> FakeTensorMode:
    """Where floating-point tensors of a count live: models are built under it, then counted beside real integers."""
    _start_autograd()
    return _Fakes(allow_non_fake_inputs=allow_non_fake_inputs)


@cache
def _start_autograd() -> None:
    """At its first backward autograd starts a thread for each device, and a process with such threads cannot be forked.

    Fake tensors come with a device that is not there.
    """
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros((), device="cpu", requires_grad=True).backward()


def count(run: Callable[[], Any], fakes: FakeTensorMode, collects: bool = True, on_gpu: bool = True) -> Counts:
    """Counts of ``run``, whose tensors with numbers are of ``fakes``.

    ``collects``: as ``LiveMemory`` takes it. ``on_gpu``: whether an operation's own memory is that of its CUDA kernels
    (``parts.py``), also where it is the CPU's that stands for them.

    Raises:
        DataDependentOutputException: a shape depends on floating-point values.
    """
    whole: list[Counts] = []

    def at_once(lap: Callable[[], Counts]) -> None:
        run()
        whole.append(lap())

    count_laps(at_once, fakes, collects, on_gpu)
    return whole[0]


def count_laps(
    run: Callable[[Callable[[], Counts]], Any], fakes: FakeTensorMode, collects: bool = True, on_gpu: bool = True
) -> None:
    """Count a piece of work in parts: ``run`` is given a function that returns what was counted since its last call.

    Bytes alive are those above the beginning of the whole; a lap's peak is the highest since the last call.

    Raises:
        DataDependentOutputException: as ``count``.
    """
    counting = _Counting(fakes, collects, on_gpu)
    frozen = _frozen() if collects else nullcontext()
    with frozen, _Asking(counting), counting, noted_launches(counting.note_launch):
        run(counting.lap)


@contextmanager
def _frozen() -> Iterator[None]:
    """What is there now is not looked through at every collection inside.

    Python thaws all or nothing: where somebody had frozen something, it is frozen again afterwards, with whatever else
    is alive by then.
    """
    before = gc.get_freeze_count()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if before:
            gc.collect()
            gc.freeze()


class _Counting(TorchDispatchMode):
    def __init__(self, fakes: FakeTensorMode, collects: bool, on_gpu: bool):
        super().__init__()
        self._parts = PARTS | (PARTS_ON_GPU if on_gpu else {})
        # Operations that run as parts right now: they are one of these themselves.
        self._inside: set[str] = set()
        self.counts, self.live = Counts(), LiveMemory(collects)
        self._fakes, self._collects = fakes, collects
        self._hosts = WeakTensorKeyDictionary()
        # Storage and place in the code of the last number that the host asked for.
        self._looked_at: tuple[int, Any] | None = None

    def lap(self) -> Counts:
        """What was counted since the last call; from here on anew."""
        if self._collects:
            gc.collect()
        counts, self.counts = self.counts, Counts()
        counts.peak_bytes, counts.end_bytes = self.live.peak, self.live.now
        self.live.peak = self.live.now
        return counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if name in self._parts and name not in self._inside:
            self._inside.add(name)
            try:
                with self:
                    return self._parts[name](func, *args, **kwargs)
            finally:
                self._inside.discard(name)
        for tensor in tensors_in((args, kwargs)):
            if isinstance(tensor, FakeTensor):
                self.live.was_there(tensor)
        if name == "_local_scalar_dense":
            self._look(args[0])
            return self._run(func, name, args, kwargs)
        if name not in NO_KERNEL:
            self._looked_at = None
        if name in _INDEXED and not self._is_hosts(tensors_in((args, kwargs))):
            args = (args[0], self._rows(args[1]), *args[2:])
        for _ in range(waits_of(name, args, kwargs)):
            self.wait(tensors_in((args, kwargs)))
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
        if any(map(_is_real, tensors_in((args, kwargs)))):
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
                self.wait([index])
                self.counts.launches["nonzero"] += nonzero_kernels(index)
                found += index.nonzero(as_tuple=True)
            else:
                found.append(index)
        return found

    def _fake_if_number(self, tensor: torch.Tensor) -> torch.Tensor:
        is_number = tensor.dtype.is_floating_point and not isinstance(tensor, FakeTensor)
        return self._fakes.from_tensor(tensor) if is_number else tensor

    def _note(self, name: str, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        if self._is_hosts(tensors_in((args, kwargs, out))):
            self.is_the_hosts(out)
            return
        if kernels := kernels_of(name, args, kwargs, out):
            kind = kind_of(name)
            self.counts.launches[name] += kernels
            self.counts.bytes[kind, name] += bytes_of(name, args, kwargs, out)
            self.counts.flops[kind] += flops_of(name, args, kwargs)

    def note_launch(self, name: str, amount: int) -> None:
        """A kernel that no dispatcher sees: fused, of values from their own places (``triton_launches``)."""
        self._looked_at = None
        self.counts.launches[name] += 1
        self.counts.bytes["elementwise", name] += amount

    def _look(self, value: torch.Tensor) -> None:
        """One number for the host. Those of one tensor, asked for one after the other by one line, are one copy."""
        looked_at = (value.untyped_storage()._cdata, caller())
        if self._is_hosts([value]) or self._looked_at == looked_at:
            return
        self._looked_at = looked_at
        self.wait([value])
        self.counts.launches["_local_scalar_dense"] += 1

    def is_the_hosts(self, made: Any) -> None:
        """Remember tensors that the host has made for itself."""
        for tensor in tensors_in(made):
            self._hosts[tensor] = True

    def is_known_hosts(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor in self._hosts

    def upload(self, tensor: torch.Tensor) -> None:
        """A copy to the device that the host waits for."""
        if not is_on_host():
            self.counts.waits[" ".join(caller())] += 1

    def wait(self, tensors: Sequence[torch.Tensor]) -> None:
        """The host waits for these."""
        if not self._is_hosts(tensors):
            self.counts.waits[" ".join(caller())] += 1

    def _is_hosts(self, tensors: Sequence[torch.Tensor]) -> bool:
        return is_on_host(numbers=any(isinstance(tensor, FakeTensor) for tensor in tensors))


# How a tensor's values reach the host without an operation of their own, where tensors are on a CPU already.
_TO_HOST = frozenset((torch.Tensor.cpu, torch.Tensor.numpy))


# What the host makes where no device is named.
_MADE = frozenset((torch.tensor, torch.as_tensor, torch.from_numpy))


class _Asking(TorchFunctionMode):
    """Waits that no operation tells of: ``cpu()``, ``to("cpu")``, ``numpy()`` of fake tensors, and copies of what the
    host has just made to the device, unless they are ``non_blocking``: the host waits for all that is queued.

    Where the device is asked for as ``torch.device``, it may be the one where the tensor is, and is not counted but for
    what is known to be the host's. Nor are ``cpu()`` and ``tolist()`` of real whole numbers, which may be.
    """

    def __init__(self, counting: _Counting):
        super().__init__()
        self._counting = counting

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _MADE:
            out = func(*args, **kwargs)
            if kwargs.get("device") is None:
                self._counting.is_the_hosts(out)
            else:
                self._counting.upload(out)
            return out
        if func is torch.Tensor.copy_ and not kwargs.get("non_blocking", args[2] if len(args) > 2 else False):
            if self._counting.is_known_hosts(args[1]) and not self._counting.is_known_hosts(args[0]):
                self._counting.upload(args[1])
            return func(*args, **kwargs)
        if func is torch.Tensor.to and self._counting.is_known_hosts(args[0]) and _names_device(args, kwargs):
            if not kwargs.get("non_blocking", False):
                self._counting.upload(args[0])
            out = func(*args, **kwargs)
            # Another tensor from here on: the device's.
            return out.expand_as(out) if out is args[0] else out
        asks = func in _TO_HOST or (func is torch.Tensor.to and _names_cpu(*args[1:2], kwargs.get("device")))
        if not asks or not isinstance(args[0], FakeTensor):
            return func(*args, **kwargs)
        self._counting.wait(args[:1])
        if func is not torch.Tensor.numpy:
            return func(*args, **kwargs)
        # The values are not known: they are 0, as those of ``item()``.
        with torch.utils._python_dispatch._disable_current_modes():
            return torch.zeros(args[0].shape, dtype=args[0].dtype, device="cpu").numpy()


def _names_device(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(value, torch.device) for value in (*args[1:2], kwargs.get("device")))


def _names_cpu(*values: Any) -> bool:
    return any(isinstance(value, str) and value == "cpu" for value in values)


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
