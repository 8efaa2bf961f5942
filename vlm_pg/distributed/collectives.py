"""Numbers, tensors and objects of all ranks, and stopping together before a collective.

Without torch.distributed every call returns its own argument.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from vlm_pg.distributed.processes import host_group, is_distributed, local_device

# Tensors are joined up to this size for one collective: a call for each of thousands of small ones would cost more.
BUCKET_BYTES = 64 * 2**20


def sum_over_ranks(values: Mapping[str, float], device: torch.device) -> dict[str, float]:
    """Each value summed over ranks; every rank passes the same keys."""
    return _reduce(values, device, dist.ReduceOp.SUM)


def max_over_ranks(values: Mapping[str, float], device: torch.device) -> dict[str, float]:
    """The largest of each value over ranks."""
    return _reduce(values, device, dist.ReduceOp.MAX)


def min_over_ranks(values: Mapping[str, float], device: torch.device) -> dict[str, float]:
    """The smallest of each value over ranks."""
    return _reduce(values, device, dist.ReduceOp.MIN)


def _reduce(values: Mapping[str, float], device: torch.device, operation: Any) -> dict[str, float]:
    if not is_distributed():
        return dict(values)
    check_stop()
    names = sorted(values)
    tensor = torch.tensor([values[name] for name in names], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, operation)
    return dict(zip(names, tensor.tolist(), strict=True))


@torch.no_grad()
def sum_tensors_over_ranks(tensors: Sequence[torch.Tensor]) -> None:
    """Each tensor becomes its sum over ranks, in place and in its own dtype; all ranks pass the same shapes in order.

    All ranks get the same bits.
    """
    if not is_distributed():
        return
    for bucket in _buckets(tensors):
        if len(bucket) == 1 and bucket[0].is_contiguous():
            dist.all_reduce(bucket[0])
            continue
        joined = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(joined)
        parts = joined.split([tensor.numel() for tensor in bucket])
        torch._foreach_copy_(list(bucket), [part.view_as(tensor) for part, tensor in zip(parts, bucket, strict=True)])


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one dtype and device, up to ``BUCKET_BYTES`` together; a larger tensor is alone."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        bytes_here = tensor.numel() * tensor.element_size()
        alike = not bucket or (tensor.dtype, tensor.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and (not alike or size + bytes_here > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += bytes_here
    if bucket:
        yield bucket


def exchange_rows(values: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: Any = None) -> torch.Tensor:
    """A part of ``values`` to each rank (of ``group``), and what each of them has for this one.

    Args:
        values: [sum of send, ...], of one dtype and row shape everywhere.
        send, receive: rows to and from each rank, in their order.

    Returns:
        [sum of receive, ...].
    """
    out = values.new_empty((sum(receive), *values.shape[1:]))
    dist.all_to_all_single(out, values.contiguous(), list(receive), list(send), group=group)
    return out


def exchange_objects(for_ranks: Sequence[Any]) -> list[Any]:
    """One object for each rank; what each rank has for this one, in rank order. They are pickled."""
    if not is_distributed():
        return list(for_ranks)
    check_stop()
    device = torch.device("cpu") if dist.get_backend() == "gloo" else local_device()
    packed = [torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8) for value in for_ranks]
    send = torch.tensor([len(piece) for piece in packed], device=device)
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send)
    sizes = receive.tolist()
    received = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, torch.cat(packed).to(device), sizes, send.tolist())
    return [pickle.loads(piece.numpy().tobytes()) for piece in received.cpu().split(sizes)]


def gather_objects(value: Any) -> list[Any]:
    """Every rank's ``value``, in rank order, on every rank."""
    if not is_distributed():
        return [value]
    check_stop()
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class AgreedStop(InterruptedError):
    """Some rank got a stop request, and all ranks have left at this collective."""


_stop_requested: Callable[[], bool] | None = None


@contextmanager
def stopping_together(requested: Callable[[], bool]) -> Iterator[None]:
    """Inside, all ranks raise ``AgreedStop`` before a collective of numbers or objects once ``requested()`` of one is
    true.

    A rank that leaves on its own calls ``join_stop``, which matches the others' next check.
    """
    global _stop_requested
    before, _stop_requested = _stop_requested, requested
    try:
        yield
    finally:
        _stop_requested = before


def check_stop() -> None:
    """A collective where ranks stop together (``stopping_together``), else nothing.

    Raises:
        AgreedStop: some rank got a stop request.
    """
    if _stop_requested is None:
        return
    requested = _stop_requested()
    if _any_rank(requested) if is_distributed() else requested:
        raise AgreedStop("stop requested")


def forbid_stop() -> None:
    """Called on all ranks: no rank stops until the present ``stopping_together`` ends."""
    global _stop_requested
    _stop_requested = None


def join_stop() -> None:
    """Called by a rank that leaves: the others leave too, at their next check."""
    _any_rank(True)


def _any_rank(here: bool) -> bool:
    flag = torch.tensor([int(here)])
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=host_group())
    return bool(flag.item())
