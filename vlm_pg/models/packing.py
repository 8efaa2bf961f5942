"""Several groups in one token stream: what their prompts share once, then what is their own, then all responses.

The last token of a response is only ever predicted, never read, so it is not part of the stream.

Groups beyond a token budget are packed in two steps: their prompts alone (``pack_prefixes``), then chunk after chunk of
their responses behind the keys and values of those prompts (``pack_chunk``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from vlm_pg.attention.plan import Reads, reading_plan
from vlm_pg.attention.tree import PrefixTree
from vlm_pg.distributed import SequenceGroup
from vlm_pg.models.checks import checked_responses, chosen_responses
from vlm_pg.models.prompt_tree import PromptTree, prompt_tree
from vlm_pg.models.recorded import RecordedStream, RowRange, row_ranges
from vlm_pg.models.stream_share import StreamShare
from vlm_pg.types import Prompt, RecordedForward, ResponseGroup

T = TypeVar("T")


@dataclass(frozen=True)
class _Scored:
    """``targets`` int64 [R]: the response tokens that are predicted, all responses in order.

    ``predict_rows`` int64 [R]: which of the rows read predicts each of them; a response's first token is predicted by
    its prompt's last row. ``predict_rows_on_host``: the same. ``response_lengths``: per group,
    the length of each response.
    """

    predict_rows: Tensor
    targets: Tensor
    response_lengths: tuple[tuple[int, ...], ...]
    predict_rows_on_host: np.ndarray = field(compare=False, repr=False, kw_only=True)

    def split(self, values: Tensor) -> list[list[Tensor]]:
        """[R] values per response token -> per group, per response [R_g]."""
        flat = [length for lengths in self.response_lengths for length in lengths]
        parts = iter(values.split(flat))
        return [[next(parts) for _ in lengths] for lengths in self.response_lengths]

    @property
    def num_response_tokens(self) -> int:
        """Response tokens in the stream: all but the last of each response."""
        return sum(length - 1 for lengths in self.response_lengths for length in lengths)


@dataclass(frozen=True)
class _Prompts:
    """``media_rows`` int64 [M]: stream rows that take visual features. ``media_rows_on_host``: the same.

    ``feature_rows`` int64 [M]: which rows of the groups' features, concatenated group by group, they take; None stands
    for all of them in order. ``num_prompt_tokens``: sum of P over the groups, as if no prompt shared anything.
    ``num_sharing``: groups whose prompt begins like another one's.
    """

    media_rows: Tensor
    feature_rows: Tensor | None
    num_prompt_tokens: int
    num_sharing: int
    media_rows_on_host: np.ndarray = field(compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class _Stream:
    """``input_ids`` int64 [T]; ``positions_3T`` int64 [3, T]; ``tree``: the attention structure.

    ``reads``: per node of the tree, which of its rows are read off the last layer ("all", "last" or "none").
    ``share``: what of it this sequence rank computes; None for all.
    ``recorded``: what sampling computed of these rows under the present weights; None where the pass computes them.
    """

    input_ids: Tensor
    positions_3T: Tensor
    tree: PrefixTree
    reads: tuple[Reads, ...]
    share: StreamShare | None = field(default=None, kw_only=True)
    recorded: RecordedStream | None = field(default=None, compare=False, repr=False, kw_only=True)

    @property
    def num_tokens(self) -> int:
        """T, what is computed."""
        return int(self.input_ids.shape[0])


@dataclass(frozen=True)
class PackedBatch(_Scored, _Prompts, _Stream):
    """One stream of T tokens for one forward pass, and what to read off it.

    ``predict_rows`` are indices into ``reading_plan(tree, reads).rows``.

    Prefix of 3 tokens, responses [7, 8] and [9]: the stream holds 4 tokens (3 + 1 + 0), of which row 2 (the prefix's
    last) and row 3 are read; it predicts 3: predict_rows [0, 1, 0], targets [7, 8, 9].
    """

    @property
    def tokens_shared(self) -> int:
        """Prompt tokens left out because another group of the batch has the same ones."""
        return self.num_prompt_tokens + self.num_response_tokens - self.num_tokens


@dataclass(frozen=True)
class PrefixBatch(_Prompts, _Stream):
    """The prompts of some groups as one stream, without any response; the last row of each prompt is read.

    ``end_nodes``: the node of ``tree`` in which each group's prompt ends.
    """

    end_nodes: tuple[int, ...]

    @property
    def tokens_shared(self) -> int:
        """Prompt tokens left out because another group of the batch has the same ones."""
        return self.num_prompt_tokens - self.num_tokens


@dataclass(frozen=True)
class ChunkBatch(_Scored, _Stream):
    """Some responses of the groups of a PrefixBatch. ``input_ids`` and ``positions_3T`` hold their rows only.

    ``tree`` has the prompts' nodes too (reads "none"); ``node_of_prefix``: index in it of each node of the prefix
    batch's tree. ``predict_rows`` are indices into the prefix batch's read rows followed by this chunk's own rows. A
    chunk of responses of one token has no row of its own.
    """

    node_of_prefix: tuple[int, ...]


def packed_tokens(prefix_length: int, response_lengths: Sequence[int]) -> int:
    """Tokens one group puts into a stream."""
    return prefix_length + sum(length - 1 for length in response_lengths)


def repeated_tokens(prefix_length: int, response_lengths: Sequence[int]) -> int:
    """Tokens the same group costs when the prefix is repeated for every response."""
    return sum(prefix_length + length - 1 for length in response_lengths)


def one_by_one(groups: Sequence[ResponseGroup]) -> list[ResponseGroup]:
    """Every response as a group of its own, behind a prompt of its own."""
    return [ResponseGroup(group.prompt, (response,)) for group in groups for response in checked_responses(group)]


def stream_share(batch: PackedBatch | PrefixBatch, sequence: SequenceGroup) -> StreamShare:
    """What this process computes of a stream that those of ``sequence`` share."""
    rows = reading_plan(batch.tree, batch.reads).rows
    assert rows is not None
    return StreamShare.of(batch.num_tokens, rows, sequence)


def pack_repeated(groups: Sequence[ResponseGroup], device: torch.device) -> PackedBatch:
    """As ``pack``, but every response has a copy of its whole prompt before it, and nothing is shared.

    Values come back by group and response, as from ``pack``. ``feature_rows`` counts the features of every copy.

    Raises:
        ValueError: as ``pack``.
    """
    batch = pack(one_by_one(groups), device, share=False)
    return replace(batch, response_lengths=tuple(tuple(map(len, group.responses)) for group in groups))


def pack(groups: Sequence[ResponseGroup], device: torch.device, share: bool = True) -> PackedBatch:
    """Lay out ``groups`` level by level: prompts first, each behind what it shares with others, then responses.

    Args:
        share: keep tokens that several prompts begin with once in the stream. Off: one root per prompt, with identical
            results.

    Raises:
        ValueError: no groups, a group without responses, or an empty response.
    """
    prompts = _prompts_of(groups)
    responses = [checked_responses(group) for group in groups]
    nodes = prompt_tree(prompts, share)
    layout = _Layout([node.parent for node in nodes.nodes], nodes.end_nodes, responses)
    ids, positions = _prompt_tensors(prompts, nodes)
    own_ids, own_positions = _response_tensors(prompts, responses)
    ids, positions = layout.in_order(ids, own_ids), layout.in_order(positions, own_positions)
    reads: list[Reads] = layout.in_order(_prompt_reads(nodes), ["all"] * len(own_ids))
    read_starts = _starts([len(i) if read == "all" else int(read == "last") for i, read in zip(ids, reads)])
    tree = PrefixTree([len(i) for i in ids], layout.parents)
    predict_rows = _predict_rows(
        nodes.end_nodes,
        responses,
        [read_starts[index] for index in layout.prompt_indices],
        [read_starts[index] for index in layout.response_indices],
    )
    fields = _on(
        device,
        input_ids=torch.cat(ids),
        positions_3T=torch.cat(positions, dim=1),
        **_media(prompts, nodes, [tree.starts[index] for index in layout.prompt_indices]),
        **_scored(responses, predict_rows),
    )
    recorded = None
    if share and all(group.forwards for group in groups):
        forwards = [group.forwards for group in groups]
        recorded = _recorded(forwards, layout.in_order(_prompt_ranges(groups, nodes), _own_ranges(forwards)), reads)
    return PackedBatch(tree=tree, reads=tuple(reads), recorded=recorded, **fields)


Forwards = Sequence[Sequence[RecordedForward]]


def _prompt_ranges(groups: Sequence[ResponseGroup], nodes: PromptTree) -> list[list[RowRange]]:
    """The recorded rows of each prompt node."""
    return [row_ranges(groups[node.owner].forwards[0].prompt, node.start, node.stop) for node in nodes.nodes]


def _own_ranges(forwards: Forwards) -> list[list[RowRange]]:
    """Those of each response that has a row of its own."""
    with_own = (one.own for of_group in forwards for one in of_group if one.own)
    return [row_ranges(own, 0, sum(rows.num_tokens for rows in own)) for own in with_own]


def _recorded(forwards: Forwards, of_nodes: Sequence[list[RowRange]], reads: Sequence[Reads]) -> RecordedStream:
    """Of a stream's nodes in their order, with the results of all its targets."""
    read = [
        part if which == "all" else part._replace(start=part.stop - 1)
        for parts, which in zip(of_nodes, reads, strict=True)
        for part in {"all": parts, "last": parts[-1:], "none": []}[which]
    ]
    rows = [part for parts in of_nodes for part in parts]
    logprobs, entropies = (
        torch.cat([torch.empty(0), *(getattr(one, name) for of_group in forwards for one in of_group)])
        for name in ("logprobs", "entropies")
    )
    return RecordedStream(rows, read, logprobs, entropies)


