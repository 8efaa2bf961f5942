"""A run on tensors without values: FLOPs, bytes, kernels, waits of the host and peak memory, counted and not computed.

Floating-point tensors are torch's fake ones: shapes, dtypes and memory, no values. Integers and masks are computed for
real. So lengths of sequences, rows that a mask picks and values that the host reads are known, and shapes that depend
on them too; what depends on a floating-point value (an argmax, a comparison) is 0 or False.
"""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from scripts.bench.operations import (
    FLASH_BACKWARD,
    NO_KERNEL,
    UNSORTED_ROWS,
    bytes_of,
    flops_of,
    kernels_of,
    kind_of,
    spanned_bytes,
    tensors_in,
    waits_of,
)
from vlm_pg.attention.kernels import Kernel
from vlm_pg.models.loading import make_policy
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.models.tower import attend_on

# Factories that take torch's default dtype where none is given; operations that return the same real tensor; those of
# which a mask's positions are asked; functions that make host tensors; those that bring values to the host.
_DEFAULT_DTYPE = frozenset(("empty", "zeros", "ones", "rand", "randn", "empty_strided"))
_SAME = frozenset(("lift_fresh", "alias", "detach"))
_INDEXED = frozenset(("index", "index_put", "index_put_"))
_MADE = frozenset((torch.tensor, torch.as_tensor, torch.from_numpy))
_TO_HOST = frozenset((torch.Tensor.cpu, torch.Tensor.numpy))
# Whole numbers are worked on here before they go to the device: (end of the file's path, function, or "" for all of
# that file). No kernel runs there, and nothing waits.
HOST = (
    ("vlm_pg/models/packing.py", ""),
    ("vlm_pg/models/checks.py", ""),
    ("vlm_pg/types.py", ""),
    ("vlm_pg/attention/plan.py", "split_rows"),
    ("vlm_pg/bench/case.py", "text_prompt"),
    ("vlm_pg/models/prompt_tree.py", ""),
    ("vlm_pg/rollout/prefill.py", "_rows"),
    ("vlm_pg/rollout/prefill.py", "_has_media"),
    ("vlm_pg/models/tower.py", ""),
)
# Floating-point tensors too, which are made of whole numbers.
HOST_NUMBERS = (("vlm_pg/models/tower.py", ""),)
# An allocator rounds up to so many bytes.
BLOCK_BYTES = 512
# Tensors that liger-kernel 0.8's Triton kernels read and then write; others are read or written, once.
READ_AND_WRITTEN = {
    "_triton_rope": ("q_ptr", "k_ptr"),
    "_swiglu_backward_kernel": ("a_ptr", "b_ptr"),
    "_swiglu_backward_kernel_tiled": ("a_ptr", "b_ptr"),
}


@dataclass
class Counts:
    """Sums over all operations of a device.

    ``flops``: by kind; a multiply-add counts as two. ``bytes``: read and written, by (kind, operation).
    ``launches``: kernels, by operation. ``waits``: by the line of code whose host waits for the device.
    ``peak_bytes``: most that was alive at one time, without what was there before; ``end_bytes``: alive at the end.
    """

    flops: Counter[str] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    peak_bytes: int = 0
    end_bytes: int = 0

    def bytes_of(self, kind: str) -> int:
        return sum(amount for (of, _), amount in self.bytes.items() if of == kind)


class _Fakes(FakeTensorMode):
    @cached_property
    def avoid_device_init(self) -> bool:
        """Cached: torch asks for every tensor, and once DeepSpeed is imported that is a search for NVML on disk."""
        return super().avoid_device_init


def fake_mode(allow_non_fake_inputs: bool = True) -> FakeTensorMode:
    """The mode of a count's floating-point tensors: models are built under it, then counted beside real integers."""
    return _Fakes(allow_non_fake_inputs=allow_non_fake_inputs)


def fake_policy(
    build: Callable[[], Any], settings: ModelSettings, fakes: FakeTensorMode, kernel: Kernel, fused_logits: bool = False
) -> Policy:
    """The policy around the model that ``build`` makes, with fake weights on a fake CPU.

    Autograd asks the driver about CUDA tensors even where these are fake, so a backward pass can only be counted on the
    CPU's; ``kernel`` is the GPU's all the same. ``fused_logits``: so are the kernels that read logits.
    """
    with fakes:
        model = build()
    # The attention kernel of every device, until it is replaced.
    policy = make_policy(model, None, settings.model_copy(update={"attention_kernel": "oracle"}))
    policy.use_kernel(kernel)
    policy.fused_logits = fused_logits
    if policy.dtype != torch.float32:
        # As make_policy does on a GPU.
        attend_on(policy.model, policy.family, kernel)
    return policy


