"""Each sequence rank's share of a packed stream, and the all-to-all of heads around attention.

Layers work row by row, except where tokens are mixed. So every sequence rank runs the layers on some rows of the
stream. Around attention there is an all-to-all (Ulysses, https://arxiv.org/abs/2309.14509): before it each rank sends
all heads of its rows and gets some heads of all rows; after it back again. The tree is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vlm_pg.distributed import SequenceGroup


class Indices:
    """int64 indices on the host, copied to a device once, without a synchronization."""

    def __init__(self, on_host: np.ndarray):
        self.on_host = np.ascontiguousarray(on_host, dtype=np.int64)
        self._on: dict[torch.device, Tensor] = {}

    def __len__(self) -> int:
        return len(self.on_host)

    def on(self, device: torch.device) -> Tensor:
        if device not in self._on:
            self._on[device] = torch.from_numpy(self.on_host).to(device, non_blocking=True)
        return self._on[device]


class Division:
    """Which sequence rank has which of some rows; all on the host.

    Args:
        owner: int64 [rows]: rank of each row.

    ``mine``: int64, this rank's rows in order. ``sizes``: rows of each rank. ``index``: int64 [rows], index of each row
    among this rank's, -1 for rows of others.

    A rank without rows runs the layers on a dummy row: transformers' modules cannot take an empty stream, and all ranks
    must call the same ones.
    """

    def __init__(self, owner: np.ndarray, sequence: SequenceGroup):
        self.owner, self.sequence = owner, sequence
        self.sizes: list[int] = np.bincount(owner, minlength=sequence.size).tolist()
        self.mine = np.flatnonzero(owner == sequence.rank)
        self.index = np.full(len(owner), -1)
        self.index[self.mine] = np.arange(len(self.mine))
        # Rank after rank, each one's rows in order.
        by_rank = owner.argsort(kind="stable")
        self._by_rank, self._back, self._mine = Indices(by_rank), Indices(by_rank.argsort()), Indices(self.mine)

    def take(self, values: Tensor, dim: int = 0) -> Tensor:
        """This rank's rows of a tensor that has all; none if there are none."""
        return values.index_select(dim, self._mine.on(values.device))

    def in_order(self, by_rank: Tensor) -> Tensor:
        """Rows [rows, ...] that lie rank after rank, brought into order."""
        return by_rank.index_select(0, self._back.on(by_rank.device))

    def by_rank(self, in_order: Tensor) -> Tensor:
        """The inverse of ``in_order``."""
        return in_order.index_select(0, self._by_rank.on(in_order.device))

    def gather(self, mine: Tensor) -> Tensor:
        """Values of this rank's rows -> of all rows, in order, on every rank; all go on with them alike."""
        return self.in_order(self.sequence.gather_rows(mine, self.sizes, reduce=False))