def pack_prefixes(groups: Sequence[ResponseGroup], device: torch.device) -> PrefixBatch:
    """The groups' prompts alone, as ``pack`` lays them out.

    Raises:
        ValueError: no groups.
    """
    prompts = _prompts_of(groups)
    nodes = prompt_tree(prompts)
    ids, positions = _prompt_tensors(prompts, nodes)
    tree = PrefixTree([len(i) for i in ids], [node.parent for node in nodes.nodes])
    media = _media(prompts, nodes, tree.starts)
    fields = _on(device, input_ids=torch.cat(ids), positions_3T=torch.cat(positions, dim=1), **media)
    reads, recorded = _prompt_reads(nodes), None
    if all(group.forwards for group in groups):
        recorded = _recorded((), _prompt_ranges(groups, nodes), reads)
    return PrefixBatch(tree=tree, reads=tuple(reads), end_nodes=nodes.end_nodes, recorded=recorded, **fields)


def pack_chunk(
    prefix_batch: PrefixBatch, groups: Sequence[ResponseGroup], chosen: Sequence[Sequence[int]], device: torch.device
) -> ChunkBatch:
    """The chosen responses of the groups that ``prefix_batch`` was made of.

    Args:
        chosen: for each group, the indices of its responses in this chunk; may be empty.

    Raises:
        ValueError: not one entry per group, nothing chosen, or a response that is empty or does not exist.
    """
    if len(groups) != len(prefix_batch.end_nodes) or len(chosen) != len(groups):
        raise ValueError(
            f"pack_chunk got {len(groups)} groups and {len(chosen)} choices for {len(prefix_batch.end_nodes)} prompts; "
            "pass the groups of the prefix batch and one choice for each."
        )
    if not any(len(indices) for indices in chosen):
        raise ValueError("pack_chunk got no responses; choose at least one.")
    responses = [chosen_responses(group, indices) for group, indices in zip(groups, chosen, strict=True)]
    prefix = prefix_batch.tree
    layout = _Layout(prefix.parents, prefix_batch.end_nodes, responses)
    ids, positions = _response_tensors([group.prompt for group in groups], responses)
    order = sorted(range(len(ids)), key=layout.response_indices.__getitem__)
    # The prefix batch reads the last row of every node in which a prompt ends; this chunk's rows come after those.
    prefix_rows = [int(read == "last") for read in prefix_batch.reads]
    own_starts = _starts([sum(prefix_rows), *(len(ids[index]) for index in order)])[1:]
    start_of = dict(zip(order, own_starts, strict=True))
    predict_rows = _predict_rows(
        prefix_batch.end_nodes, responses, _starts(prefix_rows), [start_of[index] for index in range(len(ids))]
    )
    reads: list[Reads] = layout.in_order(["none"] * len(prefix.lengths), ["all"] * len(ids))
    empty = torch.zeros(0, dtype=torch.int64)
    fields = _on(
        device,
        input_ids=torch.cat([empty, *(ids[index] for index in order)]),
        positions_3T=torch.cat([empty.expand(3, 0), *(positions[index] for index in order)], dim=1),
        **_scored(responses, predict_rows),
    )
    tree = PrefixTree(layout.in_order(prefix.lengths, [len(i) for i in ids]), layout.parents)
    recorded = None
    if prefix_batch.recorded is not None:
        forwards = [[group.forwards[i] for i in indices] for group, indices in zip(groups, chosen, strict=True)]
        no_rows: list[list[RowRange]] = [[] for _ in prefix.lengths]
        recorded = _recorded(forwards, layout.in_order(no_rows, _own_ranges(forwards)), reads)
    node_of_prefix = tuple(layout.prompt_indices)
    return ChunkBatch(tree=tree, reads=tuple(reads), node_of_prefix=node_of_prefix, recorded=recorded, **fields)