@contextmanager
def replaced(owner: Any, **others: Any) -> Iterator[None]:
    """Inside, these attributes of a module, class or object are others; afterwards those it had, and no more."""
    before = {name: vars(owner)[name] for name in others if name in vars(owner)}
    try:
        for name, other in others.items():
            setattr(owner, name, other)
        yield
    finally:
        for name in others:
            if name in before:
                setattr(owner, name, before[name])
            elif name in vars(owner):
                delattr(owner, name)


@contextmanager
def reference_operators(model: Any) -> Iterator[None]:
    """Inside, linear attention is transformers' torch code, also where flash-linear-attention or causal-conv1d is.

    Their compiled kernels run on tensors with values, so a count would depend on the machine, or fail.
    """
    module = sys.modules[type(model).__module__]
    packages = {
        name: inspect.unwrap(made)
        for name, made in vars(module).items()
        if hasattr(made, "__wrapped__") and any(word in made.__name__ for word in ("delta_rule", "causal_conv1d"))
    }
    with replaced(module, **packages):
        yield


def count(run: Callable[[], Any], fakes: FakeTensorMode, collects: bool = True, on_gpu: bool = True) -> Counts:
    """Counts of ``run``, whose tensors with numbers are of ``fakes``.

    Args:
        collects: look for garbage before a new peak counts: under a dispatch mode tensors of a recomputation are held
            by cycles. False where nothing is checkpointed, which saves most of the time.
        on_gpu: an operation's own memory is that of its CUDA kernels, also where it is the CPU's that stands for them.

    Raises:
        DataDependentOutputException: a shape depends on floating-point values.
    """
    counting = _Counting(fakes, collects, on_gpu)
    with ExitStack() as stack:
        stack.enter_context(_frozen() if collects else nullcontext())
        stack.enter_context(_HostTransfers(counting))
        stack.enter_context(counting)
        stack.enter_context(triton_launches(counting.note_launch))
        run()
        if collects:
            gc.collect()
        counts = counting.counts
        counts.peak_bytes, counts.end_bytes = counting.peak, counting.now
    return counts


