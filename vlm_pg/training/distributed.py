"""The few things ranks tell each other. Without torch.distributed every call is its own answer."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    return dist.get_world_size() if is_distributed() else 1


def launched_world_size() -> int:
    """Processes the launcher started, known before they are connected."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_device() -> torch.device:
    """The accelerator of this process, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda", torch.cuda.current_device())


def barrier() -> None:
    if is_distributed():
        dist.barrier()


def disconnect() -> None:
    """Leave together: a rank that simply goes takes its end of a collective with it that others may still be in."""
    if is_distributed():
        dist.barrier()
        dist.destroy_process_group()


def end_rank(code: int) -> NoReturn:
    """End a connected process without taking its interpreter apart.

    DeepSpeed keeps groups that were destroyed, and their gloo threads live on. One that lets go of a tensor of Python's
    while the interpreter ends aborts the process, after all its work was done (pytorch/pytorch issue 190489).
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def sum_over_ranks(values: Mapping[str, float], device: torch.device) -> dict[str, float]:
    """Each value summed over ranks; every rank passes the same keys."""
    return _reduce(values, device, dist.ReduceOp.SUM)


def max_over_ranks(values: Mapping[str, float], device: torch.device) -> dict[str, float]:
    """The largest of each value over ranks."""
    return _reduce(values, device, dist.ReduceOp.MAX)


def _reduce(values: Mapping[str, float], device: torch.device, operation: Any) -> dict[str, float]:
    if not is_distributed():
        return dict(values)
    names = sorted(values)
    tensor = torch.tensor([values[name] for name in names], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, operation)
    return dict(zip(names, tensor.tolist(), strict=True))


def gather_objects(value: Any) -> list[Any]:
    """Every rank's ``value``, in rank order, on every rank."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values
