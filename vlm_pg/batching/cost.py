"""What it costs to train on groups, in whole numbers: equal on every rank, in whatever order things are added.

A shared prefix of P tokens costs P tokens and P (P + 1) / 2 attention pairs, once; a response of r stream tokens behind
it costs r tokens, r P + r (r + 1) / 2 pairs and r + 1 rows of logits. What an earlier prompt has in common with a later
one costs the later one nothing, where both are computed in one micro-batch. The vision tower is no part of it: a frozen
one's features are there already, and the frames of one that trains are divided over all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vlm_pg.batching.plan import TOKENS_PER_CALL, Shared


@dataclass(frozen=True)
class CostModel:
    """Operations of forward and backward, whole numbers.

    Args:
        token: of a token in all linear layers.
        pair: of a (query, key) pair in all attention layers.
        logit: of a row through the output head.
    """

    token: int
    pair: int
    logit: int = 0


@dataclass(frozen=True)
class GroupWork:
    """What one group is, as far as its cost goes.

    Args:
        prompt_tokens: P.
        responses: stream tokens of each response that trains (one less than it has).
        media_key: prompts with equal ones have equal media; "" equals nothing.
        rank: the one that holds it.
    """

    prompt_tokens: int
    responses: tuple[int, ...]
    media_key: str = ""
    rank: int = 0


class GroupCosts:
    """Costs of parts of groups.

    Every token also pays its part of reading all weights once more for one more pass (``TOKENS_PER_CALL``).

    Args:
        token_budget: most tokens of a pass, see ``plan_micro_batches``.
        shared: (i, j) -> tokens that prompts i and j share where they stand in one micro-batch.
    """

    def __init__(self, groups: Sequence[GroupWork], model: CostModel, token_budget: int, shared: Shared):
        self.groups, self.model, self.budget, self.shared = groups, model, token_budget, shared
        self.responses = [self._responses(group) for group in groups]
        # Of each group: which groups are computed with it where they are on one rank, itself included.
        self.cluster = _clusters(groups, token_budget, shared)
        self.clusters = [members for group, members in enumerate(self.cluster) if members[0] == group]
        self._prefixes: dict[tuple[int, ...], int] = {}
        # The rank with a group's longest response computes its prefix, too: a lower bound of the slowest rank.
        self.longest = max(
            (self.prefixes((g,)) + max(of_group) for g, of_group in enumerate(self.responses)), default=0
        )

    def prefixes(self, members: tuple[int, ...]) -> int:
        """Of the prompts of some groups of one cluster, in ascending order, on one rank."""
        if members not in self._prefixes:
            parts = (self._prefix(member, members[:index]) for index, member in enumerate(members))
            self._prefixes[members] = sum(parts)
        return self._prefixes[members]

    def of_responses(self, pieces: Mapping[int, Sequence[int]]) -> int:
        """Of responses alone: group -> which of them."""
        return sum(self.responses[group][index] for group, chosen in pieces.items() for index in chosen)

    def rank(self, pieces: Mapping[int, Sequence[int]]) -> int:
        """Of all that one rank has: group -> its responses."""
        of_cluster: dict[int, list[int]] = {}
        for group in sorted(pieces):
            of_cluster.setdefault(self.cluster[group][0], []).append(group)
        return self.of_responses(pieces) + sum(self.prefixes(tuple(members)) for members in of_cluster.values())

    def _prefix(self, group: int, earlier: Sequence[int]) -> int:
        work, model = self.groups[group], self.model
        known = max((self.shared(other, group) for other in earlier), default=0)
        tokens, pairs = work.prompt_tokens - known, causal_pairs(work.prompt_tokens) - causal_pairs(known)
        return model.token * _with_calls(tokens, self.budget) + model.pair * pairs

    def _responses(self, group: GroupWork) -> tuple[int, ...]:
        model, prompt = self.model, group.prompt_tokens
        # Response tokens that pay for a pass together: a chunk's where the group goes beyond the budget.
        of_call = max(1, self.budget - prompt) if prompt + sum(group.responses) > self.budget else self.budget
        return tuple(
            model.token * _with_calls(tokens, of_call)
            + model.pair * (tokens * prompt + causal_pairs(tokens))
            + model.logit * (tokens + 1)
            for tokens in group.responses
        )


def causal_pairs(tokens: int) -> int:
    """Pairs in causal attention of a run of tokens to itself."""
    return tokens * (tokens + 1) // 2


def _with_calls(tokens: int, of_call: int) -> int:
    return tokens + TOKENS_PER_CALL * tokens // of_call


def _clusters(groups: Sequence[GroupWork], budget: int, shared: Shared) -> list[tuple[int, ...]]:
    """Groups that are worth computing together, those that share most joined first, while one pass can hold them.

    As in ``plan_micro_batches``: at least half of the shorter prompt. Each group's cluster in ascending order.
    """
    prompts = [group.prompt_tokens for group in groups]
    pairs = []
    for j, later in enumerate(groups):
        for i in range(j):
            common = shared(i, j)
            same_media = later.media_key and groups[i].media_key == later.media_key
            if common and (2 * common >= min(prompts[i], prompts[j]) or same_media):
                pairs.append((-common, i, j))
    members = [[group] for group in range(len(groups))]
    needed = [work.prompt_tokens for work in groups]
    longest = [max(work.responses, default=0) for work in groups]
    for negative, i, j in sorted(pairs):
        a, b = members[i], members[j]
        if a is b:
            continue
        tokens, response = needed[i] + needed[j] + negative, max(longest[i], longest[j])
        if tokens + response <= budget:
            joined = sorted(a + b)
            for member in joined:
                members[member], needed[member], longest[member] = joined, tokens, response
    return [tuple(of_group) for of_group in members]
