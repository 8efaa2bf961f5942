"""Prompts through the model once: every node of their tree, in passes of limited size."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from vlm_pg.attention.plan import AttentionPlan, reading_plan
from vlm_pg.attention.tree import PrefixTree
from vlm_pg.distributed import SINGLE_SP_RANK, SequenceGroup
from vlm_pg.models.contexts import ChunkContext, TreeContext
from vlm_pg.models.linear_attention import LinearHeads, LinearStates
from vlm_pg.models.policy import Policy, Rows, hidden_of_rows
from vlm_pg.models.prompt_tree import PromptNode
from vlm_pg.models.recorded import ForwardRecorder, Put
from vlm_pg.models.stream_share import Division, Indices, StreamShare, rows_to_heads
from vlm_pg.rollout.kv import PrefixStore
from vlm_pg.types import Prompt, RecordedRows, VisualFeatures


@dataclass(frozen=True)
class Piece:
    """Tokens ``start`` to ``stop`` (exclusive, counted within the node) of a node."""

    node: int
    start: int
    stop: int


# On a GPU a pass of few tokens takes as long as the host needs to launch it, 30 to 60 ms in a model of 28 layers: the
# last pass takes a remainder of up to this share of the budget too.
SPARE = 1 / 16


def cut_into_passes(lengths: Mapping[int, int], budget: int, spare: int = 0) -> Iterator[list[Piece]]:
    """Nodes in their order, at most ``budget`` tokens a pass, and ``spare`` more in the last; a node may be spread over
    several passes."""
    pieces: list[Piece] = []
    left = sum(lengths.values())
    room = budget if left > budget + spare else left
    for node, length in lengths.items():
        start = 0
        while start < length:
            stop = min(length, start + room)
            pieces.append(Piece(node, start, stop))
            room -= stop - start
            left -= stop - start
            start = stop
            if room == 0:
                yield pieces
                pieces, room = [], budget if left > budget + spare else left


class Prefill:
    """Runs new nodes of a prompt tree and stores their keys, values and states.

    Args:
        nodes: all nodes of the tree; a parent comes before its children.
        prompts: the prompts that ``PromptNode.owner`` counts.
        budget: tokens per pass.
        between_layers: called often, under ZeRO-3's lockstep before each pass only; what it raises ends the prefill.
        sequence: processes that run the same nodes at the same time, each its rows of every pass; all store everything.
        divided: each process stores keys and values of its own rows only.
        layers: context that the language model's layers run in (``fused.choice.prefill_layers``).
    """

    def __init__(
        self,
        policy: Policy,
        store: PrefixStore,
        nodes: Sequence[PromptNode],
        prompts: Sequence[Prompt],
        budget: int,
        between_layers: Callable[[], None],
        sequence: SequenceGroup = SINGLE_SP_RANK,
        divided: bool = False,
        layers: AbstractContextManager[None] | None = None,
    ):
        self.policy, self.store, self.nodes, self.prompts, self.sequence = policy, store, nodes, prompts, sequence
        self._budget, self.divided = budget, divided
        self._layers = nullcontext() if layers is None else layers
        self._between_layers = between_layers
        # What the layers computed of each node, in consecutive pieces, for the nodes of calls that record it.
        self.recorded: dict[int, list[RecordedRows]] = {}
        mixers = [layer.linear_attn for layer in policy.language_model.layers if hasattr(layer, "linear_attn")]
        self.linear_heads = LinearHeads.of(mixers[0]) if mixers else None

    def run(
        self, new: Sequence[int], ends: Collection[int], puts: Mapping[int, Put] | None = None
    ) -> dict[int, torch.Tensor]:
        """Nodes that the store has room for already, parents first.

        Args:
            puts: of nodes that are recorded how their tensors are kept.

        Returns:
            For each node of ``ends`` among them the last hidden state [D] of its last token.
        """
        owners = sorted({self.nodes[node].owner for node in new if self._has_media(node)})
        vision = self.policy.vision
        features = {owner: f for owner in owners if vision.is_current(f := self.prompts[owner].features) and f}
        if missing := [owner for owner in owners if owner not in features]:
            encoded = vision.encode([self.prompts[owner] for owner in missing], sequence=self.sequence)
            features |= zip(missing, encoded, strict=True)
        last_hidden: dict[int, torch.Tensor] = {}
        for one in self._passes(new, ends):
            if self.policy.lockstep is not None:
                self._between_layers()
            pieces, recorder = one.layout.pieces, None
            if puts is not None and any(piece.node in puts for piece in pieces):
                read = [int(index in one.read) for index in range(len(pieces))]
                recorder = ForwardRecorder(one.layout.sizes, read, [puts.get(piece.node) for piece in pieces])
                for piece, rows in zip(pieces, recorder.pieces, strict=True):
                    if piece.node in puts:
                        self.recorded.setdefault(piece.node, []).append(rows)
            last_hidden |= self._run(one, self._rows(one, features), recorder)
        return last_hidden

    def room(self, new: Sequence[int], ends: Collection[int]) -> dict[int, int]:
        """Tokens of each node whose keys and values ``run`` will store on this process."""
        if not self.divided:
            return {node: self.nodes[node].num_tokens for node in new}
        room = dict.fromkeys(new, 0)
        for one in self._passes(new, ends):
            for part in one.stores:
                room[part.node] += part.stop - part.start
        return room

    def _passes(self, new: Sequence[int], ends: Collection[int]) -> Iterator[_Pass]:
        lengths = {node: self.nodes[node].num_tokens for node in new}
        # Of each node how many tokens each process has stored so far.
        held = {node: [0] * self.sequence.size for node in new}
        spare = int(SPARE * self._budget) if self.policy.device.type == "cuda" else 0
        for pieces in cut_into_passes(lengths, self._budget, spare):
            layout = _Layout(pieces, self.nodes)
            read = [
                index
                for index, piece in enumerate(layout.pieces)
                if piece.stop == lengths[piece.node] and piece.node in ends
            ]
            plan = layout.plan(read or [0])
            share = None
            if self.sequence.size > 1:
                # Behind stored nodes every row of the stream is read.
                rows = range(sum(layout.sizes)) if layout.stored else plan.rows or ()
                share = StreamShare.of(sum(layout.sizes), rows, self.sequence)
            if share is None or not self.divided:
                yield _Pass(layout, read, plan, share, layout.pieces, layout.stored)
                continue
            rank, stores = self.sequence.rank, []
            behind = [(node, list(held[node])) for node, _ in layout.stored]
            ranks_of = np.split(share.rows.owner, np.cumsum(layout.sizes)[:-1])
            for piece, ranks in zip(layout.pieces, ranks_of, strict=True):
                counts = np.bincount(ranks, minlength=self.sequence.size).tolist()
                before = held[piece.node]
                stores.append(Piece(piece.node, before[rank], before[rank] + counts[rank]))
                held[piece.node] = [count + more for count, more in zip(before, counts, strict=True)]
            owners = None
            if behind:
                ranks = np.tile(np.arange(self.sequence.size), len(behind))
                of_nodes = np.asarray([counts for _, counts in behind]).flatten()
                owners = Division(ranks.repeat(of_nodes), self.sequence)
            yield _Pass(layout, read, plan, share, stores, [(node, counts[rank]) for node, counts in behind], owners)

    def _rows(self, one: _Pass, features: Mapping[int, VisualFeatures]) -> Rows:
        """Token ids, positions and features of the pass, on the host but for the visual features."""
        stream = [self._tokens(piece) for piece in one.layout.pieces]
        types = torch.cat([self.prompts[owner].mm_token_type_ids[span] for owner, span in stream])
        parts = [self._features(features[owner], owner, span) for owner, span in stream if owner in features]
        media_rows = types.nonzero()[:, 0]
        return Rows(
            torch.cat([self.prompts[owner].input_ids[span] for owner, span in stream]),
            torch.cat([self.prompts[owner].positions_3P[:, span] for owner, span in stream], dim=1),
            media_rows,
            torch.cat(parts).detach() if bool(types.any()) else None,
            media_rows.numpy(),
        )

    def _run(self, one: _Pass, on_host: Rows, recorder: ForwardRecorder | None) -> dict[int, torch.Tensor]:
        layout, share, read = one.layout, one.share, one.read
        kernel = self.policy.kernel_here
        context: _FromRoots | _BehindStored
        if layout.stored:
            stored = _Stored(self, one)
            context = _BehindStored(layout.tree, one.plan, layout.stored_indices, stored, kernel, share=share)
        else:
            context = _FromRoots(layout.tree, kernel, one.plan, share=share)
        context.prefill, context.one, context.recorder = self, one, recorder

        def moved(x: torch.Tensor) -> torch.Tensor:
            return x.to(self.policy.device, non_blocking=True)

        ids, positions, media_rows, features, same_rows = on_host
        media_rows = None if media_rows is None else moved(media_rows)
        rows = Rows(moved(ids), moved(positions), media_rows, features, same_rows)
        with self._layers:
            hidden = hidden_of_rows(self.policy, rows, context, share)
        last_rows = [sum(layout.sizes[: index + 1]) - 1 for index in read]
        indices = Indices(np.asarray(last_rows if layout.stored else range(len(read))))
        if share is None:
            last = hidden[indices.on(hidden.device)]
        else:
            division, own = share.predictions(indices.on_host)
            last = division.gather(hidden[own.on(hidden.device)])
        return {layout.pieces[index].node: row for index, row in zip(read, last, strict=True)}

    def check_between_layers(self) -> None:
        # In lockstep a layer's weights are gathered on all ranks: none may leave between two layers.
        if self.policy.lockstep is None:
            self._between_layers()

    def _tokens(self, piece: Piece) -> tuple[int, slice]:
        """The prompt that owns a piece, and the piece's span in it."""
        node = self.nodes[piece.node]
        return node.owner, slice(node.start + piece.start, node.start + piece.stop)

    def _has_media(self, node: int) -> bool:
        """Whether visual tokens are among a node's own; a question behind a stored video has none."""
        one = self.nodes[node]
        return bool(self.prompts[one.owner].mm_token_type_ids[one.start : one.stop].any())

    def _features(self, features: VisualFeatures, owner: int, span: slice) -> torch.Tensor:
        """The visual features of a prompt's tokens in ``span``."""
        assert features.features is not None
        visual = self.prompts[owner].mm_token_type_ids != 0
        first = int(visual[: span.start].sum())
        return features.features[first : first + int(visual[span].sum())]


