"""Prompts through the model once: every node of their tree, in passes of limited size."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from vlm_pg.attention.kernels import Kernel
from vlm_pg.attention.plan import AttentionPlan, reading_plan
from vlm_pg.attention.tree import PrefixTree
from vlm_pg.distributed import BY_ITSELF, SequenceGroup
from vlm_pg.models.contexts import ChunkContext, TreeContext
from vlm_pg.models.linear_attention import LinearHeads, LinearStates
from vlm_pg.models.policy import Policy
from vlm_pg.models.prompt_tree import PromptNode
from vlm_pg.models.stream_rows import Rows, hidden_of_rows
from vlm_pg.models.stream_share import Division, StreamShare, rows_to_heads
from vlm_pg.rollout.kv import PrefixStore
from vlm_pg.types import Prompt, VisualFeatures


@dataclass(frozen=True)
class Piece:
    """Tokens ``start`` to ``stop`` (exclusive, counted within the node) of a node."""

    node: int
    start: int
    stop: int


def cut_into_passes(lengths: Mapping[int, int], budget: int) -> Iterator[list[Piece]]:
    """Nodes in their order, at most ``budget`` tokens a pass; a node may be spread over several passes."""
    pieces: list[Piece] = []
    room = budget
    for node, length in lengths.items():
        start = 0
        while start < length:
            stop = min(length, start + room)
            pieces.append(Piece(node, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield pieces
                pieces, room = [], budget
    if pieces:
        yield pieces


class Prefill:
    """Runs new nodes of a prompt tree and stores what their readers need.

    Args:
        nodes: all nodes of the tree; a parent comes before its children.
        prompts: the prompts that ``PromptNode.owner`` counts.
        budget: tokens per pass.
        between_layers: called often; what it raises ends the prefill.
        sequence: processes that run the same nodes at the same time, each its rows of every pass; all store everything.
    """

    def __init__(
        self,
        policy: Policy,
        store: PrefixStore,
        nodes: Sequence[PromptNode],
        prompts: Sequence[Prompt],
        budget: int,
        between_layers: Callable[[], None],
        sequence: SequenceGroup = BY_ITSELF,
    ):
        self.policy, self.store, self.nodes, self.prompts, self.sequence = policy, store, nodes, prompts, sequence
        self._budget = budget
        self._between_layers = between_layers
        text = policy.model.config.get_text_config()
        self._linear_heads = LinearHeads.of_config(text) if policy.family.linear_attention else None

    def run(self, new: Sequence[int], ends: Collection[int]) -> dict[int, torch.Tensor]:
        """Nodes that the store has room for already, parents first.

        Returns:
            For each node of ``ends`` among them the last hidden state [D] of its last token.
        """
        lengths = {node: self.nodes[node].num_tokens for node in new}
        owners = sorted({self.nodes[node].owner for node in new if self._has_media(node)})
        encoded = self.policy.vision.encode([self.prompts[owner] for owner in owners], sequence=self.sequence)
        features = dict(zip(owners, encoded, strict=True))
        last_hidden: dict[int, torch.Tensor] = {}
        for pieces in cut_into_passes(lengths, self._budget):
            last_hidden |= self._pass(pieces, lengths, features, set(ends))
        return last_hidden

    def _pass(
        self,
        pieces: Sequence[Piece],
        lengths: Mapping[int, int],
        features: Mapping[int, VisualFeatures],
        ends: set[int],
    ) -> dict[int, torch.Tensor]:
        layout = _Layout(pieces, self.nodes)
        stream = [self._tokens(piece) for piece in layout.pieces]
        types = torch.cat([self.prompts[owner].mm_token_type_ids[span] for owner, span in stream])
        parts = [self._features(features[owner], owner, span) for owner, span in stream if owner in features]
        read = [
            place
            for place, piece in enumerate(layout.pieces)
            if piece.stop == lengths[piece.node] and piece.node in ends
        ]
        ends_here = [sum(layout.sizes[: place + 1]) - 1 for place in read]
        plan = layout.plan(read or [0])
        share = None
        if self.sequence.size > 1:
            # Behind what is stored every row of the stream is read.
            asking = range(sum(layout.sizes)) if layout.stored else plan.rows or ()
            share = StreamShare.of(sum(layout.sizes), asking, self.sequence)
        keeping = _Keeping(self.store, layout, self._between_layers, self._linear_heads)
        kernel = self.policy.kernel_here
        context: TreeContext | ChunkContext
        if layout.stored:
            context = _BehindStored(self.store, layout, plan, keeping, kernel, share)
        else:
            context = _FromRoots(layout, plan, keeping, kernel, share)
        rows = Rows(
            torch.cat([self.prompts[owner].input_ids[span] for owner, span in stream]).to(self.policy.device),
            torch.cat([self.prompts[owner].positions_3P[:, span] for owner, span in stream], dim=1).to(
                self.policy.device
            ),
            types.nonzero()[:, 0].to(self.policy.device),
            torch.cat(parts).detach() if bool(types.any()) else None,
        )
        hidden = hidden_of_rows(self.policy, rows, context, share)
        places = torch.tensor(ends_here if layout.stored else range(len(read)), dtype=torch.int64)
        if share is None:
            last = hidden[places.to(hidden.device)]
        else:
            division, own = share.predictions(places)
            last = division.gather(hidden[own.to(hidden.device)])
        return {layout.pieces[place].node: row for place, row in zip(read, last, strict=True)}

    def _tokens(self, piece: Piece) -> tuple[int, slice]:
        """The prompt that owns a piece and the piece's tokens in it."""
        node = self.nodes[piece.node]
        return node.owner, slice(node.start + piece.start, node.start + piece.stop)

    def _has_media(self, node: int) -> bool:
        """Whether visual tokens are among a node's own; a question behind a stored video has none."""
        one = self.nodes[node]
        return bool(self.prompts[one.owner].mm_token_type_ids[one.start : one.stop].any())

    def _features(self, features: VisualFeatures, owner: int, span: slice) -> torch.Tensor:
        """Of a prompt's visual features those of the visual tokens in ``span``."""
        assert features.features is not None
        visual = self.prompts[owner].mm_token_type_ids != 0
        first = int(visual[: span.start].sum())
        return features.features[first : first + int(visual[span].sum())]


