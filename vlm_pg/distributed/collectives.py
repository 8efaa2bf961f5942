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
    agree_to_go_on()
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
    agree_to_go_on()
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
    agree_to_go_on()
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class AgreedStop(InterruptedError):
    """Some rank was asked to stop, and all ranks have left at this place."""


_asked_to_stop: Callable[[], bool] | None = None


@contextmanager
def stopping_together(asked: Callable[[], bool]) -> Iterator[None]:
    """Inside, all ranks raise ``AgreedStop`` before a collective of numbers or objects once ``asked()`` of one is true.

    A rank that leaves by itself calls ``meet_to_stop``, which is what the others meet in place of their collective.
    """
    global _asked_to_stop
    before, _asked_to_stop = _asked_to_stop, asked
    try:
        yield
    finally:
        _asked_to_stop = before


def agree_to_go_on() -> None:
    """A collective where ranks stop together (``stopping_together``), else nothing.

    Raises:
        AgreedStop: some rank was asked to stop.
    """
    if _asked_to_stop is None:
        return
    asked = _asked_to_stop()
    if _any_rank(asked) if is_distributed() else asked:
        raise AgreedStop("asked to stop")


def no_way_back() -> None:
    """Called on all ranks: until the present ``stopping_together`` ends no rank stops any more."""
    global _asked_to_stop
    _asked_to_stop = None


def meet_to_stop() -> None:
    """Leave the other ranks, which are about to make a collective: they leave too."""
    _any_rank(True)


def _any_rank(here: bool) -> bool:
    flag = torch.tensor([int(here)])
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=host_group())
    return bool(flag.item())