# A node, and whether its tokens run (True) or are stored.
_Entry = tuple[int, bool]


class _Layout:
    """A pass as a tree: its pieces below the stored nodes they need.

    ``stored``: (node, tokens) of each stored node above, ``pieces`` and ``sizes``: those that run, in stream order.
    """

    def __init__(self, pieces: Sequence[Piece], nodes: Sequence[PromptNode]):
        self._nodes = nodes
        self._running = {piece.node: piece for piece in pieces}
        parents: dict[_Entry, _Entry | None] = {}
        for piece in pieces:
            self._add((piece.node, True), parents)
        below: dict[_Entry | None, list[_Entry]] = {}
        for entry, parent in parents.items():
            below.setdefault(parent, []).append(entry)
        ordered: list[_Entry] = []
        level = below.get(None, [])
        while level:
            ordered += level
            level = [child for entry in level for child in below.get(entry, [])]
        index = {entry: number for number, entry in enumerate(ordered)}
        above = [-1 if (parent := parents[entry]) is None else index[parent] for entry in ordered]
        self.tree = PrefixTree([self._size(entry) for entry in ordered], above)
        self.runs = [runs for _, runs in ordered]
        self.stored = [(node, self._size((node, runs))) for node, runs in ordered if not runs]
        self.stored_indices = [number for number, runs in enumerate(self.runs) if not runs]
        self.pieces = [self._running[node] for node, runs in ordered if runs]
        self.sizes = [piece.stop - piece.start for piece in self.pieces]

    def plan(self, read: Sequence[int]) -> AttentionPlan:
        """All running rows attend behind stored nodes; from roots, in the last layer, the last rows of ``read``."""
        if self.stored:
            return reading_plan(self.tree, ["all" if runs else "none" for runs in self.runs])
        return reading_plan(self.tree, ["last" if index in read else "none" for index in range(len(self.pieces))])

    def _add(self, entry: _Entry, parents: dict[_Entry, _Entry | None]) -> None:
        """This entry and all above it."""
        if entry in parents:
            return
        node, runs = entry
        if runs and self._running[node].start:
            above: _Entry | None = (node, False)
        else:
            parent = self._nodes[node].parent
            above = None if parent < 0 else (parent, parent in self._running)
        if above is not None:
            self._add(above, parents)
        parents[entry] = above

    def _size(self, entry: _Entry) -> int:
        node, runs = entry
        piece = self._running.get(node)
        if runs:
            assert piece is not None
            return piece.stop - piece.start
        return self._nodes[node].num_tokens if piece is None else piece.start


