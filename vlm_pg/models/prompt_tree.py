"""Which prompts of a batch begin alike: the tree in which every shared beginning stands once.

Two prompts share a token only if its id, its position and, for a visual token, the medium itself are the same, and so
are all tokens before it. Then its states are the same too, because a token depends on nothing that comes after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vlm_pg.types import Prompt

# A shared run of tokens becomes a node of its own from this length on. A node more can mean a level more, and a level
# more is one attention call per level above it in every layer, forward and backward; computing a few dozen tokens once
# per prompt is cheaper than that.
MIN_SHARED_TOKENS = 64


@dataclass(frozen=True)
class PromptNode:
    """Tokens ``start`` to ``stop`` (exclusive) of prompt ``owner`` and, alike, of all prompts that pass through.

    ``parent``: index of the node that holds the tokens before ``start``, -1 for a root.
    """

    parent: int
    owner: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class PromptTree:
    """``nodes`` breadth first; ``end_nodes``: the node in which each prompt ends, which may have children."""

    nodes: tuple[PromptNode, ...]
    end_nodes: tuple[int, ...]

    def passing(self) -> list[list[int]]:
        """For each node the prompts that contain it, in order."""
        prompts: list[list[int]] = [[] for _ in self.nodes]
        for prompt, node in enumerate(self.end_nodes):
            while node != -1:
                prompts[node].append(prompt)
                node = self.nodes[node].parent
        return prompts


@dataclass
class _Draft:
    owner: int
    start: int
    stop: int
    ends: list[int]
    children: list[_Draft] = field(default_factory=list)

    @property
    def height(self) -> int:
        return 1 + max((child.height for child in self.children), default=0)


def prompt_tree(prompts: Sequence[Prompt], share: bool = True, min_shared: int = MIN_SHARED_TOKENS) -> PromptTree:
    """The radix tree of ``prompts``; with ``share`` off, one root per prompt.

    A run that several prompts share and that is shorter than ``min_shared`` is not given a node: each of the branches
    behind it holds a copy. Leaving prompts out of a batch can only lengthen the runs that the others share. Equal
    prompts share everything, whatever their length.

    Three prompts that share 500 tokens, two of which share 300 more:

        nodes (-1, 0, 0, 500), (0, 0, 500, 800), (0, 2, 500, 560), (1, 0, 800, 830), (1, 1, 800, 820)
    """
    lengths = [prompt.num_tokens for prompt in prompts]
    if share:
        common = common_tokens(prompts)
    else:
        common = [[length if i == j else 0 for j in range(len(lengths))] for i, length in enumerate(lengths)]

    def grow(members: list[int], branch: int, start: int) -> list[_Draft]:
        """Nodes for the tokens from ``start`` on; the members are known to be alike up to ``branch``."""
        drafts = []
        for part in _alike(members, branch, common):
            stop = min(common[part[0]][member] for member in part)
            ends = [member for member in part if lengths[member] == stop]
            rest = [member for member in part if lengths[member] > stop]
            if rest and stop - branch < min_shared:
                if ends:
                    drafts.append(_Draft(ends[0], start, stop, ends))
                drafts.extend(grow(rest, stop, start))
            else:
                drafts.append(_Draft(part[0], start, stop, ends, grow(rest, stop, stop)))
        # Nodes with prompts below them stand first, so that in each level of a packed stream the prompts come together
        # and then the responses.
        return sorted(drafts, key=lambda draft: -draft.height)

    return _breadth_first(grow(list(range(len(prompts))), 0, 0), len(prompts))


def shared_tokens(
    prompts: Sequence[Prompt], min_shared: int = MIN_SHARED_TOKENS, share: bool = True
) -> tuple[tuple[int, ...], ...]:
    """[i][j]: tokens that prompts i and j pass through together in their tree; [i][i] is the prompt's length.

    In the tree of any selection of these prompts the two share at least as much. With ``share`` off, nothing.
    """
    tree = prompt_tree(prompts, share, min_shared)
    shared = [[0] * len(prompts) for _ in prompts]
    # Breadth first: a later node lies deeper.
    for node, members in zip(tree.nodes, tree.passing(), strict=True):
        for i in members:
            for j in members:
                shared[i][j] = node.stop
    return tuple(tuple(row) for row in shared)


def common_tokens(prompts: Sequence[Prompt]) -> list[list[int]]:
    """[i][j]: length of the longest common beginning of prompts i and j, to the token."""
    known: dict[tuple[str, ...], int] = {}
    rows = [_token_rows(prompt, index, known) for index, prompt in enumerate(prompts)]
    common = [[prompt.num_tokens] * len(prompts) for prompt in prompts]
    for i in range(len(prompts)):
        for j in range(i):
            common[i][j] = common[j][i] = _common_length(rows[i], rows[j])
    return common


def _token_rows(prompt: Prompt, index: int, known: dict[tuple[str, ...], int]) -> Tensor:
    """int64 [5, P]: token id, medium (0 for text, else a number per distinct medium) and the three positions."""
    visual = prompt.mm_token_type_ids != 0
    medium = torch.zeros_like(prompt.input_ids)
    if bool(visual.any()):
        numbers = [known.setdefault(key, len(known) + 1) for key in _media_identities(prompt, index)]
        patches = torch.ones(1, dtype=torch.int64) if prompt.grid_thw is None else prompt.grid_thw.prod(-1)
        medium[visual] = torch.tensor(numbers).repeat_interleave(patches * int(visual.sum()) // patches.sum())
    return torch.cat([prompt.input_ids[None], medium[None], prompt.positions_3P])


def _media_identities(prompt: Prompt, index: int) -> list[tuple[str, ...]]:
    """One key per medium; equal keys mean equal visual features."""
    count = 1 if prompt.grid_thw is None else len(prompt.grid_thw)
    if prompt.media_keys:
        if len(prompt.media_keys) != count:
            raise ValueError(
                f"Prompt {prompt.sample_id!r} has {len(prompt.media_keys)} media_keys for {count} media; "
                "give one per row of grid_thw, or none."
            )
        return [(key,) for key in prompt.media_keys]
    # Only the media as a whole are known: shared if all of them are. Without any key nothing is known to be equal.
    whole = prompt.content_key or f"unknown {index}"
    return [(whole, str(item)) for item in range(count)]


def _common_length(a: Tensor, b: Tensor) -> int:
    shorter = min(a.shape[1], b.shape[1])
    # Prompts with different media differ early on: look there first.
    for stop in (min(MIN_SHARED_TOKENS, shorter), shorter):
        differs = (a[:, :stop] != b[:, :stop]).any(0)
        if bool(differs.any()):
            return int(differs.byte().argmax())
    return shorter


def _alike(members: Sequence[int], branch: int, common: Sequence[Sequence[int]]) -> list[list[int]]:
    """Members that go on alike past ``branch``. An equivalence: being alike up to a token is transitive."""
    parts: dict[int, list[int]] = {}
    for member in members:
        first = next((first for first in parts if common[first][member] > branch), member)
        parts.setdefault(first, []).append(member)
    return list(parts.values())


def _breadth_first(roots: list[_Draft], num_prompts: int) -> PromptTree:
    nodes: list[PromptNode] = []
    end_nodes = [-1] * num_prompts
    level = [(-1, draft) for draft in roots]
    while level:
        below: list[tuple[int, _Draft]] = []
        for parent, draft in level:
            for prompt in draft.ends:
                end_nodes[prompt] = len(nodes)
            below.extend((len(nodes), child) for child in draft.children)
            nodes.append(PromptNode(parent, draft.owner, draft.start, draft.stop))
        level = below
    return PromptTree(tuple(nodes), tuple(end_nodes))
