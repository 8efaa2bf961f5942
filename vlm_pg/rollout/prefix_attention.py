"""Attention of a decode step's new tokens to the stored prompts, merged with attention to the rows' own tokens.

``LevelPrefixAttention`` makes one variable-length call per level of the prompt tree. ``SplitPrefixAttention`` does the
same on a GPU with fixed shapes, so that a CUDA graph can hold it, and splits long nodes into pieces so that few prompts
still fill the device. ``DividedPrompts`` runs one of them on each of several processes that share the prompts' tokens.

R rows of the step, N query heads, K key-value heads, H head dim; of a level S segments, Q queries, P pieces of a node.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Protocol

import torch

from vlm_pg.attention.grouped import merge_
from vlm_pg.attention.kernels import Kernel
from vlm_pg.attention.tree import SegmentCall
from vlm_pg.distributed import SequenceGroup
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.kv import PrefixStore

# Queries that one thread block takes. Only the number of blocks is derived from it.
TILE_QUERIES = 128
# Shorter pieces are not worth their merging.
LEAST_KEYS = 256
# A piece's queries, results and their merging move six rows for each query, its keys and values two rows for each key:
# at this many keys a query merging moves at most three quarters of what reading does.
LEAST_KEYS_A_QUERY = 4
# Rows of all pieces of a node together, one for each query and key-value head: merging them moves six times as many, at
# head dim 128 in half precision 19 MB in a layer. More pieces than that cost more than they gain.
MOST_ROWS = 12_288
_NO_KEYS = -1e30
_serials = itertools.count()


class PrefixAttention(Protocol):
    """Attention of new tokens to their prompts."""

    def merge_into(
        self, layer_index: int, q: torch.Tensor, merged: torch.Tensor, lse: torch.Tensor, scale: float
    ) -> None:
        """q [R, N, H] over the prompts, merged in place into [R, N, H] and [N, R] over the rows' own keys."""


class LevelPrefixAttention:
    """One variable-length call for each level of the prompt tree.

    Args:
        paths: for each row of the stream the stored nodes of its prompt, first to last; none for an idle row.
    """

    def __init__(self, store: PrefixStore, paths: Sequence[tuple[int, ...]], kernel: Kernel):
        self._store, self._kernel = store, kernel
        self._readers = readers_by_level(store, paths)
        self._rows = len(paths)
        # Per level, made once for these rows and not once per layer: the call, and the rows that attend, ordered by
        # node (None: all, in order).
        self._levels: dict[int, list[tuple[SegmentCall, torch.Tensor | None]]] = {}

    def merge_into(
        self, layer_index: int, q: torch.Tensor, merged: torch.Tensor, lse: torch.Tensor, scale: float
    ) -> None:
        """See ``PrefixAttention``."""
        keys, values = self._store.keys[layer_index], self._store.values[layer_index]
        repeats = q.shape[1] // keys.shape[1]
        for call, rows in self._levels_for(repeats):
            # Query heads of one key-value head become extra query rows, so that a node is read once for all of them.
            folded = (q if rows is None else q[rows]).unflatten(1, (-1, repeats)).transpose(1, 2).flatten(0, 1)
            out, out_lse = self._kernel.segments_forward(folded, keys, values, call, scale)
            out = out.unflatten(0, (-1, repeats)).transpose(1, 2).flatten(1, 2)
            out_lse = out_lse.unflatten(1, (-1, repeats)).transpose(1, 2).flatten(0, 1)
            if rows is None:
                merge_(merged, lse, out, out_lse)
                continue
            some, some_lse = merged[rows], lse[:, rows]
            merge_(some, some_lse, out, out_lse)
            merged[rows], lse[:, rows] = some, some_lse

    def _levels_for(self, repeats: int) -> list[tuple[SegmentCall, torch.Tensor | None]]:
        if repeats not in self._levels:
            self._levels[repeats] = []
            for reading in self._readers:
                rows = [row for of_node in reading.values() for row in of_node]
                call = self._store.call({node: len(of_node) * repeats for node, of_node in reading.items()})
                all_rows = rows == list(range(self._rows))
                self._levels[repeats].append((call, None if all_rows else torch.tensor(rows)))
        return self._levels[repeats]


