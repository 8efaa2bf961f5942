"""Micro-batches under a token budget in which tokens that prompts share count once.

Loss weights are fixed before this stage, so how groups are cut changes speed and memory, never the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

# What one more pass of the model costs beside its tokens, counted in tokens: every weight is read once more and every
# kernel launched once more. Passes of fewer tokens than this are bound by that reading on current accelerators.
TOKENS_PER_CALL = 512

Shared = Callable[[int, int], int]


@dataclass(frozen=True)
class Piece:
    """Some responses of one group.

    Piece(group=3, responses=(0, 1, 4))
    """

    group: int
    responses: tuple[int, ...]


@dataclass(frozen=True)
class MicroBatch:
    """One chunk: prompts and responses in a single pass. More: the prompts once, then the chunks one after the other.

    MicroBatch(chunks=((Piece(0, (0, 1)), Piece(2, (0,))),))
    """

    chunks: tuple[tuple[Piece, ...], ...]

    @property
    def groups(self) -> tuple[int, ...]:
        """The groups it holds, in order."""
        return tuple(sorted({piece.group for chunk in self.chunks for piece in chunk}))

    def renumbered(self, groups: Sequence[int]) -> MicroBatch:
        """The same with ``groups[i]`` for group ``i``."""
        return MicroBatch(tuple(tuple(replace(p, group=groups[p.group]) for p in chunk) for chunk in self.chunks))

    def of_units(self, units: Sequence[Sequence[Sequence[int]]]) -> MicroBatch:
        """The same with the responses ``units[group][i]`` for response ``i`` of each group."""
        return MicroBatch(
            tuple(
                tuple(replace(p, responses=tuple(r for i in p.responses for r in units[p.group][i])) for p in chunk)
                for chunk in self.chunks
            )
        )


def plan_micro_batches(
    groups: Sequence[tuple[int, Sequence[int]]], token_budget: int, shared: Shared = lambda i, j: 0
) -> list[MicroBatch]:
    """Distribute groups over micro-batches of at most ``token_budget`` tokens at a time.

    Groups whose prompts share at least half of the shorter one are kept together as far as that saves work, then all
    are placed largest first into the first micro-batch with room. What exceeds the budget alone is chunked: its prompts
    and its largest chunk together keep to the budget.

    Args:
        groups: (prompt tokens, stream tokens of each response) of each group.
        token_budget: most tokens of a pass; of a chunked micro-batch, most tokens of its prompts and one chunk.
        shared: (i, j) -> tokens that prompts i and j share where they stand in one micro-batch.

    Returns:
        Micro-batches, chunked ones first; every response of every group appears exactly once.

    Raises:
        ValueError: a prompt with a single response exceeds the budget.

    Example: ``plan_micro_batches([(10, [5, 5, 5]), (4, [1])], 21)`` gives two micro-batches: group 0 in two chunks
    behind its prompt (responses 0 and 1, then 2), and group 1.
    """
    sizes = _Sizes(groups, token_budget, shared)
    for index, (prompt, responses) in enumerate(groups):
        if (needed := prompt + max(responses, default=0)) > token_budget:
            raise ValueError(
                f"Group {index} needs {needed} tokens for its prefix and one response, the budget is {token_budget}. "
                f"Raise training.micro_batch_tokens to at least {needed}, or shorten prompts "
                "(prompt.max_prompt_tokens) or responses (rollout.max_new_tokens)."
            )
    clusters = _clusters(sizes)
    chunked = [cluster for cluster in clusters if sizes.tokens(cluster) > token_budget]
    plain: list[list[int]] = []
    for cluster in sorted(clusters, key=lambda members: (-sizes.tokens(members), members)):
        if cluster in chunked:
            continue
        batch = next((one for one in plain if sizes.tokens([*one, *cluster]) <= token_budget), None)
        if batch is None:
            plain.append(list(cluster))
        else:
            batch.extend(cluster)
    return [MicroBatch(tuple(sizes.chunks(cluster))) for cluster in chunked] + [
        MicroBatch((tuple(Piece(group, tuple(range(len(groups[group][1])))) for group in sorted(members)),))
        for members in plain
    ]


def tree_tokens(prompts: Sequence[int], members: Sequence[int], shared: Shared) -> int:
    """Tokens of the tree of some prompts: each brings what none of those before it has.

    Args:
        prompts: tokens of every prompt.
        members: which of them.
    """
    return sum(
        prompts[member] - max((shared(earlier, member) for earlier in members[:index]), default=0)
        for index, member in enumerate(members)
    )


def chunk_responses(responses: Sequence[Sequence[int]], members: Sequence[int], room: int) -> list[tuple[Piece, ...]]:
    """Responses, largest first, each into the first chunk with room; one beyond that is a chunk of its own.

    Args:
        responses: stream tokens of each response of every group.
        members: the groups whose responses are meant.
        room: tokens of a chunk.
    """
    waiting = [(-tokens, group, index) for group in members for index, tokens in enumerate(responses[group])]
    used: list[int] = []
    chosen: list[dict[int, list[int]]] = []
    for negative, group, index in sorted(waiting):
        chunk = next((i for i, total in enumerate(used) if total - negative <= room), len(used))
        if chunk == len(used):
            used.append(0)
            chosen.append({})
        used[chunk] -= negative
        chosen[chunk].setdefault(group, []).append(index)
    return [tuple(Piece(group, tuple(sorted(by_group[group]))) for group in sorted(by_group)) for by_group in chosen]


class _Sizes:
    """Token counts of sets of groups."""

    def __init__(self, groups: Sequence[tuple[int, Sequence[int]]], budget: int, shared: Shared):
        self.prompts = [prompt for prompt, _ in groups]
        self.responses = [list(responses) for _, responses in groups]
        self.budget = budget
        self.shared = shared

    def prompt_tokens(self, members: Sequence[int]) -> int:
        return tree_tokens(self.prompts, members, self.shared)

    def tokens(self, members: Sequence[int]) -> int:
        return self.prompt_tokens(members) + sum(sum(self.responses[member]) for member in members)

    def cost(self, members: Sequence[int]) -> float:
        """Of computing these groups, in tokens; infinite where even one response does not fit behind the prompts."""
        tokens = self.tokens(members)
        if tokens <= self.budget:
            # It will share its pass with others.
            return tokens + TOKENS_PER_CALL * tokens / self.budget
        room = self.budget - self.prompt_tokens(members)
        if room < max(tokens for member in members for tokens in self.responses[member]):
            return float("inf")
        return tokens + TOKENS_PER_CALL * (len(self.chunks(members)) + 1)

    def chunks(self, members: Sequence[int]) -> list[tuple[Piece, ...]]:
        return chunk_responses(self.responses, members, self.budget - self.prompt_tokens(members))


def _clusters(sizes: _Sizes) -> list[list[int]]:
    """Groups that are computed together for what their prompts share, most sharing pairs joined first."""
    count = len(sizes.prompts)
    cluster_of = [[group] for group in range(count)]
    pairs = [
        (-sizes.shared(i, j), i, j)
        for j in range(count)
        for i in range(j)
        # Less than this, such as a common system text, is worth taking along where it happens (first fit counts it) but
        # no reason to choose neighbours by.
        if 2 * sizes.shared(i, j) >= min(sizes.prompts[i], sizes.prompts[j])
    ]
    for _, i, j in sorted(pairs):
        a, b = cluster_of[i], cluster_of[j]
        if a is b:
            continue
        joined = sorted(a + b)
        if sizes.cost(joined) < sizes.cost(a) + sizes.cost(b):
            for member in joined:
                cluster_of[member] = joined
    return [cluster for group, cluster in enumerate(cluster_of) if cluster[0] == group]