class _Layout:
    """A pass as a tree: what is stored above its pieces, and the pieces.

    ``stored``: (node, tokens) of each stored node above, ``pieces`` and ``sizes``: what runs, in stream order.
    """

    def __init__(self, pieces: Sequence[Piece], nodes: Sequence[PromptNode]):
        self._nodes = nodes
        self._running = {piece.node: piece for piece in pieces}
        entries: dict[tuple[int, bool], tuple[int, bool] | None] = {}
        for piece in pieces:
            self._add((piece.node, True), entries)
        levels: list[list[tuple[int, bool]]] = []
        below: dict[tuple[int, bool] | None, list[tuple[int, bool]]] = {}
        for entry, parent in entries.items():
            below.setdefault(parent, []).append(entry)
        level = below.get(None, [])
        while level:
            levels.append(level)
            level = [child for entry in level for child in below.get(entry, [])]
        ordered = [entry for level in levels for entry in level]
        place = {entry: index for index, entry in enumerate(ordered)}
        parents = [-1 if (parent := entries[entry]) is None else place[parent] for entry in ordered]
        self.tree = PrefixTree([self._size(entry) for entry in ordered], parents)
        self.runs = [runs for _, runs in ordered]
        self.stored = [(node, self._size((node, runs))) for node, runs in ordered if not runs]
        self.stored_places = [index for index, runs in enumerate(self.runs) if not runs]
        self.pieces = [self._running[node] for node, runs in ordered if runs]
        self.sizes = [piece.stop - piece.start for piece in self.pieces]

    def plan(self, read: Sequence[int]) -> AttentionPlan:
        """All rows that run ask behind what is stored; from roots, in the last layer, the last rows of ``read``."""
        if self.stored:
            return reading_plan(self.tree, ["all" if runs else "none" for runs in self.runs])
        return reading_plan(self.tree, ["last" if place in read else "none" for place in range(len(self.pieces))])

    def _add(self, entry: tuple[int, bool], entries: dict[tuple[int, bool], tuple[int, bool] | None]) -> None:
        """This entry, a node and whether it runs (True) or is stored, and all above it."""
        if entry in entries:
            return
        node, runs = entry
        if runs and self._running[node].start:
            above: tuple[int, bool] | None = (node, False)
        else:
            parent = self._nodes[node].parent
            above = None if parent < 0 else (parent, parent in self._running)
        if above is not None:
            self._add(above, entries)
        entries[entry] = above

    def _size(self, entry: tuple[int, bool]) -> int:
        node, runs = entry
        piece = self._running.get(node)
        if runs:
            assert piece is not None
            return piece.stop - piece.start
        return self._nodes[node].num_tokens if piece is None else piece.start