@contextmanager
def _frozen() -> Iterator[None]:
    """Objects of before are left out of every collection inside.

    Python thaws all or nothing: where some were frozen, they are frozen again afterwards, with all that is alive then.
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
        self.counts, self.now, self.peak = Counts(), 0, 0
        self._fakes, self._collects, self._collected_at = fakes, collects, 0
        self._parts = {"logsumexp": _logsumexp} | (GPU_PARTS if on_gpu else {})
        # Operations that run as parts right now: they are one of these themselves.
        self._inside: set[str] = set()
        self._hosts = WeakTensorKeyDictionary()
        self._sizes: dict[int, int] = {}
        # Storage and line of code of the last number that the host read.
        self._looked_at: tuple[int, Any] | None = None

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
        tensors = tensors_in((args, kwargs))
        for tensor in tensors:
            if isinstance(tensor, FakeTensor):
                self._holds(tensor, came=False)
        if name == "_local_scalar_dense":
            self._look(args[0])
            return self._run(func, name, args, kwargs)
        if name not in NO_KERNEL:
            self._looked_at = None
        if name in _INDEXED and not self._is_hosts(tensors):
            args = (args[0], self._rows(args[1]), *args[2:])
        for _ in range(waits_of(name, args, kwargs)):
            self.wait(tensors_in((args, kwargs)))
        out = self._run(func, name, args, kwargs)
        for tensor in tensors_in(out):
            if isinstance(tensor, FakeTensor):
                self._holds(tensor, came=True)
        if self._is_hosts(tensors_in((args, kwargs, out))):
            self.is_the_hosts(out)
        elif kernels := kernels_of(name, args, kwargs, out):
            kind = kind_of(name)
            self.counts.launches[name] += kernels
            self.counts.bytes[kind, name] += bytes_of(name, args, kwargs, out)
            self.counts.flops[kind] += flops_of(func, name, args, kwargs, out)
        return out

    def _run(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in((args, kwargs))
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors) and not _makes_numbers(name, tensors, kwargs):
            out = func(*args, **kwargs)
            return out if name in _SAME else tree_map_only(torch.Tensor, self._fake_if_number, out)
        if name == "_local_scalar_dense":
            return torch.zeros((), dtype=tensors[0].dtype, device="cpu").tolist()
        if any(map(_is_real, tensors)):
            flat, spec = tree_flatten((args, kwargs))
            flat = [self._fakes.from_tensor(x) if _is_real(x) else x for x in flat]
            args, kwargs = tree_unflatten(flat, spec)
        with self._fakes:
            return func(*args, **kwargs)

    def _rows(self, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Masks as the numbers of their rows: the host waits for how many there are."""
        found: list[torch.Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype == torch.bool and _is_real(index):
                self.wait([index])
                self.counts.launches["nonzero"] += 3
                found += index.nonzero(as_tuple=True)
            else:
                found.append(index)
        return found

    def _fake_if_number(self, tensor: torch.Tensor) -> torch.Tensor:
        is_number = tensor.dtype.is_floating_point and not isinstance(tensor, FakeTensor)
        return self._fakes.from_tensor(tensor) if is_number else tensor

    def _holds(self, tensor: torch.Tensor, came: bool) -> None:
        """Count a storage once for all views of it, until the last one goes; one of before the run, as nothing."""
        storage = tensor.untyped_storage()
        known = self._sizes.get(storage._cdata)
        size = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES if came else 0
        # A storage of before stays uncounted; one of the run may have got another size since.
        if known == 0 or known == size or (known is not None and not came):
            return
        if known is None:
            # Its address may be another storage's when it has gone.
            weakref.finalize(storage, self._has_gone, storage._cdata)
        self._sizes[storage._cdata] = size
        self.now += size - (known or 0)
        if self.now > self.peak:
            if self._collects and self.now > self._collected_at * 1.01:
                gc.collect()
                self._collected_at = max(self.now, self.peak)
            self.peak = max(self.peak, self.now)

    def _has_gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)

    def note_launch(self, name: str, amount: int) -> None:
        """A kernel below the dispatcher."""
        self._looked_at = None
        self.counts.launches[name] += 1
        self.counts.bytes["other", name] += amount

    def _look(self, value: torch.Tensor) -> None:
        """One number for the host. Those of one tensor, read one after the other by one line, are one copy."""
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

    def upload(self) -> None:
        """A copy to the device that the host waits for."""
        if not is_on_host():
            self.counts.waits[caller()] += 1

    def wait(self, tensors: Sequence[torch.Tensor]) -> None:
        """The host waits for these."""
        if not self._is_hosts(tensors):
            self.counts.waits[caller()] += 1

    def _is_hosts(self, tensors: Sequence[torch.Tensor]) -> bool:
        return is_on_host(numbers=any(isinstance(tensor, FakeTensor) for tensor in tensors))


class _HostTransfers(TorchFunctionMode):
    """Waits without an operation of their own: ``cpu()``, ``to("cpu")``, ``numpy()`` of fake tensors, and copies of
    tensors the host has just made to the device, unless they are ``non_blocking``: the host waits for all queued work.

    A device given as ``torch.device`` may be the tensor's own, and counts only for tensors known to be the host's. Nor
    do ``cpu()`` and ``tolist()`` of real whole numbers count, which may be the host's.
    """

    def __init__(self, counting: _Counting):
        super().__init__()
        self._counting = counting

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, counting = kwargs or {}, self._counting
        if func in _MADE:
            out = func(*args, **kwargs)
            counting.is_the_hosts(out) if kwargs.get("device") is None else counting.upload()
            return out
        if func is torch.Tensor.copy_ and not kwargs.get("non_blocking", args[2] if len(args) > 2 else False):
            if counting.is_known_hosts(args[1]) and not counting.is_known_hosts(args[0]):
                counting.upload()
            return func(*args, **kwargs)
        targets = (*args[1:2], kwargs.get("device"))
        to_device = any(isinstance(target, torch.device) for target in targets)
        if func is torch.Tensor.to and to_device and counting.is_known_hosts(args[0]):
            if not kwargs.get("non_blocking", False):
                counting.upload()
            out = func(*args, **kwargs)
            # Another tensor from here on: the device's.
            return out.expand_as(out) if out is args[0] else out
        reads = func in _TO_HOST or (func is torch.Tensor.to and "cpu" in [t for t in targets if isinstance(t, str)])
        if not reads or not isinstance(args[0], FakeTensor):
            return func(*args, **kwargs)
        counting.wait(args[:1])
        if func is not torch.Tensor.numpy:
            return func(*args, **kwargs)
        # The values are not known: they are 0, as those of ``item()``.
        with _disable_current_modes():
            return torch.zeros(args[0].shape, dtype=args[0].dtype, device="cpu").numpy()


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


def is_on_host(numbers: bool = False) -> bool:
    """Whether any calling frame is one of ``HOST``; ``numbers``: of ``HOST_NUMBERS``."""
    return any(_is_one(frame.f_code.co_filename, frame.f_code.co_name, numbers) for frame in _frames())


