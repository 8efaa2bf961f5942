"""Ranks and what they tell each other. Without torch.distributed every call is its own answer."""

from __future__ import annotations

import atexit
import math
import os
import pickle
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from vlm_pg.errors import ConfigError

T = TypeVar("T")

_OF_COLLECTIVES = re.compile(r"gloo|nccl|Connection closed by peer|Connection reset by peer|Broken pipe", re.IGNORECASE)

# What a launcher tells each process.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Tensors are joined up to this size for one collective: a call for each of thousands of small ones would cost more.
BUCKET_BYTES = 64 * 2**20
# Between two looks whether all ranks have come.
_MEETING_SECONDS = 0.1


@dataclass(frozen=True)
class RankLayout:
    """Where this process stands among all that work on a run.

    A data rank is ``sequence_size`` processes in a row (its sequence ranks). In an update they work on the same groups,
    each on its part of every token stream; everywhere else each process has questions of its own.

    Raises:
        ValueError: there is no such rank, or the processes cannot be divided so.
    """

    rank: int = 0
    world_size: int = 1
    sequence_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size or self.sequence_size < 1 or self.world_size % self.sequence_size:
            raise ValueError(
                f"There is no rank {self.rank} in {self.world_size} processes with {self.sequence_size} to a data rank."
            )

    @classmethod
    def here(cls, sequence_size: int = 1) -> RankLayout:
        """Of this process, once it is connected to the others."""
        place = (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)
        return cls(*place, sequence_size)

    @property
    def is_first(self) -> bool:
        """Whether this process writes and prints for all of them."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        return self.rank // self.sequence_size

    @property
    def data_size(self) -> int:
        return self.world_size // self.sequence_size

    @property
    def sequence_rank(self) -> int:
        return self.rank % self.sequence_size

    def sum_over_data_ranks(self, values: Mapping[str, float], device: torch.device) -> dict[str, float]:
        """As ``sum_over_ranks``, of values that all sequence ranks of a data rank hold alike: each counts once."""
        return sum_over_ranks({name: 0.0 if self.sequence_rank else value for name, value in values.items()}, device)

    def of_data_ranks(self, of_processes: Sequence[T]) -> Sequence[T]:
        """One entry for each data rank, of entries for each process."""
        return of_processes[:: self.sequence_size]

    def first_says(self, ask: Callable[[], T]) -> T:
        """What ``ask()`` says on the first rank: a network file system may show the others something else."""
        return gather_objects(ask() if self.is_first else None)[0]


ALONE = RankLayout()


class SequenceGroup:
    """The processes of one data rank, or all, and what they send each other while they share a token stream or media.

    ``sent_bytes``: of tensors that this process has sent to the others so far.
    """

    def __init__(self, size: int = 1, rank: int = 0, tensors: Any = None, objects: Any = None):
        self.size, self.rank = size, rank
        self._tensors, self._objects = tensors, objects
        self.sent_bytes = 0

    @classmethod
    def of(cls, ranks: RankLayout) -> SequenceGroup:
        """This process's group; made by all processes together."""
        size = ranks.sequence_size
        if size == 1:
            return cls()
        everyone = [range(first, first + size) for first in range(0, ranks.world_size, size)]
        # Every process takes part in making every group.
        tensors = [dist.new_group(list(members)) for members in everyone]
        # Prompts with their pixels lie in the host's memory, and must not pass through the devices'.
        on_host = dist.get_backend() == "gloo"
        objects = tensors if on_host else [dist.new_group(list(members), backend="gloo") for members in everyone]
        return cls(size, ranks.sequence_rank, tensors[ranks.data_rank], objects[ranks.data_rank])

    @classmethod
    def of_everybody(cls, ranks: RankLayout) -> SequenceGroup:
        """All processes, whatever they work on."""
        return cls(ranks.world_size, ranks.rank, None, _host_group()) if ranks.world_size > 1 else cls()

    def gather(self, value: T) -> list[T]:
        """Every member's ``value``, in their order; it is pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._objects)
        return values

    def exchange(self, values: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Differentiable: a part of ``values`` to each member, and what each of them has for this one.

        Args:
            values: [sum of send, ...].
            send, receive: rows to and from each member, in their order.

        Returns:
            [sum of receive, ...].
        """
        return _Exchange.apply(values, list(send), list(receive), self)

    def gather_rows(self, values: torch.Tensor, sizes: Sequence[int], reduce: bool) -> torch.Tensor:
        """Differentiable: every member's rows [sizes[member], ...], one after the other, on all of them.

        Args:
            reduce: whether each member does something of its own with all rows, so that a row's gradient is the sum
                over members. Else all do the same, and the gradient of a member's own rows is its own.
        """
        return _GatherRows.apply(values, list(sizes), reduce, self)

    def send(self, values: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """``exchange`` without autograd."""
        self._count(values, sum(send) - send[self.rank])
        return exchange_rows(values, send, receive, self._tensors)

    def collect(self, values: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """``gather_rows`` without autograd."""
        # Parts of one size, for which there is a collective; they differ by little.
        most = max(sizes)
        if not most:
            return values
        own = torch.cat([values, values.new_zeros((most - values.shape[0], *values.shape[1:]))]).contiguous()
        everything = values.new_empty((self.size * most, *values.shape[1:]))
        self._count(values, (self.size - 1) * most)
        dist.all_gather_into_tensor(everything, own, group=self._tensors)
        return torch.cat([everything[i * most : i * most + size] for i, size in enumerate(sizes)])

    def _count(self, values: torch.Tensor, rows: int) -> None:
        self.sent_bytes += rows * values.element_size() * math.prod(values.shape[1:])


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, send: list[int], receive: list[int], group: SequenceGroup
    ) -> torch.Tensor:
        ctx.sizes, ctx.group = (send, receive), group
        return group.send(values, send, receive)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[Any, ...]:
        send, receive = ctx.sizes
        return ctx.group.send(grad_outputs[0], receive, send), None, None, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, sizes: list[int], reduce: bool, group: SequenceGroup) -> torch.Tensor:
        ctx.sizes, ctx.reduce, ctx.group = sizes, reduce, group
        return group.collect(values, sizes)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[Any, ...]:
        gradient, group = grad_outputs[0], ctx.group
        own = ctx.sizes[group.rank]
        if not ctx.reduce:
            first = sum(ctx.sizes[: group.rank])
            return gradient[first : first + own], None, None, None
        parts = group.send(gradient, ctx.sizes, [own] * group.size)
        # In fp32: bf16 has 8 bits of mantissa.
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = parts.view(group.size, own, *gradient.shape[1:]).sum(0, dtype=wide)
        return total.to(gradient.dtype), None, None, None