class _Layout:
    """Breadth-first tree of prompt nodes and responses: among the children of a node prompts first, then responses.

    ``parents``: of each node of the tree. ``prompt_indices``: index in it of each prompt node; ``response_indices``: of
    each response that has a row of its own. Prompt nodes keep their order.
    """

    def __init__(self, parents: Sequence[int], end_nodes: Sequence[int], responses: Sequence[Sequence[Tensor]]):
        self.parents: list[int] = []
        self.prompt_indices = [-1] * len(parents)
        prompts_below: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            prompts_below.setdefault(parent, []).append(node)
        responses_below: dict[int, list[int]] = {}
        own = [end for end, of_group in zip(end_nodes, responses, strict=True) for r in of_group if len(r) > 1]
        for index, end in enumerate(own):
            responses_below.setdefault(end, []).append(index)
        self.response_indices = [-1] * len(own)
        level = [-1]
        while level:
            for node in level:
                parent = -1 if node == -1 else self.prompt_indices[node]
                for child in prompts_below.get(node, []):
                    self.prompt_indices[child] = len(self.parents)
                    self.parents.append(parent)
                for response in responses_below.get(node, []):
                    self.response_indices[response] = len(self.parents)
                    self.parents.append(parent)
            level = [child for node in level for child in prompts_below.get(node, [])]

    def in_order(self, of_prompts: Sequence[T], of_responses: Sequence[T]) -> list[T]:
        """One entry per node of the tree from entries per prompt node and per response."""
        entries = dict(zip(self.prompt_indices, of_prompts, strict=True))
        entries |= zip(self.response_indices, of_responses, strict=True)
        return [entries[index] for index in range(len(self.parents))]