def caller() -> str:
    """``path:line function`` outside of torch and of this file."""
    frames = [*_frames()]
    ours = (f for f in frames if "/torch/" not in f.f_code.co_filename and f.f_code.co_filename != __file__)
    frame = next(ours, frames[-1])
    # Without the folder of the checkout, so that equal code is named alike everywhere.
    _, package, within = frame.f_code.co_filename.rpartition("/vlm_pg/")
    path = f"vlm_pg/{within}" if package else "/".join(frame.f_code.co_filename.split("/")[-4:])
    return f"{path}:{frame.f_lineno} {frame.f_code.co_name}"


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


@cache
def _is_one(path: str, function: str, numbers: bool) -> bool:
    return any(path.endswith(end) and name in ("", function) for end, name in (HOST_NUMBERS if numbers else HOST))


@contextmanager
def triton_launches(note: Callable[[str, int], None]) -> Iterator[None]:
    """Inside, Triton's launches, which no dispatcher sees, call ``note(kernel's name, bytes read and written)`` instead
    of a driver. A tensor that is given twice (a gradient replaced in place) counts twice."""
    try:
        from triton.runtime.autotuner import Autotuner
        from triton.runtime.jit import JITFunction
    except ImportError:  # then no kernel can be launched
        yield
        return

    def launch(kernel: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> None:
        name = kernel.fn.__name__
        twice = READ_AND_WRITTEN.get(name, ())
        named = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        tensors = {key: value for key, value in named.items() if isinstance(value, torch.Tensor)}
        note(name, sum(spanned_bytes(value) * (2 if key in twice else 1) for key, value in tensors.items()))

    def tuned_launch(tuner: Any, *args: Any, **kwargs: Any) -> None:
        kernel = tuner.fn
        while not isinstance(kernel, JITFunction):  # heuristics may stand between
            kernel = kernel.fn
        launch(kernel, *args, **kwargs)

    with replaced(JITFunction, run=launch), replaced(Autotuner, run=tuned_launch):
        yield


def _logsumexp(_: Any, x: torch.Tensor, dim: Any, keepdim: bool = False) -> torch.Tensor:
    """As ReduceOps.cpp: with a tensor of all exponentials on the way, and infinite largest values as zeros."""
    (axis,) = dim if isinstance(dim, (list, tuple)) else (dim,)
    top = x.amax(axis, keepdim=True)
    squeezed = top if keepdim else top.squeeze(axis)
    squeezed.masked_fill_(squeezed.abs() == torch.inf, 0)
    return (x - top).exp_().sum(axis, keepdim=keepdim).log_().add_(squeezed)


def _flash_backward(operation: Any, *args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    """dq is summed in fp32; dk and dv are made for each query head, then summed over those that share keys.

    Rows between segments, so that their sums do not touch: 128 (flash_api.cpp, ``mha_varlen_bwd``, ``mha_bwd``).
    """
    q, k = args[1:3]
    dense = q.dim() == 4  # [B, N, rows, H], else [rows, N, H]
    rows = q.shape[0] * -(-q.shape[2] // 128) * 128 if dense else q.shape[0] + 128 * (args[6].numel() - 1)
    heads, kv_heads, size = q.shape[1], k.shape[1], q.shape[-1]
    held = [q.new_empty(rows, heads, size, dtype=torch.float32), q.new_empty(rows, heads, dtype=torch.float32)]
    if heads == kv_heads:
        return operation(*args, **options)
    # Heads last but one, as the kernels have them.
    tokens = (k.shape[0], k.shape[2]) if dense else k.shape[:1]
    by_query_head = [k.new_empty(*tokens, kv_heads, heads // kv_heads, size) for _ in range(2)]
    dq, *gradients = operation(*args, **options)
    del held
    for gradient, parts in zip(gradients, by_query_head, strict=True):
        torch.sum(parts, -2, out=gradient.transpose(1, 2) if dense else gradient)
    return dq, *gradients


def _embedding_backward(operation: Any, grad: torch.Tensor, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Of many rows sums in fp32 (EmbeddingBackwardKernel.cu)."""
    many = ids.numel() > UNSORTED_ROWS
    sums = grad.new_empty(ids.numel(), grad.shape[-1], dtype=torch.float32) if many else None
    out = operation(grad, ids, *rest)
    del sums
    return out


# Operations with memory of their own on CUDA: called instead, and what they call is counted.
GPU_PARTS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(FLASH_BACKWARD, _flash_backward),
    "embedding_dense_backward": _embedding_backward,
}