def readers_by_level(store: PrefixStore, paths: Sequence[tuple[int, ...]]) -> list[dict[int, list[int]]]:
    """For each level of the prompt tree the rows that read each of its nodes, nodes in their order in the store.

    Levels without readers are left out; where prompts are sharded, some nodes are stored on other ranks only.
    """
    index = {node: number for number, node in enumerate(store.order)}
    levels: list[dict[int, list[int]]] = [{} for _ in range(max((len(path) for path in paths), default=0))]
    for row, path in enumerate(paths):
        for reading, node in zip(levels, path, strict=False):
            if store.lengths[node]:
                reading.setdefault(node, []).append(row)
    return [dict(sorted(reading.items(), key=lambda item: index[item[0]])) for reading in levels if reading]


def pieces_of(
    tokens: Mapping[int, int], queries: Mapping[int, int], kv_heads: int, tiles_at_once: int | None
) -> dict[int, int]:
    """Into how many pieces each node of one call is split, so that its blocks come near to filling the device once.

    A variable-length call of flash attention gives one thread block to each segment, key-value head and tile of
    queries, and that block walks over all keys of its segment. It splits keys among blocks only where every segment has
    one query or keys are paged (torch's flash_api.cpp, mha_varlen_fwd). A decode step has some ten to some hundred
    queries a prompt: behind one prompt with 4 key-value heads 4 blocks would read everything, on a device that runs 264
    at a time. So a long node's keys become several segments, each with the same queries, whose results are merged by
    their log-sum-exp. Each key is still read once.

    Args:
        tokens: keys of each node, at least 1.
        queries: rows that attend to each of them.
        kv_heads: K, each of which has blocks of its own.
        tiles_at_once: blocks that the device runs at a time; None: it needs no pieces.
    """
    if tiles_at_once is None:
        return dict.fromkeys(tokens, 1)
    blocks = {node: kv_heads * -(-queries[node] // TILE_QUERIES) for node in tokens}
    # Keys of a piece with which all blocks have equally many and are as many as run at a time.
    even = -(-sum(count * blocks[node] for node, count in tokens.items()) // tiles_at_once)
    found: dict[int, int] = {}
    for node, count in tokens.items():
        by_keys = count // max(even, LEAST_KEYS, LEAST_KEYS_A_QUERY * queries[node])
        found[node] = rounded_down(max(1, min(by_keys, MOST_ROWS // (kv_heads * queries[node]))))
    return found


def rounded_down(pieces: int) -> int:
    """To 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: nodes with equally many pieces share a call, so numbers are few."""
    power = 1 << (pieces.bit_length() - 1)
    between = power + power // 2
    return between if between <= pieces else power


def cut(tokens: int, pieces: int) -> tuple[int, ...]:
    """Lengths of so many nearly equal pieces that make up ``tokens`` together."""
    ends = [tokens * piece // pieces for piece in range(pieces + 1)]
    return tuple(end - start for start, end in pairwise(ends))


class _Level:
    """The device tables of one level. A query is one row and query head of each key-value head.

    ``bounds``: (S, Q, P, longest query, longest key), each with some room.
    ``row``, ``repeat``: int64 [Q], the row of each query, and which of the query heads of a key-value head it is.
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
        """Whether the tables are large enough, and not so large that much would be idle."""
        return all(least <= room <= 4 * least for least, room in zip(needed, self.bounds, strict=True))

    def fill(
        self,
        queries: Sequence[int],
        keys: Sequence[int],
        rows: Sequence[tuple[int, int]],
        starts: Sequence[Sequence[int]],
    ) -> None:
        """Lengths of the segments, (row, repeat) of each query, and ``starts`` of the pieces that there are."""
        for table, lengths in ((self._cu_q, queries), (self._cu_k, keys)):
            ends = [0, *accumulate(lengths)]
            _write(table, ends + [ends[-1]] * (len(table) - len(ends)))
        spare = len(self.row) - len(rows)
        for table, column in zip((self.row, self.repeat), zip(*rows, strict=True), strict=True):
            _write(table, [*column, *[0] * spare])
        rest = [[-1] * self.starts.shape[1]] * (len(self.starts) - len(starts))
        _write(self.starts, [*starts, *rest])
        ranges = (0, len(self.row)), (0, sum(keys))
        call = SegmentCall(*ranges, tuple(queries), tuple(keys), causal=False, at_most=self.bounds[3:])  # type: ignore[arg-type]
        self.call = call.fixed_on(self._cu_q, self._cu_k)


def _write(table: torch.Tensor, values: Sequence[object]) -> None:
    table.copy_(torch.tensor(values, dtype=table.dtype), non_blocking=True)


class SplitPrefixAttention:
    """One call of fixed shape per level, over pieces of nodes, for the rows last given to ``arrange``.

    Which query attends to which keys is in device tables that keep their addresses: a recorded step goes on with other
    prompts, lengths and rows as long as these fit.

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
        """Set up for these rows: the stored nodes of each one's prompt, first to last; none for an idle row.

        Returns:
            The key of a recorded step, which can be replayed where it is the same.
        """
        tables = self._tables.setdefault(len(paths), [])
        readers = readers_by_level(self._store, paths)
        for index, reading in enumerate(readers):
            queries, keys, rows, starts = filling = self._filling(reading, len(paths))
            needed = (len(keys), len(rows), len(starts), max(queries), max(keys))
            if index == len(tables) or not tables[index].fits(needed):
                tables[index : index + 1] = [_Level(_bounds(*needed), len(paths), self._device)]
            tables[index].fill(*filling)
        self.levels = tables[: len(readers)]
        serials = tuple(level.serial for level in self.levels)
        if self.levels:
            # ``starts`` of all levels one after the other, for queries that lie so; an address for each set of tables.
            firsts = accumulate((len(level.row) for level in self.levels), initial=0)
            shifted = zip(self.levels, firsts, strict=False)
            joined = torch.cat([level.starts + (level.starts >= 0) * first for level, first in shifted])
            self._starts = self._joined.setdefault(serials, joined).copy_(joined)
        return serials

    def _filling(
        self, reading: Mapping[int, Sequence[int]], num_rows: int
    ) -> tuple[list[int], list[int], list[tuple[int, int]], list[list[int]]]:
        """Arguments of ``_Level.fill``. Nodes without readers become segments without queries."""
        lengths = self._store.lengths
        num_queries = {node: len(rows) * self._repeats for node, rows in reading.items()}
        tiles = self._kernel.tiles_at_once(self._device)
        pieces = pieces_of({node: lengths[node] for node in reading}, num_queries, self._kv_heads, tiles)
        queries: list[int] = []
        keys: list[int] = []
        query_rows: list[tuple[int, int]] = []
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
                queries.append(num_queries[node])
                keys.append(part)
                for row in reading[node]:
                    starts[piece][row] = len(query_rows)
                    query_rows += [(row, repeat) for repeat in range(self._repeats)]
        return queries, keys, query_rows, starts

    def merge_into(
        self, layer_index: int, q: torch.Tensor, merged: torch.Tensor, lse: torch.Tensor, scale: float
    ) -> None:
        """See ``PrefixAttention``."""
        for level in self.levels:
            out, parts_lse = self._over_pieces(layer_index, q, level, scale)
            # [P, R, repeats]; where there is no piece any result may stand: it has no weight.
            index = level.starts.clamp(min=0)[..., None] + torch.arange(self._repeats, device=q.device)
            weight = parts_lse[:, index].masked_fill((level.starts < 0)[..., None], -torch.inf)
            # A row without any has a total that is finite: where it has no keys of its own either (prompts that several
            # processes divide) two infinities would meet.
            total = weight.logsumexp(1).clamp_(min=_NO_KEYS)
            weight = (weight - total[:, None]).exp_()
            parts = out[index].to(lse.dtype).mul_(weight.permute(1, 2, 3, 0)[..., None]).sum(0)
            merge_(merged, lse, parts.transpose(1, 2).flatten(1, 2), total.transpose(1, 2).flatten(0, 1))

    def queries_for(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Room for the queries of all levels of a layer [sum of Q, K, H], and where those of q [R, N, H] begin in it:
        int32 [sum of P, R] as ``starts`` of a level. None where no row has a prompt."""
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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``merge_into``, each level by one kernel: [R, N, H] and [N, R] over own keys and the prompts.

        Args:
            out, lse: over own keys in T parts, [T, R, N, H] and [T, N, R].
            queries: those of ``queries_for``, filled.
        """
        from vlm_pg.rollout.fused.attention import merge_parts

        of_levels = [None] * len(self.levels)
        if queries is not None:
            of_levels = queries.split([len(level.row) for level in self.levels])
        for level, gathered in zip(self.levels, of_levels, strict=True):
            parts, parts_lse = self._over_pieces(layer_index, q, level, scale, gathered)
            # Intermediate results are not rounded.
            dtype = q.dtype if level is self.levels[-1] else lse.dtype
            out, lse = (x[None] for x in merge_parts(out, lse, parts, parts_lse, level.starts, dtype))
        if not self.levels:
            nothing = torch.empty(0, len(q), dtype=torch.int32, device=q.device)
            out, lse = (x[None] for x in merge_parts(out, lse, q[:0], lse[0, :, :0], nothing, q.dtype))
        return out[0], lse[0]

    def _over_pieces(
        self, layer_index: int, q: torch.Tensor, level: _Level, scale: float, queries: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The call's out [Q, K, H] and lse [K, Q]; ``queries``: its queries, if they are gathered already."""
        if queries is None:
            # Query heads of one key-value head are queries of one segment, so that a node is read once for all of them.
            queries = q.unflatten(1, (-1, self._repeats))[level.row, :, level.repeat]
        keys, values = self._store.keys[layer_index], self._store.values[layer_index]
        return self._kernel.segments_forward(queries, keys, values, level.call, scale)


def _bounds(segments: int, queries: int, *rest: int) -> tuple[int, ...]:
    """Powers of two; of queries, which are copied for each call, at most a sixteenth more."""
    step = max(16, 1 << max(0, queries.bit_length() - 5))
    powers = [1 << (least - 1).bit_length() for least in (segments, *rest)]
    return powers[0], -(-queries // step) * step, *powers[1:]


class DividedPrompts:
    """``PrefixAttention`` over prompts whose keys and values are sharded over processes.

    Each process decodes rollouts of its own and stores the keys and values of some tokens of every prompt. In a layer
    all queries go to all processes; each attends with them to its shard and sends every process the results for its
    rollouts, which are merged by their log-sum-exp with one another and with the rollouts' own tokens. So processes
    make their steps together, and one without rollouts goes on answering until no process has any.

    Args:
        store: of this process: its part of every node.
    """

    def __init__(self, store: PrefixStore, policy: Policy, sequence: SequenceGroup):
        self._store, self._kernel, self._sequence = store, policy.kernel, sequence
        heads = policy.family.head_shape(policy.model.config)[:2]
        self._query_heads = heads[0]
        on_gpu = policy.device.type == "cuda"
        self._split = SplitPrefixAttention(store, policy.kernel, heads, policy.device) if on_gpu else None
        self._rows: list[list[tuple[int, ...]]] = [[] for _ in range(sequence.size)]
        self._own: list[tuple[int, ...]] = []
        self._local: PrefixAttention = LevelPrefixAttention(store, (), policy.kernel)

    def meet(self, rows: Sequence[tuple[int, ...]], stop: bool) -> bool:
        """Exchange the rows of the next step, on all processes.

        Args:
            rows: this process's, the stored nodes of each one's prompt.
            stop: whether a stop of this process was requested.

        Returns:
            Whether any process has rows.

        Raises:
            InterruptedError: on all of them, if a stop of one was requested.
        """
        changed = list(rows) != self._own
        self._own = list(rows)
        of_ranks = self._sequence.gather((self._own if changed else None, stop))
        if any(stops for _, stops in of_ranks):
            raise InterruptedError("generation was asked to stop")
        if any(paths is not None for paths, _ in of_ranks):
            self._rows = [
                before if paths is None else paths for before, (paths, _) in zip(self._rows, of_ranks, strict=True)
            ]
            all_rows = [path for of_rank in self._rows for path in of_rank]
            if self._split is not None:
                self._split.arrange(all_rows)
            self._local = self._split or LevelPrefixAttention(self._store, all_rows, self._kernel)
        return any(self._rows)

    def merge_into(
        self, layer_index: int, q: torch.Tensor, merged: torch.Tensor, lse: torch.Tensor, scale: float
    ) -> None:
        """See ``PrefixAttention``; q are the rows that this process gave to ``meet``."""
        sizes, own = [len(of_rank) for of_rank in self._rows], q.shape[0]
        queries = self._sequence.collect(q, sizes)
        # Over no keys: nothing, with no weight.
        out = queries.new_zeros(queries.shape, dtype=lse.dtype)
        out_lse = lse.new_full((queries.shape[1], queries.shape[0]), -torch.inf)
        self._local.merge_into(layer_index, queries, out, out_lse, scale)
        sent = torch.cat([out, out_lse.transpose(0, 1)[..., None]], dim=-1)
        received = self._sequence.send(sent, sizes, [own] * self._sequence.size)
        for part in received.split([own] * self._sequence.size) if own else ():
            merge_(merged, lse, part[..., :-1], part[..., -1].transpose(0, 1))

    def answer(self) -> None:
        """The step of a process without rows: attend for the other processes in each layer."""
        for layer_index in sorted(self._store.keys):
            keys = self._store.keys[layer_index]
            q = keys.new_empty(0, self._query_heads, keys.shape[-1])
            wide = torch.promote_types(keys.dtype, torch.float32)
            lse = torch.empty(self._query_heads, 0, dtype=wide, device=keys.device)
            self.merge_into(layer_index, q, q.to(wide), lse, self._store.scales[layer_index])
