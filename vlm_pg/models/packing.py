"""Several groups in one token stream: what their prompts share once, then what is their own, then all responses.

The last token of a response is only ever predicted, never read, so it is not part of the stream.

Groups beyond a token budget are packed in two steps: their prompts alone (``pack_prefixes``), then chunk after chunk of
their responses behind the keys and values of those prompts (``pack_chunk``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from vlm_pg.attention.plan import Reads, reading_plan
from vlm_pg.attention.tree import PrefixTree
from vlm_pg.distributed import SequenceGroup
from vlm_pg.models.checks import checked_responses, chosen_responses
from vlm_pg.models.prompt_tree import PromptTree, prompt_tree
from vlm_pg.models.stream_layout import (
    Layout,
    lengths_of,
    media_rows_of,
    num_sharing_of,
    predict_rows_of,
    prompt_reads,
    prompt_tensors,
    response_tensors,
    starts_of,
)
from vlm_pg.models.stream_share import StreamShare
from vlm_pg.types import Prompt, ResponseGroup


@dataclass(frozen=True)
class _Scored:
    """``targets`` int64 [R]: the response tokens that are predicted, all responses in order.

    ``predict_rows`` int64 [R]: which of the rows read predicts each of them; a response's first token is predicted by
    its prompt's last row; the same ``predict_rows_on_host``, wherever the others are. ``response_lengths``: per group,
    the length of each response.
    """

    predict_rows: torch.Tensor
    targets: torch.Tensor
    response_lengths: tuple[tuple[int, ...], ...]
    predict_rows_on_host: np.ndarray = field(compare=False, repr=False, kw_only=True)

    def split(self, values: torch.Tensor) -> list[list[torch.Tensor]]:
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
    """``media_rows`` int64 [M]: stream rows that take visual features; the same ``media_rows_on_host``.

    ``feature_rows`` int64 [M]: which rows of the groups' features, concatenated group by group, they take; None stands
    for all of them in order. ``num_prompt_tokens``: sum of P over the groups, as if no prompt shared anything.
    ``num_sharing``: groups whose prompt begins like another one's.
    """

    media_rows: torch.Tensor
    feature_rows: torch.Tensor | None
    num_prompt_tokens: int
    num_sharing: int
    media_rows_on_host: np.ndarray = field(compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class _Stream:
    """``input_ids`` int64 [T]; ``positions_3T`` int64 [3, T]; ``tree``: the attention structure.

    ``reads``: per node of the tree, which of its rows are read off the last layer ("all", "last" or "none").
    ``share``: what of it this sequence rank computes; None for all.
    """

    input_ids: torch.Tensor
    positions_3T: torch.Tensor
    tree: PrefixTree
    reads: tuple[Reads, ...]
    share: StreamShare | None = field(default=None, kw_only=True)

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

    ``tree`` has the prompts' nodes too (reads "none"); ``node_of_prefix``: where each node of the prefix batch's tree
    stands in it. ``predict_rows`` are indices into the prefix batch's read rows followed by this chunk's own rows. A
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
    return replace(batch, response_lengths=lengths_of([group.responses for group in groups]))


def pack(groups: Sequence[ResponseGroup], device: torch.device, share: bool = True) -> PackedBatch:
    """Lay out ``groups`` level by level: prompts first, each behind what it shares with others, then responses.

    Args:
        share: give tokens that several prompts begin with one place in the stream. Off: one root per prompt, with
            identical results.

    Raises:
        ValueError: no groups, a group without responses, or an empty response.
    """
    prompts = _prompts_of(groups)
    responses = [checked_responses(group) for group in groups]
    nodes = prompt_tree(prompts, share)
    layout = Layout([node.parent for node in nodes.nodes], nodes.end_nodes, responses)
    ids, positions = prompt_tensors(prompts, nodes)
    own_ids, own_positions = response_tensors(prompts, responses)
    ids, positions = layout.in_order(ids, own_ids), layout.in_order(positions, own_positions)
    reads: list[Reads] = layout.in_order(prompt_reads(nodes), ["all"] * len(own_ids))
    read_starts = starts_of(
        [len(i) if read == "all" else int(read == "last") for i, read in zip(ids, reads, strict=True)]
    )
    tree = PrefixTree([len(i) for i in ids], layout.parents)
    predict_rows = predict_rows_of(
        nodes.end_nodes,
        responses,
        [read_starts[place] for place in layout.place_of_prompt],
        [read_starts[place] for place in layout.place_of_response],
    )
    fields = _on(
        device,
        input_ids=torch.cat(ids),
        positions_3T=torch.cat(positions, dim=1),
        **_media_of(prompts, nodes, [tree.starts[place] for place in layout.place_of_prompt]),
        **_scored(responses, predict_rows),
    )
    return PackedBatch(tree=tree, reads=tuple(reads), **fields)


def pack_prefixes(groups: Sequence[ResponseGroup], device: torch.device, share: bool = True) -> PrefixBatch:
    """The groups' prompts alone, as ``pack`` lays them out.

    Raises:
        ValueError: no groups.
    """
    prompts = _prompts_of(groups)
    nodes = prompt_tree(prompts, share)
    ids, positions = prompt_tensors(prompts, nodes)
    tree = PrefixTree([len(i) for i in ids], [node.parent for node in nodes.nodes])
    media = _media_of(prompts, nodes, tree.starts)
    fields = _on(device, input_ids=torch.cat(ids), positions_3T=torch.cat(positions, dim=1), **media)
    return PrefixBatch(tree=tree, reads=tuple(prompt_reads(nodes)), end_nodes=nodes.end_nodes, **fields)


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
    prompts = [group.prompt for group in groups]
    prefix = prefix_batch.tree
    layout = Layout(prefix.parents, prefix_batch.end_nodes, responses)
    ids, positions = response_tensors(prompts, responses)
    order = sorted(range(len(ids)), key=lambda index: layout.place_of_response[index])
    # The prefix batch reads the last row of every node in which a prompt ends; this chunk's rows come after those.
    prefix_rows = [int(read == "last") for read in prefix_batch.reads]
    own_starts = starts_of([sum(prefix_rows), *(len(ids[index]) for index in order)])[1:]
    start_of = dict(zip(order, own_starts, strict=True))
    predict_rows = predict_rows_of(
        prefix_batch.end_nodes, responses, starts_of(prefix_rows), [start_of[index] for index in range(len(ids))]
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
    return ChunkBatch(tree=tree, reads=tuple(reads), node_of_prefix=tuple(layout.place_of_prompt), **fields)


def _prompts_of(groups: Sequence[ResponseGroup]) -> list[Prompt]:
    if not groups:
        raise ValueError("pack got no groups; it needs at least one.")
    return [group.prompt for group in groups]


def _media_of(prompts: Sequence[Prompt], nodes: PromptTree, node_starts: Sequence[int]) -> dict[str, Any]:
    """The fields of ``_Prompts``."""
    media_rows, feature_rows = media_rows_of(prompts, nodes, node_starts)
    return {
        "media_rows": media_rows,
        "media_rows_on_host": media_rows.numpy(),
        "feature_rows": feature_rows,
        "num_prompt_tokens": sum(prompt.num_tokens for prompt in prompts),
        "num_sharing": num_sharing_of(nodes),
    }


def _scored(responses: Sequence[Sequence[torch.Tensor]], predict_rows: torch.Tensor) -> dict[str, Any]:
    """The fields of ``_Scored``."""
    targets = torch.cat([response for of_group in responses for response in of_group])
    return {
        "predict_rows": predict_rows,
        "predict_rows_on_host": predict_rows.numpy(),
        "targets": targets,
        "response_lengths": lengths_of(responses),
    }


def _on(device: torch.device, **fields: Any) -> dict[str, Any]:
    """The fields with their tensors on the device."""
    move = partial(torch.Tensor.to, device=device, non_blocking=True)
    return {name: move(value) if isinstance(value, torch.Tensor) else value for name, value in fields.items()}