def _starts(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)][:-1]


def _prompts_of(groups: Sequence[ResponseGroup]) -> list[Prompt]:
    if not groups:
        raise ValueError("pack got no groups; it needs at least one.")
    return [group.prompt for group in groups]


def _prompt_tensors(prompts: Sequence[Prompt], tree: PromptTree) -> tuple[list[Tensor], list[Tensor]]:
    """Token ids and positions of each prompt node."""
    owned = [(prompts[node.owner], slice(node.start, node.stop)) for node in tree.nodes]
    return [p.input_ids[part] for p, part in owned], [p.positions_3P[:, part] for p, part in owned]


def _response_tensors(
    prompts: Sequence[Prompt], responses: Sequence[Sequence[Tensor]]
) -> tuple[list[Tensor], list[Tensor]]:
    """Token ids and positions of each response that has a row of its own."""
    pairs = [(prompt.next_position, r[:-1]) for prompt, of_group in zip(prompts, responses) for r in of_group]
    own = [(start, ids) for start, ids in pairs if len(ids)]
    return [ids for _, ids in own], [(start + torch.arange(len(ids))).expand(3, -1) for start, ids in own]


def _prompt_reads(tree: PromptTree) -> list[Reads]:
    return ["last" if node in tree.end_nodes else "none" for node in range(len(tree.nodes))]