BY_ITSELF = SequenceGroup()


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def launched_world_size() -> int:
    """Processes the launcher started, known before they are connected."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join_ranks() -> None:
    """Join the processes that the launcher started: NCCL with GPUs, gloo without. Nothing where it started one.

    Raises:
        ConfigError: the launcher did not say where this process stands, or another one has gone meanwhile.
    """
    if launched_world_size() == 1 or is_distributed():
        return
    if missing := [name for name in LAUNCHER_VARIABLES if name not in os.environ]:
        raise ConfigError(
            f"WORLD_SIZE is {launched_world_size()}, but {', '.join(missing)} is not set, so this process cannot find "
            f"the others. Start it with torchrun or deepspeed, or set {', '.join(LAUNCHER_VARIABLES)}."
        )
    local_device()  # NCCL takes the current one
    store, rank, world_size = next(rendezvous("env://"))
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        # torchrun that starts its ranks anew keeps the store: what those before left there must not be found.
        # On several nodes the counts may differ, for one that restarts because another does counts nothing.
        store = dist.distributed_c10d.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    except RuntimeError as error:
        if not is_about_other_ranks(error):
            raise
        raise ConfigError(
            f"Rank {rank} was left by another one while the {world_size} processes of this run met. Start all of them "
            "again; what the other printed itself says why."
        ) from error


def local_device() -> torch.device:
    """The accelerator of this process, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda", torch.cuda.current_device())


