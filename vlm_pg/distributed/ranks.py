"""Position of a process in a run, and the processes that share a token stream or media with it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from vlm_pg.distributed.collectives import exchange_rows, gather_objects, sum_over_ranks
from vlm_pg.distributed.processes import host_group, is_distributed

T = TypeVar("T")
ALL_TO_ALL, ALL_GATHER = "all_to_all", "all_gather"


@dataclass(frozen=True)
class RankLayout:
    """Position of this process among all processes of a run.

    A data rank is ``sequence_size`` consecutive processes (its sequence ranks). In an update they work on the same
    groups, each on its part of every token stream; everywhere else each process has its own questions.

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
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)
        return cls(rank, world_size, sequence_size)

    @property
    def is_rank0(self) -> bool:
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
        """``sum_over_ranks`` of values that all sequence ranks of a data rank hold alike: each counts once."""
        return sum_over_ranks({name: 0.0 if self.sequence_rank else value for name, value in values.items()}, device)

    def of_data_ranks(self, of_processes: Sequence[T]) -> Sequence[T]:
        """One entry for each data rank, of entries for each process."""
        return of_processes[:: self.sequence_size]

    def from_rank0(self, compute: Callable[[], T]) -> T:
        """``compute()`` of rank 0: a network file system may show other ranks something else. A collective."""
        return gather_objects(compute() if self.is_rank0 else None)[0]


class SequenceGroup:
    """The processes of one data rank, or all, and their exchanges while they share a token stream or media.

    ``sent``: bytes of tensors that this process has sent to the others so far, by collective.
    """

    def __init__(self, size: int = 1, rank: int = 0, tensors: Any = None, objects: Any = None):
        self.size, self.rank = size, rank
        self._tensors, self._objects = tensors, objects
        self.sent: Counter[str] = Counter()

    @classmethod
    def of(cls, ranks: RankLayout) -> SequenceGroup:
        """This process's group. A collective of all processes, since each takes part in making every group."""
        size = ranks.sequence_size
        if size == 1:
            return cls()
        members = [list(range(first, first + size)) for first in range(0, ranks.world_size, size)]
        tensors = [dist.new_group(group) for group in members]
        # Prompts with their pixels lie in the host's memory, and must not pass through the devices'.
        on_host = dist.get_backend() == "gloo"
        objects = tensors if on_host else [dist.new_group(group, backend="gloo") for group in members]
        return cls(size, ranks.sequence_rank, tensors[ranks.data_rank], objects[ranks.data_rank])

    @classmethod
    def of_all(cls, ranks: RankLayout) -> SequenceGroup:
        """All processes of the run."""
        return cls(ranks.world_size, ranks.rank, None, host_group()) if ranks.world_size > 1 else cls()

    def gather(self, value: T) -> list[T]:
        """Every member's ``value``, in their order; it is pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._objects)
        return values

    def exchange(self, values: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Differentiable all-to-all: a part of ``values`` to each member, and what each of them has for this one.

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
            reduce: whether members use the rows differently, so that a row's gradient is the sum over members. Else all
                do the same, and the gradient of a member's own rows is its own.
        """
        return _GatherRows.apply(values, list(sizes), reduce, self)

    def send(self, values: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """``exchange`` without autograd."""
        self._count(ALL_TO_ALL, values, sum(send) - send[self.rank])
        return self._exchange_rows(values, send, receive)

    def collect(self, values: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """``gather_rows`` without autograd."""
        # Padded to parts of one size, for which there is a collective; they differ by little.
        most = max(sizes)
        if not most:
            return values
        own = torch.cat([values, values.new_zeros((most - values.shape[0], *values.shape[1:]))]).contiguous()
        everything = values.new_empty((self.size * most, *values.shape[1:]))
        self._count(ALL_GATHER, values, (self.size - 1) * most)
        self._gather_into(everything, own)
        return torch.cat([everything[i * most : i * most + size] for i, size in enumerate(sizes)])

    # Replaced where work is only counted.
    def _exchange_rows(self, values: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        return exchange_rows(values, send, receive, self._tensors)

    def _gather_into(self, everything: torch.Tensor, own: torch.Tensor) -> None:
        dist.all_gather_into_tensor(everything, own, group=self._tensors)

    def _count(self, collective: str, values: torch.Tensor, rows: int) -> None:
        self.sent[collective] += rows * values.element_size() * math.prod(values.shape[1:])


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


SINGLE_RANK, SINGLE_SP_RANK = RankLayout(), SequenceGroup()
