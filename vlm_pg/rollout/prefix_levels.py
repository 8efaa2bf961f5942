"""Attention of a decode step to the stored prompts, on a GPU: fixed shapes, whatever prompts there are.

Each level of the prompt tree is one variable-length call. Long nodes are cut into pieces (see ``cut``), each met by the
same queries, and the results are merged by their log-sum-exp. Which query meets which keys stands in tables on the
device that keep their addresses: a recorded step goes on with other prompts, lengths and rows as long as these fit.

R rows of the step, N query heads, K key-value heads, H head dim; of a level S segments, Q queries, P pieces of a node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, count

import torch

from vlm_pg.attention.grouped import merge_
from vlm_pg.attention.kernels import Kernel
from vlm_pg.attention.tree import SegmentCall
from vlm_pg.rollout.cohort_attention import readers_by_level
from vlm_pg.rollout.cut import cut, pieces_of
from vlm_pg.rollout.kv import PrefixStore

_NO_KEYS = -1e30
_serials = count()


class _Level:
    """The tables of one level. A query is one row and query head of each key-value head.

    ``bounds``: (S, Q, P, longest query, longest key), each with some room.
    ``row``, ``repeat``: int64 [Q], whose query each one is, and which of the query heads of a key-value head.
    ``starts``: int32 [P, R], the first of a row's queries for each piece of its node; -1: none.
    """

    def __init__(self, bounds: tuple[int, ...], rows: int, device: torch.device):
        self.bounds, self.serial = bounds, next(_serials)
        segments, queries, pieces = bounds[:3]
        self._cu_q, self._cu_k = torch.zeros(2, segments + 1, dtype=torch.int32, device=device).unbind()
        self.row, self.repeat = torch.zeros(2, queries, dtype=torch.int64, device=device).unbind()
        self.starts = torch.full((pieces, rows), -1, dtype=torch.int32, device=device)
        self.call: SegmentCall

    def fits(self, needed: tuple[int, ...]) -> bool:
        """Whether that many go in, and not so few that much would be idle."""
        return all(least <= room <= 4 * least for least, room in zip(needed, self.bounds, strict=True))

    def fill(
        self,
        queries: Sequence[int],
        keys: Sequence[int],
        asking: Sequence[tuple[int, int]],
        starts: Sequence[Sequence[int]],
    ) -> None:
        """Lengths of the segments, (row, repeat) of each query, and ``starts`` of the pieces that there are."""
        for table, lengths in ((self._cu_q, queries), (self._cu_k, keys)):
            ends = [0, *accumulate(lengths)]
            _write(table, ends + [ends[-1]] * (len(table) - len(ends)))
        spare = len(self.row) - len(asking)
        for table, column in zip((self.row, self.repeat), zip(*asking, strict=True), strict=True):
            _write(table, [*column, *[0] * spare])
        rest = [[-1] * self.starts.shape[1]] * (len(self.starts) - len(starts))
        _write(self.starts, [*starts, *rest])
        ranges = (0, len(self.row)), (0, sum(keys))
        call = SegmentCall(*ranges, tuple(queries), tuple(keys), causal=False, at_most=self.bounds[3:])  # type: ignore[arg-type]
        self.call = call.fixed_on(self._cu_q, self._cu_k)


def _write(table: torch.Tensor, values: Sequence[object]) -> None:
    table.copy_(torch.tensor(values, dtype=table.dtype), non_blocking=True)


class PrefixLevels:
    """``Prompts`` for the rows that ``arrange`` was told of.

    Args:
        heads: N and K.
    """

    def __init__(self, store: PrefixStore, kernel: Kernel, heads: tuple[int, int], device: torch.device):
        self._store, self._kernel, self._device = store, kernel, device
        self._kv_heads, self._repeats = heads[1], heads[0] // heads[1]
        self._tables: dict[int, list[_Level]] = {}
        self.levels: list[_Level] = []
        self._joined: dict[tuple[int, ...], torch.Tensor] = {}

    def arrange(self, paths: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """From now on for these rows: of each the stored nodes of its prompt, first to last; none for an idle row.

        Returns what a recorded step depends on: it can be replayed where it is the same.
        """
        tables = self._tables.setdefault(len(paths), [])
        readers = readers_by_level(self._store, paths)
        for place, reading in enumerate(readers):
            filling = self._filling(reading, len(paths))
            queries, keys, asking, starts = filling
            needed = (len(keys), len(asking), len(starts), max(queries), max(keys))
            if place == len(tables) or not tables[place].fits(needed):
                tables[place : place + 1] = [_Level(_bounds(*needed), len(paths), self._device)]
            tables[place].fill(*filling)
        self.levels = tables[: len(readers)]
        self._join_starts()
        return tuple(level.serial for level in self.levels)

    def _join_starts(self) -> None:
        """``starts`` of all levels one behind the other, for queries that lie so; where tables stay it stays, too."""
        serials = tuple(level.serial for level in self.levels)
        firsts = accumulate((len(level.row) for level in self.levels), initial=0)
        parts = [level.starts + (level.starts >= 0) * first for level, first in zip(self.levels, firsts, strict=False)]
        if not parts:
            return
        joined = torch.cat(parts)
        if serials not in self._joined:
            self._joined[serials] = joined
        self._starts = self._joined[serials].copy_(joined)

    def _filling(
        self, reading: Mapping[int, Sequence[int]], num_rows: int
    ) -> tuple[list[int], list[int], list[tuple[int, int]], list[list[int]]]:
        """What ``_Level.fill`` takes. Nodes without readers become segments without queries."""
        lengths = self._store.lengths
        asked = {node: len(rows) * self._repeats for node, rows in reading.items()}
        tiles = self._kernel.tiles_at_once(self._device)
        pieces = pieces_of({node: lengths[node] for node in reading}, asked, self._kv_heads, tiles)
        queries: list[int] = []
        keys: list[int] = []
        asking: list[tuple[int, int]] = []
        starts = [[-1] * num_rows for _ in range(max(pieces.values()))]
        for node in self._store.order:
            if node not in reading:
                if keys and not queries[-1]:
                    keys[-1] += lengths[node]
                else:
                    queries.append(0)
                    keys.append(lengths[node])
                continue
            for piece, part in enumerate(cut(lengths[node], pieces[node])):
                queries.append(asked[node])
                keys.append(part)
                for row in reading[node]:
                    starts[piece][row] = len(asking)
                    asking += [(row, repeat) for repeat in range(self._repeats)]
        return queries, keys, asking, starts

    def merge_into(
        self, layer_index: int, q: torch.Tensor, merged: torch.Tensor, lse: torch.Tensor, scale: float
    ) -> None:
        """q [R, N, H] over the prompts, merged in place into [R, N, H] and [N, R] over the rows' own keys."""
        for level in self.levels:
            out, parts_lse = self._over_pieces(layer_index, q, level, scale)
            # [P, R, repeats]; where there is no piece any result may stand: it has no weight.
            place = level.starts.clamp(min=0)[..., None] + torch.arange(self._repeats, device=q.device)
            weight = parts_lse[:, place].masked_fill((level.starts < 0)[..., None], -torch.inf)
            # A row without any has a total that is finite: where it has no keys of its own either (prompts that several
            # processes divide) two infinities would meet.
            total = weight.logsumexp(1).clamp_(min=_NO_KEYS)
            weight = (weight - total[:, None]).exp_()
            parts = out[place].to(lse.dtype).mul_(weight.permute(1, 2, 3, 0)[..., None]).sum(0)
            merge_(merged, lse, parts.transpose(1, 2).flatten(1, 2), total.transpose(1, 2).flatten(0, 1))

    def queries_for(self, layer_index: int, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Room for the queries of all levels of a layer [sum of Q, K, H], and where those of q [R, N, H] begin in it:
        int32 [sum of P, R] as ``starts`` of a level. None where nobody has a prompt."""
        if not self.levels:
            return None, None
        total = sum(len(level.row) for level in self.levels)
        return q.new_empty(total, self._kv_heads, q.shape[-1]), self._starts

    def merged_with(
        self,
        layer_index: int,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
        queries: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As ``merge_into``, each level by one kernel: [R, N, H] over own keys and the prompts.

        Args:
            out, lse: over own keys in T parts, [T, R, N, H] and [T, N, R].
            queries: those of ``queries_for``, already there.
        """
        from vlm_pg.rollout.fused.parts import merge_parts

        of_levels = [None] * len(self.levels)
        if queries is not None:
            of_levels = queries.split([len(level.row) for level in self.levels])
        for level, asking in zip(self.levels, of_levels, strict=True):
            parts, parts_lse = self._over_pieces(layer_index, q, level, scale, asking)
            # What is in between is not rounded.
            dtype = q.dtype if level is self.levels[-1] else lse.dtype
            out, lse = (x[None] for x in merge_parts(out, lse, parts, parts_lse, level.starts, dtype))
        if not self.levels:
            nothing = torch.empty(0, len(q), dtype=torch.int32, device=q.device)
            out = merge_parts(out, lse, q[:0], lse[0, :, :0], nothing, q.dtype)[0][None]
        return out[0]

    def _over_pieces(
        self, layer_index: int, q: torch.Tensor, level: _Level, scale: float, asking: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The call's out [Q, K, H] and lse [K, Q]; ``asking``: its queries, if they are there already."""
        if asking is None:
            # Query heads of one key-value head are queries of one segment, so that a node is read once for all of them.
            asking = q.unflatten(1, (-1, self._repeats))[level.row, :, level.repeat]
        keys, values = self._store.keys[layer_index], self._store.values[layer_index]
        return self._kernel.segments_forward(asking, keys, values, level.call, scale)


def _bounds(segments: int, queries: int, *rest: int) -> tuple[int, ...]:
    """Powers of two; of queries, which are copied for each call, at most a sixteenth more."""
    step = max(16, 1 << max(0, queries.bit_length() - 5))
    powers = [1 << (least - 1).bit_length() for least in (segments, *rest)]
    return powers[0], -(-queries // step) * step, *powers[1:]