class _Keeping:
    """Stores what the pieces of a pass leave behind in each layer."""

    def __init__(
        self,
        store: PrefixStore,
        layout: _Layout,
        between_layers: Callable[[], None],
        linear_heads: LinearHeads | None,
    ):
        self._store, self._layout, self._between_layers = store, layout, between_layers
        self.linear_heads = linear_heads

    def keys_values(self, layer_index: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v [rows of the pieces, K, H]."""
        self._between_layers()
        parts = zip(self._layout.pieces, k.split(self._layout.sizes), v.split(self._layout.sizes), strict=True)
        for piece, keys, values in parts:
            self._store.write(layer_index, piece.node, piece.start, keys, values)

    def own_heads(
        self,
        layer_index: int,
        asked: tuple[torch.Tensor, Division],
        k: torch.Tensor,
        v: torch.Tensor,
        share: StreamShare | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As ``StreamContext._own_heads``; decoding needs the keys and values of all heads, so everybody gets them."""
        assert share is not None
        k, v = share.rows.gather(k[: len(share.rows.mine)]), share.rows.gather(v[: len(share.rows.mine)])
        self.keys_values(layer_index, k, v)
        (q,) = rows_to_heads(asked)
        return q, share.own_heads(k), share.own_heads(v)

    def states(self, layer_index: int, states: LinearStates, share: StreamShare | None) -> None:
        """States [pieces, ...]; of a sequence rank those of its heads."""
        self._between_layers()
        if share is not None:
            assert self.linear_heads is not None
            states = self.linear_heads.gathered(states, share.rows.sequence)
        for place, piece in enumerate(self._layout.pieces):
            # Copies: a view would keep the states of the whole pass alive.
            one = LinearStates(states.conv_tail[place, None].clone(), states.recurrent[place, None].clone())
            self._store.write_states(layer_index, piece.node, one)


class _FromRoots(TreeContext):
    """Nothing is stored above: the last layer runs on the rows that are read only."""

    def __init__(
        self, layout: _Layout, plan: AttentionPlan, keeping: _Keeping, kernel: Kernel, share: StreamShare | None
    ):
        super().__init__(layout.tree, kernel, plan, share=share)
        self._keeping = keeping

    def keep_keys_values(self, layer_index: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self._keeping.keys_values(layer_index, k, v)

    def keep_states(self, layer_index: int, states: LinearStates) -> None:
        self._keeping.states(layer_index, states, self.share)

    def _own_heads(
        self, layer_index: int, asked: tuple[torch.Tensor, Division], k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._keeping.own_heads(layer_index, asked, k, v, self.share)


class _BehindStored(ChunkContext):
    """Pieces behind tokens whose keys, values and states are in the store."""

    def __init__(
        self,
        store: PrefixStore,
        layout: _Layout,
        plan: AttentionPlan,
        keeping: _Keeping,
        kernel: Kernel,
        share: StreamShare | None,
    ):
        stored = _Stored(store, layout.stored, share, keeping.linear_heads)
        super().__init__(layout.tree, plan, layout.stored_places, stored, kernel, share=share)
        self._keeping = keeping

    def keep_keys_values(self, layer_index: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self._keeping.keys_values(layer_index, k, v)

    def keep_states(self, layer_index: int, states: LinearStates) -> None:
        self._keeping.states(layer_index, states, self.share)

    def _own_heads(
        self, layer_index: int, asked: tuple[torch.Tensor, Division], k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._keeping.own_heads(layer_index, asked, k, v, self.share)


class _Stored:
    """Per layer, when it is asked for: keys and values of the stored nodes above a pass, or their states."""

    def __init__(
        self,
        store: PrefixStore,
        parts: Sequence[tuple[int, int]],
        share: StreamShare | None,
        linear_heads: LinearHeads | None,
    ):
        self._store, self._parts, self._share, self._linear_heads = store, parts, share, linear_heads

    def __getitem__(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_index in self._store.keys:
            k, v = self._store.read(layer_index, self._parts)
            return (k, v) if self._share is None else (self._share.own_heads(k), self._share.own_heads(v))
        states = self._store.read_states(layer_index, [node for node, _ in self._parts])
        if self._share is not None:
            assert self._linear_heads is not None
            states = self._linear_heads.own(states, self._share.rows.sequence)
        return states.conv_tail, states.recurrent
