"""Where prompts and responses stand in a breadth-first stream, and which rows are read off it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

import torch

from vlm_pg.attention.plan import Reads
from vlm_pg.models.prompt_tree import PromptTree
from vlm_pg.types import Prompt

T = TypeVar("T")


class Layout:
    """Where prompt nodes and responses stand in one breadth-first tree: in each level a node's prompts, then responses.

    ``parents``: of each node of the tree. ``place_of_prompt``: index in it of each prompt node; ``place_of_response``:
    of each response that has a row of its own. Prompt nodes keep their order.
    """

    def __init__(self, parents: Sequence[int], end_nodes: Sequence[int], responses: Sequence[Sequence[torch.Tensor]]):
        self.parents: list[int] = []
        self.place_of_prompt = [-1] * len(parents)
        prompts_below: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            prompts_below.setdefault(parent, []).append(node)
        responses_below: dict[int, list[int]] = {}
        own = [end for end, of_group in zip(end_nodes, responses, strict=True) for r in of_group if len(r) > 1]
        for index, end in enumerate(own):
            responses_below.setdefault(end, []).append(index)
        self.place_of_response = [-1] * len(own)
        level = prompts_below.get(-1, [])
        self._append(level, [], -1)
        while level:
            for node in level:
                self._append(prompts_below.get(node, []), responses_below.get(node, []), self.place_of_prompt[node])
            level = [child for node in level for child in prompts_below.get(node, [])]

    def _append(self, prompts: Sequence[int], responses: Sequence[int], parent: int) -> None:
        for places, indices in ((self.place_of_prompt, prompts), (self.place_of_response, responses)):
            for index in indices:
                places[index] = len(self.parents)
                self.parents.append(parent)

    def in_order(self, of_prompts: Sequence[T], of_responses: Sequence[T]) -> list[T]:
        """One entry per node of the tree from entries per prompt node and per response."""
        placed = [*zip(self.place_of_prompt, of_prompts, strict=True)]
        placed += zip(self.place_of_response, of_responses, strict=True)
        return [entry for _, entry in sorted(placed, key=lambda pair: pair[0])]


def starts_of(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)][:-1]


def prompt_tensors(prompts: Sequence[Prompt], tree: PromptTree) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Token ids and positions of each prompt node."""
    owned = [(prompts[node.owner], slice(node.start, node.stop)) for node in tree.nodes]
    return [p.input_ids[part] for p, part in owned], [p.positions_3P[:, part] for p, part in owned]


def response_tensors(
    prompts: Sequence[Prompt], responses: Sequence[Sequence[torch.Tensor]]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Token ids and positions of each response that has a row of its own."""
    own = [
        (prompt.next_position, response[:-1])
        for prompt, of_group in zip(prompts, responses, strict=True)
        for response in of_group
        if len(response) > 1
    ]
    return [ids for _, ids in own], [(start + torch.arange(len(ids))).expand(3, -1) for start, ids in own]


def prompt_reads(tree: PromptTree) -> list[Reads]:
    ends = set(tree.end_nodes)
    return ["last" if node in ends else "none" for node in range(len(tree.nodes))]


def media_rows_of(
    prompts: Sequence[Prompt], tree: PromptTree, node_starts: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stream rows of visual tokens, and the rows of the prompts' concatenated features that belong there."""
    visual = [prompt.mm_token_type_ids != 0 for prompt in prompts]
    counts = [int(mask.sum()) for mask in visual]
    first_feature = starts_of(counts)
    rows, features = [], []
    for node, start in zip(tree.nodes, node_starts, strict=True):
        mask = visual[node.owner]
        in_node = mask[node.start : node.stop].nonzero()[:, 0]
        rows.append(in_node + start)
        seen = first_feature[node.owner] + int(mask[: node.start].sum())
        features.append(torch.arange(seen, seen + len(in_node)))
    feature_rows = torch.cat(features)
    in_order = torch.equal(feature_rows, torch.arange(sum(counts)))
    return torch.cat(rows), None if in_order else feature_rows


def predict_rows_of(
    end_nodes: Sequence[int],
    responses: Sequence[Sequence[torch.Tensor]],
    prompt_starts: Sequence[int],
    response_starts: Sequence[int],
) -> torch.Tensor:
    """Row read for each response token: the end of its prompt for the first one, then the response's own rows.

    Args:
        prompt_starts: place among the rows read of each prompt node's (only) row.
        response_starts: place of the first row of each response that has rows.
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


def num_sharing_of(tree: PromptTree) -> int:
    return len({prompt for members in tree.passing() if len(members) > 1 for prompt in members})


def lengths_of(responses: Sequence[Sequence[torch.Tensor]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(len(response) for response in of_group) for of_group in responses)
