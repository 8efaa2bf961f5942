"""Decoding: one token at a time for all running rollouts, behind prompts that are stored once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch

from vlm_pg.attention.kernels import Kernel
from vlm_pg.attention.merge import merge_
from vlm_pg.attention.segments import SegmentCall
from vlm_pg.models.linear_attention import LinearStates
from vlm_pg.rollout.cut import pieces_of
from vlm_pg.rollout.kv import PrefixStore
from vlm_pg.rollout.linear_step import linear_attention_step

BLOCK_TOKENS = 64


class OwnTokens:
    """Keys, values and states of the tokens that rollouts have generated themselves.

    Rollouts that were admitted together have equally many, ``length``, at any time: nothing is padded. Room grows in
    blocks, not to the longest length.

    Args:
        paths: for each rollout the stored nodes of its prompt, first to last.
    """

    def __init__(self, paths: Sequence[tuple[int, ...]]):
        self.paths = list(paths)
        self.length = 0
        self._keys_values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._states: dict[int, LinearStates] = {}

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these rollouts only (int64 [kept], ascending)."""
        self.paths = [self.paths[i] for i in rows.tolist()]
        # One layer at a time: no more than one exists twice.
        for layer, (k, v) in self._keys_values.items():
            self._keys_values[layer] = (k[rows], v[rows])
        for layer, states in self._states.items():
            self._states[layer] = LinearStates(states.conv_tail[rows], states.recurrent[rows])

    def append(self, layer_index: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This token's keys and values [rollouts, K, H] behind the earlier ones: [rollouts, length + 1, K, H] each."""
        own: Any = self._keys_values.get(layer_index)
        if own is None or own[0].shape[1] == self.length:
            room = k.new_empty(2, k.shape[0], BLOCK_TOKENS, *k.shape[1:]).unbind()
            own = room if own is None else tuple(torch.cat(pair, dim=1) for pair in zip(own, room, strict=True))
            self._keys_values[layer_index] = own
        end = self.length + 1
        own[0][:, self.length], own[1][:, self.length] = k, v
        return own[0][:, :end], own[1][:, :end]

    def states(self, layer_index: int, store: PrefixStore) -> LinearStates:
        """A linear-attention layer's states [rollouts, ...]; a rollout starts from its prompt's."""
        return self._states.get(layer_index) or store.read_states(layer_index, [path[-1] for path in self.paths])

    def set_states(self, layer_index: int, states: LinearStates) -> None:
        self._states[layer_index] = states


@dataclass(frozen=True)
class _Level:
    """Rollouts whose prompts have a node at this depth, all of them read in equally many pieces.

    Attributes:
        call: which queries meet which keys: node after node, piece after piece.
        rows: those of the stream that ask, ordered by node; None: all, in order.
        pieces: of each node.
        nodes: how many equally many rows ask; None: not equally many.
        sources: for nodes in pieces that are not asked by equally many rows, whose query each one of the call is, int64
            [pieces * rows * repeats].
        places: where in the call they then lie, int64 [pieces, rows * repeats].
        starts: the first row of the call's results for each piece and row of the stream, int32 [pieces, all rows]; -1:
            that row does not ask.
    """

    call: SegmentCall
    rows: torch.Tensor | None
    pieces: int
    nodes: int | None
    sources: torch.Tensor | None
    places: torch.Tensor | None
    starts: torch.Tensor

    @property
    def num_queries(self) -> int:
        return sum(self.call.query_lengths)


class Prompts(Protocol):
    """What new tokens attend to of their prompts."""

    def merge_into(
        self, layer_index: int, q: torch.Tensor, merged: torch.Tensor, lse: torch.Tensor, scale: float
    ) -> None:
        """q [rows, N, H] over the prompts, merged in place into [rows, N, H] and [N, rows] over the rows' own keys."""
        ...


class PromptPart:
    """What new tokens attend to of their prompts: one variable-length call for each level of the tree.

    On a GPU long nodes are read in pieces; a level whose nodes have different numbers of them is as many calls.

    Args:
        paths: for each row of the stream the stored nodes of its prompt, first to last; none for an idle row.
    """

    def __init__(self, store: PrefixStore, paths: Sequence[tuple[int, ...]], kernel: Kernel):
        self._store = store
        self._paths = list(paths)
        self._kernel = kernel
        self._levels: dict[int, list[_Level]] = {}
        self._starts: dict[int, torch.Tensor] = {}

    def merge_into(
        self, layer_index: int, q: torch.Tensor, merged: torch.Tensor, lse: torch.Tensor, scale: float
    ) -> None:
        """q [rows, N, H] over the prompts, merged in place into [rows, N, H] and [N, rows] over the rows' own keys."""
        kv_heads = self._store.keys[layer_index].shape[1]
        repeats = q.shape[1] // kv_heads
        for level in self._levels_for(repeats, kv_heads, q.device):
            asking = q if level.rows is None else q[level.rows]
            out, out_lse = self._over_nodes(layer_index, asking, level, repeats, scale)
            if level.rows is None:
                merge_(merged, lse, out, out_lse)
                continue
            some, some_lse = merged[level.rows], lse[:, level.rows]
            merge_(some, some_lse, out, out_lse)
            merged[level.rows], lse[:, level.rows] = some, some_lse

    def queries_for(self, layer_index: int, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Room for the queries of all calls of a layer [Q, K, H], and where those of q [rows, N, H] begin in it: int32
        [P, rows] over the pieces of all levels, as ``starts`` of a level. None where nobody has a prompt."""
        kv_heads = self._store.keys[layer_index].shape[1]
        repeats = q.shape[1] // kv_heads
        levels = self._levels_for(repeats, kv_heads, q.device)
        if not levels:
            return None, None
        if repeats not in self._starts:
            firsts = accumulate((level.num_queries for level in levels), initial=0)
            self._starts[repeats] = torch.cat(
                [level.starts + (level.starts >= 0) * first for level, first in zip(levels, firsts, strict=False)]
            )
        total = sum(level.num_queries for level in levels)
        return q.new_empty(total, kv_heads, q.shape[-1]), self._starts[repeats]

    def merged_with(
        self,
        layer_index: int,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
        queries: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As ``merge_into``, each level by one kernel: [rows, N, H] over own keys and the prompts.

        Args:
            out, lse: over own keys in S parts, [S, rows, N, H] and [S, N, rows].
            queries: those of ``queries_for``, already there.
        """
        from vlm_pg.rollout.fused.parts import merge_parts

        keys, values = self._store.keys[layer_index], self._store.values[layer_index]
        repeats = q.shape[1] // keys.shape[1]
        levels = self._levels_for(repeats, keys.shape[1], q.device)
        of_levels = [None] * len(levels) if queries is None else queries.split([level.num_queries for level in levels])
        for level, asking in zip(levels, of_levels, strict=True):
            if asking is None:
                asking = _for_each_piece(_folded(q if level.rows is None else q[level.rows], repeats), level)
            parts, parts_lse = self._kernel.segments_forward(asking, keys, values, level.call, scale)
            # What is in between is not rounded.
            dtype = q.dtype if level is levels[-1] else lse.dtype
            out, lse = (x[None] for x in merge_parts(out, lse, parts, parts_lse, level.starts, dtype))
        if not levels:
            nothing = torch.empty(0, len(q), dtype=torch.int32, device=q.device)
            out = merge_parts(out, lse, q[:0], lse[0, :, :0], nothing, q.dtype)[0][None]
        return out[0]

    def _over_nodes(
        self, layer_index: int, q: torch.Tensor, level: _Level, repeats: int, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows q [n, N, H] and one stored node each: out [n, N, H], lse [N, n]."""
        out, lse = self._over_pieces(layer_index, q, level, repeats, scale)
        if level.pieces > 1:
            out, lse = _joined(out, lse, level)
        out = out.unflatten(0, (-1, repeats)).transpose(1, 2).flatten(1, 2)
        return out, lse.unflatten(1, (-1, repeats)).transpose(1, 2).flatten(0, 1)

    def _over_pieces(
        self, layer_index: int, q: torch.Tensor, level: _Level, repeats: int, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows q [n, N, H] and one stored node each: the call's out [., K, H] and lse [K, .] of all pieces."""
        asking = _for_each_piece(_folded(q, repeats), level)
        keys, values = self._store.keys[layer_index], self._store.values[layer_index]
        return self._kernel.segments_forward(asking, keys, values, level.call, scale)

    def _levels_for(self, repeats: int, kv_heads: int, device: torch.device) -> list[_Level]:
        """Made once for these rows, not once per layer."""
        if repeats not in self._levels:
            depth = max((len(path) for path in self._paths), default=0)
            self._levels[repeats] = [
                level for at in range(depth) for level in self._levels_at(at, repeats, kv_heads, device)
            ]
        return self._levels[repeats]

    def _levels_at(self, at: int, repeats: int, kv_heads: int, device: torch.device) -> list[_Level]:
        """One for each number of pieces in which nodes at this depth are read.

        None at all if nobody reads anything there; where prompts are divided, some of their nodes lie elsewhere alone.
        """
        place = {node: index for index, node in enumerate(self._store.order)}
        reading: dict[int, list[int]] = {}
        for row, path in enumerate(self._paths):
            if len(path) > at and self._store.lengths[path[at]]:
                reading.setdefault(path[at], []).append(row)
        queries = {node: len(rows) * repeats for node, rows in reading.items()}
        tokens = {node: self._store.lengths[node] for node in reading}
        pieces = pieces_of(tokens, queries, kv_heads, self._kernel.tiles_at_once(device))
        by_pieces: dict[int, list[int]] = {}
        for node in sorted(reading, key=place.__getitem__):
            by_pieces.setdefault(pieces[node], []).append(node)
        return [
            self._level(count, {node: reading[node] for node in nodes}, repeats, device)
            for count, nodes in by_pieces.items()
        ]

    def _level(self, pieces: int, reading: dict[int, list[int]], repeats: int, device: torch.device) -> _Level:
        """``reading``: the rows of each node, in the order in which the nodes lie."""
        rows = [row for of_node in reading.values() for row in of_node]
        counts = {node: len(of_node) * repeats for node, of_node in reading.items()}
        everyone = rows == list(range(len(self._paths)))
        equal = len(set(counts.values())) == 1
        sources = places = None
        if pieces > 1 and not equal:
            sources, places = (table.to(device, non_blocking=True) for table in _uneven(list(counts.values()), pieces))
        return _Level(
            self._store.call(counts, pieces),
            # Asked for within the first layer of a step, for which the host need not wait.
            None if everyone else torch.tensor(rows).to(device, non_blocking=True),
            pieces,
            len(counts) if equal else None,
            sources,
            places,
            _starts(list(reading.values()), len(self._paths), repeats, pieces).to(device, non_blocking=True),
        )


def _folded(q: torch.Tensor, repeats: int) -> torch.Tensor:
    """[n, N, H] -> [n, repeats, K, H]: query heads of a key-value head become query rows, which share a node"""
    return q.unflatten(1, (-1, repeats)).transpose(1, 2)


def _for_each_piece(folded: torch.Tensor, level: _Level) -> torch.Tensor:
    """folded [n, repeats, K, H], rows ordered by node -> the call's queries [., K, H], again for each piece."""
    if level.sources is not None:
        return folded.flatten(0, 1)[level.sources]
    if level.pieces == 1:
        return folded.flatten(0, 1)
    assert level.nodes is not None
    of_nodes = folded.unflatten(0, (level.nodes, -1))[:, None]
    return of_nodes.expand(-1, level.pieces, -1, -1, -1, -1).flatten(0, 3)


def _joined(out: torch.Tensor, lse: torch.Tensor, level: _Level) -> tuple[torch.Tensor, torch.Tensor]:
    """Results over pieces, out [., K, H] (overwritten) and lse [K, .], as over whole nodes: [n, K, H] wide, [K, n]."""
    if level.places is not None:
        out, lse = out[level.places][None], lse[:, level.places][:, None]
    else:
        assert level.nodes is not None
        out = out.unflatten(0, (level.nodes, level.pieces, -1))
        lse = lse.unflatten(1, (level.nodes, level.pieces, -1))
    # In place: what the results of all pieces move is what cutting costs. They have the rounding of their dtype anyway.
    out.mul_(lse.softmax(2).permute(1, 2, 3, 0)[..., None])
    return out.sum(1, dtype=lse.dtype).flatten(0, 1), lse.logsumexp(2).flatten(1)


def _uneven(queries: Sequence[int], pieces: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``sources`` and ``places`` of a ``_Level`` whose nodes meet so many queries each."""
    sources: list[torch.Tensor] = []
    places: list[torch.Tensor] = []
    start = first = 0
    for count in queries:
        sources += [torch.arange(first, first + count)] * pieces
        places.append(torch.arange(start, start + pieces * count).view(pieces, count))
        first, start = first + count, start + pieces * count
    return torch.cat(sources), torch.cat(places, dim=1)


def _starts(reading: Sequence[Sequence[int]], rows: int, repeats: int, pieces: int) -> torch.Tensor:
    """``starts`` of a ``_Level`` whose nodes these rows read: in a call lies node after node, piece by piece."""
    starts = torch.full((pieces, rows), -1, dtype=torch.int32)
    first = 0
    for of_node in reading:
        count = len(of_node)
        within = torch.arange(pieces * count, dtype=torch.int32).view(pieces, count)
        starts[:, torch.tensor(of_node)] = (first + within) * repeats
        first += pieces * count
    return starts


class DecodeContext:
    """One new token for each rollout: its own tokens, cohort by cohort, and its prompt's nodes, merged.

    Args:
        owns: the rollouts, in the order of the stream.
        prompts: what attends to the prompts; None: they all lie in ``store``.
    """

    def __init__(self, store: PrefixStore, owns: Sequence[OwnTokens], kernel: Kernel, prompts: Prompts | None = None):
        self._store = store
        self._owns = list(owns)
        self._sizes = [len(own.paths) for own in owns]
        self._kernel = kernel
        self._prompts = prompts or PromptPart(store, [path for own in owns for path in own.paths], kernel)

    def attend(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """q [rollouts, N, H], k, v [rollouts, K, H] of the new tokens -> [rollouts, N, H]."""
        parts = [
            self._kernel.dense_forward(one_q[:, None], *own.append(layer_index, one_k, one_v), scale)
            for own, one_q, one_k, one_v in zip(
                self._owns, q.split(self._sizes), k.split(self._sizes), v.split(self._sizes), strict=True
            )
        ]
        lse = torch.cat([part_lse[:, :, 0] for _, part_lse in parts]).transpose(0, 1).contiguous()
        merged = torch.cat([part[:, 0] for part, _ in parts]).to(lse.dtype)
        self._prompts.merge_into(layer_index, q, merged, lse, scale)
        return merged.to(q.dtype)

    def mix_linear(self, layer_index: int, mixer: Any, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rollouts, D] of the new tokens -> [rollouts, D]."""
        before = [own.states(layer_index, self._store) for own in self._owns]
        tails, recurrent = [states.conv_tail for states in before], [states.recurrent for states in before]
        out, after = linear_attention_step(mixer, hidden, LinearStates(torch.cat(tails), torch.cat(recurrent)))
        parts = zip(after.conv_tail.split(self._sizes), after.recurrent.split(self._sizes), strict=True)
        for own, (tail, state) in zip(self._owns, parts, strict=True):
            # Copies where there are several: a view would keep the states of all alive.
            if len(self._owns) > 1:
                tail, state = tail.clone(), state.clone()
            own.set_states(layer_index, LinearStates(tail, state))
        return out