class StreamShare:
    """This rank's share of a stream.

    Args:
        rows: of the stream.
        read: of the rows whose last hidden states are used, in their order; behind prefixes that ran before, theirs
            come first.
        read_indices: int64, indices of the read rows among this rank's rows.
    """

    def __init__(self, rows: Division, read: Division, read_indices: np.ndarray):
        self.rows, self.read = rows, read
        unread = np.ones(len(rows.mine), dtype=bool)
        unread[read_indices] = False
        others = np.flatnonzero(unread)
        self._read, self._unread = Indices(read_indices), Indices(others)
        self._order = Indices(np.concatenate([read_indices, others]).argsort())
        # Read rows of this rank.
        self.num_read = len(read_indices)

    @classmethod
    def of(cls, num_rows: int, read_rows: Sequence[int], sequence: SequenceGroup) -> StreamShare:
        """Equally many rows for each rank, of those that are read as of the others: the last layer and the output
        head work on the former alone."""
        read = np.asarray(read_rows, dtype=np.int64)
        others = np.ones(num_rows, dtype=bool)
        others[read] = False
        owner = np.empty(num_rows, dtype=np.int64)
        owner[read] = _evenly(len(read), sequence.size)
        owner[others] = _evenly(num_rows - len(read), sequence.size)
        rows = Division(owner, sequence)
        indices = rows.index[read]
        return cls(rows, Division(owner[read], sequence), indices[indices >= 0])

    @classmethod
    def behind(cls, prefixes: StreamShare, num_rows: int) -> StreamShare:
        """Of a chunk of ``num_rows`` rows, all of them read, behind ``prefixes``."""
        sequence = prefixes.rows.sequence
        owner = _evenly(num_rows, sequence.size)
        rows = Division(owner, sequence)
        read = Division(np.concatenate([prefixes.read.owner, owner]), sequence)
        return cls(rows, read, np.arange(len(rows.mine)))

    def media(self, media_rows: np.ndarray, features: Tensor) -> tuple[Tensor, Tensor]:
        """Indices among this rank's rows that take features, on their device, and those features of all [M, ...].

        Args:
            media_rows: int64 [M], of the stream, on the host: how many of them are here decides about shapes.
        """
        indices = self.rows.index[media_rows]
        chosen = np.flatnonzero(indices >= 0)
        device = features.device
        return Indices(indices[chosen]).on(device), features.index_select(0, Indices(chosen).on(device))

    def own_heads(self, heads: Tensor) -> Tensor:
        """This rank's of all heads [rows, n, width]."""
        sequence = self.rows.sequence
        return heads[:, heads_of(heads.shape[1], sequence.size, sequence.rank)]

    def predictions(self, predict_rows: np.ndarray) -> tuple[Division, Indices]:
        """The rank of each target, by the read rows [R] that predict them; and for each of this rank's targets the
        index of its row among the rank's read rows."""
        targets = Division(self.read.owner[predict_rows], self.rows.sequence)
        return targets, Indices(self.read.index[predict_rows[targets.mine]])

    def split_rows(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """As ``AttentionPlan.split_rows``, of this rank's rows; the first row stands in for an empty kind."""
        first = torch.zeros(1, dtype=torch.int64, device=device)
        read, unread = (kind.on(device) if len(kind) else first for kind in (self._read, self._unread))
        return read, unread

    def interleave(self, read: Tensor, unread: Tensor) -> Tensor:
        """The layers' outputs for read and unread rows of this rank [rows, ...], in stream order.

        The same operations whether a kind is empty or not: ZeRO reduces gradients in the order in which backward
        reaches the weights.
        """
        both = torch.cat([read[: self.num_read], unread[: len(self._unread)]])
        return both.index_select(0, self._order.on(both.device))


def rows_to_heads(*parts: tuple[Tensor, Division]) -> list[Tensor]:
    """All heads of this rank's rows [mine, n, width] -> this rank's heads of all rows [rows, n / ranks, width].

    Where there are fewer heads than ranks, neighbouring ranks get the same one. Everything of one dtype goes in one
    collective.
    """
    sequence = parts[0][1].sequence
    ranks = range(sequence.size)
    results: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(values.dtype for values, _ in parts):
        chosen = [(i, *part) for i, part in enumerate(parts) if part[0].dtype == dtype]
        outgoing = [
            [
                rows[: len(division.mine), heads_of(rows.shape[1], sequence.size, to)].flatten()
                for _, rows, division in chosen
            ]
            for to in ranks
        ]
        shapes = []
        for _, rows, _ in chosen:
            own = heads_of(rows.shape[1], sequence.size, sequence.rank)
            shapes.append((own.stop - own.start, rows.shape[2]))
        incoming = [
            [division.sizes[source] * heads * width for (_, _, division), (heads, width) in zip(chosen, shapes)]
            for source in ranks
        ]
        received = sequence.exchange(
            torch.cat([piece for of_rank in outgoing for piece in of_rank]),
            [sum(piece.numel() for piece in of_rank) for of_rank in outgoing],
            [sum(of_rank) for of_rank in incoming],
        ).split([size for of_rank in incoming for size in of_rank])
        for number, ((i, _, division), shape) in enumerate(zip(chosen, shapes)):
            results[i] = division.in_order(torch.cat(received[number :: len(chosen)]).view(-1, *shape))
    return [results[i] for i in range(len(parts))]


def heads_to_rows(values: Tensor, division: Division) -> Tensor:
    """This rank's heads of all rows [rows, n / ranks, width] -> all heads of its rows [mine, n, width], or of a row of
    zeros where it has none."""
    sequence = division.sequence
    mine, (_, heads, width) = division.sizes[sequence.rank], values.shape
    received = sequence.exchange(division.by_rank(values), division.sizes, [mine] * sequence.size)
    own = received.view(sequence.size, mine, heads, width).transpose(0, 1).reshape(mine, sequence.size * heads, width)
    return own if mine else torch.cat([own, own.new_zeros(1, *own.shape[1:])])


def heads_of(heads: int, size: int, rank: int) -> slice:
    """The heads that ``rank`` of ``size`` works on."""
    first = rank * heads // size
    return slice(first, max((rank + 1) * heads // size, first + 1))


def possible_sizes(query_heads: int, key_value_heads: int) -> list[int]:
    """Numbers of sequence ranks over which these heads can be divided; of a recurrent layer value and key heads."""
    sizes = [size for size in range(1, query_heads + 1) if query_heads % size == 0]
    return [size for size in sizes if key_value_heads % size == 0 or size % key_value_heads == 0]


def _evenly(count: int, size: int) -> np.ndarray:
    """Rank of each of ``count`` rows: runs of equal length as far as possible."""
    return np.arange(count) * size // max(count, 1)