class AgreedStop(InterruptedError):
    """Some rank was asked to stop, and all ranks have left at this place."""


_asked_to_stop: Callable[[], bool] | None = None


@contextmanager
def stopping_together(asked: Callable[[], bool]) -> Iterator[None]:
    """Inside, all ranks raise ``AgreedStop`` before a collective of numbers or objects once ``asked()`` of one is true.

    A rank that leaves by itself calls ``meet_to_stop``, which is what the others meet in place of their collective.
    """
    global _asked_to_stop
    _asked_to_stop = asked
    try:
        yield
    finally:
        _asked_to_stop = None


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
    """Called on all ranks: until the present ``stopping_together`` ends nobody leaves any more."""
    global _asked_to_stop
    _asked_to_stop = None


def meet_to_stop() -> None:
    """Leave the other ranks, which are about to make a collective: they leave too."""
    _any_rank(True)


def _any_rank(here: bool) -> bool:
    flag = torch.tensor([int(here)])
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=_host_group())
    return bool(flag.item())


@cache
def _host_group() -> Any:
    """All ranks, on the host: a question through the devices would wait for the work that they have queued."""
    return None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")


class SharedNote:
    """A text that one rank leaves and all ranks read without a collective, from any thread."""

    def __init__(self, name: str):
        self._key = f"vlm_pg/{name}"
        # What the ranks met at; torch has no public name for it.
        self._store = dist.distributed_c10d._get_default_store()

    def leave(self, text: str) -> None:
        """Raises ConnectionError: the process that holds the store is gone."""
        try:
            self._store.set(self._key, text)
        except dist.DistError as error:
            raise ConnectionError(f"{self._key} cannot be left: {error}") from error

    def is_there(self) -> bool:
        return bool(self._store.check([self._key]))

    def read(self, within_seconds: float) -> str:
        """Waits until it has been left.

        Raises:
            TimeoutError: it was not, or the process that holds the store is gone.
        """
        try:
            self._store.wait([self._key], timedelta(seconds=within_seconds))
            return self._store.get(self._key).decode()
        except dist.DistError as error:
            raise TimeoutError(f"{self._key} was not left in {within_seconds:.0f} s") from error


class SharedFlag(SharedNote):
    """Something that any rank may say and all ranks hear."""

    def set(self) -> None:
        self.leave("1")

    def is_set(self) -> bool:
        return self.is_there()


class Meeting:
    """Where ranks that work at their own pace wait for each other for as long as that takes: collectives give up after
    minutes. All ranks make their meetings in the same order."""

    _number = 0

    def __init__(self) -> None:
        Meeting._number += 1
        self._key = f"vlm_pg/meeting/{Meeting._number}"

    def wait(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Until all ranks wait here.

        Raises:
            InterruptedError: ``should_stop`` said so; it is asked several times a second.
        """
        if not is_distributed():
            return
        store = dist.distributed_c10d._get_default_store()
        store.add(self._key, 1)
        while store.add(self._key, 0) < dist.get_world_size():
            if should_stop():
                raise InterruptedError("stopped while waiting for the other ranks")
            time.sleep(_MEETING_SECONDS)


def is_about_other_ranks(error: BaseException) -> bool:
    """Whether ``error``, or what led to it, is what a collective says when another rank is gone.

    It may be: the same libraries say it of faults of their own.
    """
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, dist.DistError) or (
            isinstance(chain, RuntimeError) and _OF_COLLECTIVES.search(str(chain))
        ):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def barrier() -> None:
    if is_distributed():
        dist.barrier()


def disconnect() -> None:
    """Leave together: a rank that simply goes takes its end of a collective with it that others may still be in."""
    if is_distributed():
        dist.barrier()
        _host_group.cache_clear()
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