def _predict_rows(
    end_nodes: Sequence[int],
    responses: Sequence[Sequence[Tensor]],
    prompt_starts: Sequence[int],
    response_starts: Sequence[int],
) -> Tensor:
    """Row read for each response token: the end of its prompt for the first one, then the response's own rows.

    Args:
        prompt_starts: index among the rows read of each prompt node's (only) row.
        response_starts: index of the first row of each response that has rows.
    """
    own = iter(response_starts)
    rows = []
    for end, of_group in zip(end_nodes, responses, strict=True):
        for response in of_group:
            start = next(own) if len(response) > 1 else 0
            of_response = torch.arange(start - 1, start + len(response) - 1)
            of_response[0] = prompt_starts[end]
            rows.append(of_response)
    return torch.cat(rows)


def _media(prompts: Sequence[Prompt], tree: PromptTree, node_starts: Sequence[int]) -> dict[str, Any]:
    """The fields of ``_Prompts``."""
    visual = [prompt.mm_token_type_ids != 0 for prompt in prompts]
    counts = [int(mask.sum()) for mask in visual]
    first_feature = _starts(counts)
    rows, features = [], []
    for node, start in zip(tree.nodes, node_starts, strict=True):
        mask = visual[node.owner]
        in_node = mask[node.start : node.stop].nonzero()[:, 0]
        rows.append(in_node + start)
        seen = first_feature[node.owner] + int(mask[: node.start].sum())
        features.append(torch.arange(seen, seen + len(in_node)))
    media_rows, feature_rows = torch.cat(rows), torch.cat(features)
    in_order = torch.equal(feature_rows, torch.arange(sum(counts)))
    return {
        "media_rows": media_rows,
        "media_rows_on_host": media_rows.numpy(),
        "feature_rows": None if in_order else feature_rows,
        "num_prompt_tokens": sum(prompt.num_tokens for prompt in prompts),
        "num_sharing": len({prompt for members in tree.passing() if len(members) > 1 for prompt in members}),
    }


def _scored(responses: Sequence[Sequence[Tensor]], predict_rows: Tensor) -> dict[str, Any]:
    """The fields of ``_Scored``."""
    return {
        "predict_rows": predict_rows,
        "predict_rows_on_host": predict_rows.numpy(),
        "targets": torch.cat([response for of_group in responses for response in of_group]),
        "response_lengths": tuple(tuple(map(len, of_group)) for of_group in responses),
    }


def _on(device: torch.device, **fields: Any) -> dict[str, Any]:
    """The fields with their tensors on the device."""
    move = partial(Tensor.to, device=device, non_blocking=True)
    return {name: move(value) if isinstance(value, Tensor) else value for name, value in fields.items()}