@dataclass(frozen=True)
class _Pass:
    """One pass, with the rows that it stores and reads on this process.

    Attributes:
        read: indices of the pieces whose last token's hidden state is returned.
        stores: of each piece the rows that are stored here, counted among those of its node that are.
        behind: (node, tokens stored here) of each stored node above.
        owners: the process that owns each row of ``behind``, node after node, where they are divided; within a node
            their order means nothing.
    """

    layout: _Layout
    read: Sequence[int]
    plan: AttentionPlan
    share: StreamShare | None
    stores: Sequence[Piece]
    behind: Sequence[tuple[int, int]]
    owners: Division | None = None


class _WritingContext:
    """Stores keys, values and states of a pass's pieces in each layer."""

    prefill: Prefill
    one: _Pass
    share: StreamShare | None

    def attend(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        # For a process that answers queries and has none of its own.
        self.prefill.store.scales[layer_index] = scale
        return super().attend(layer_index, q, k, v, scale)  # type: ignore[misc]

    def keep_keys_values(self, layer_index: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v [rows that are stored, K, H]."""
        self.prefill.check_between_layers()
        sizes = [part.stop - part.start for part in self.one.stores]
        for part, keys, values in zip(self.one.stores, k.split(sizes), v.split(sizes), strict=True):
            self.prefill.store.write(layer_index, part.node, part.start, keys, values)

    def keep_states(self, layer_index: int, states: LinearStates) -> None:
        """States [pieces, ...]; of a sequence rank those of its heads."""
        self.prefill.check_between_layers()
        if self.share is not None:
            assert self.prefill.linear_heads is not None
            states = self.prefill.linear_heads.gathered(states, self.share.rows.sequence)
        for index, piece in enumerate(self.one.layout.pieces):
            # Copies: a view would keep the states of the whole pass alive.
            one = LinearStates(states.conv_tail[index, None].clone(), states.recurrent[index, None].clone())
            self.prefill.store.write_states(layer_index, piece.node, one)

    def _own_heads(
        self, layer_index: int, queries: tuple[torch.Tensor, Division], k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As ``StreamContext._own_heads``. Decoding needs the keys and values of all heads: each process gets those of
        all rows, or where they are divided stores its own."""
        share = self.share
        assert share is not None
        own = k[: len(share.rows.mine)], v[: len(share.rows.mine)]
        if self.prefill.divided:
            self.keep_keys_values(layer_index, *own)
            q, k, v = rows_to_heads(queries, (own[0], share.rows), (own[1], share.rows))
            return q, k, v
        k, v = share.rows.gather(own[0]), share.rows.gather(own[1])
        self.keep_keys_values(layer_index, k, v)
        (q,) = rows_to_heads(queries)
        return q, share.own_heads(k), share.own_heads(v)


class _FromRoots(_WritingContext, TreeContext):
    """Nothing is stored above: the last layer runs on the rows that are read only."""


class _BehindStored(_WritingContext, ChunkContext):
    """Pieces behind tokens whose keys, values and states are in the store."""


class _Stored:
    """Per layer, on access: keys and values of the stored nodes above a pass, or their states."""

    def __init__(self, prefill: Prefill, one: _Pass):
        self._prefill, self._pass = prefill, one

    def __getitem__(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        store, share, owners = self._prefill.store, self._pass.share, self._pass.owners
        if layer_index in store.keys:
            k, v = store.read(layer_index, self._pass.behind)
            if share is None:
                return k, v
            if owners is not None:
                k, v = rows_to_heads((k, owners), (v, owners))
                return k, v
            return share.own_heads(k), share.own_heads(v)
        states = store.read_states(layer_index, [node for node, _ in self._pass.behind])
        if share is not None:
            assert self._prefill.linear_heads is not None
            states = self._prefill.linear_heads.own(states, share.rows.sequence)
        return states.conv_tail, states.recurrent
