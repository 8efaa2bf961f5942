"""Processes that share a token stream or media, and the differentiable exchange between them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from vlm_pg.distributed.collectives import exchange_rows
from vlm_pg.distributed.layout import RankLayout
from vlm_pg.distributed.processes import host_group

T = TypeVar("T")
ALL_TO_ALL, ALL_GATHER = "all_to_all", "all_gather"


class SequenceGroup:
    """The processes of one data rank, or all, and what they send each other while they share a token stream or media.

    ``sent``: bytes of tensors that this process has sent to the others so far, by collective.
    """

    def __init__(self, size: int = 1, rank: int = 0, tensors: Any = None, objects: Any = None):
        self.size, self.rank = size, rank
        self._tensors, self._objects = tensors, objects
        self.sent: Counter[str] = Counter()

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

    @property
    def sent_bytes(self) -> int:
        return sum(self.sent.values())

    @classmethod
    def of_everybody(cls, ranks: RankLayout) -> SequenceGroup:
        """All processes, whatever they work on."""
        return cls(ranks.world_size, ranks.rank, None, host_group()) if ranks.world_size > 1 else cls()

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
        self._count(ALL_TO_ALL, values, sum(send) - send[self.rank])
        return self._exchange_rows(values, send, receive)

    def collect(self, values: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """``gather_rows`` without autograd."""
        # Parts of one size, for which there is a collective; they differ by little.
        most = max(sizes)
        if not most:
            return values
        own = torch.cat([values, values.new_zeros((most - values.shape[0], *values.shape[1:]))]).contiguous()
        everything = values.new_empty((self.size * most, *values.shape[1:]))
        self._count(ALL_GATHER, values, (self.size - 1) * most)
        self._gather_into(everything, own)
        return torch.cat([everything[i * most : i * most + size] for i, size in enumerate(sizes)])

    # What goes over the wire, which work that is counted only does not.
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


SINGLE_SP_RANK = SequenceGroup()
