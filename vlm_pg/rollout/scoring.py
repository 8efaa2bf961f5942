"""Log-probabilities of responses that something else sampled, a bounded number of tokens per pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from vlm_pg.models.packing import one_by_one
from vlm_pg.models.policy import Policy
from vlm_pg.types import ResponseGroup


@torch.no_grad()
def score(
    policy: Policy,
    groups: Sequence[ResponseGroup],
    temperature: float,
    token_budget: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[list[torch.Tensor]]:
    """Per group, per response: fp32 [R] on the CPU, under the policy at ``temperature``.

    Raises:
        InterruptedError: ``should_stop`` said so before a pass.
    """
    if not policy.settings.share_prefix:
        alone = iter(_score_once(policy, one_by_one(groups), temperature, token_budget, should_stop))
        return [[next(alone)[0] for _ in group.responses] for group in groups]
    return _score_once(policy, groups, temperature, token_budget, should_stop)


def _score_once(
    policy: Policy,
    groups: Sequence[ResponseGroup],
    temperature: float,
    token_budget: int,
    should_stop: Callable[[], bool],
) -> list[list[torch.Tensor]]:
    results: list[list[torch.Tensor]] = [[] for _ in groups]
    for part in passes(groups, token_budget):
        if should_stop():
            raise InterruptedError("scoring was asked to stop")
        scored = policy.logprobs([group for _, group in part], temperature=temperature)
        for (index, _), logprobs in zip(part, scored, strict=True):
            results[index].extend(values.cpu() for values in logprobs)
    return results


def passes(groups: Sequence[ResponseGroup], token_budget: int) -> Iterator[list[tuple[int, ResponseGroup]]]:
    """(number of the group, some of its responses in order), of at most ``token_budget`` tokens a pass.

    A prompt with a single response is never cut, whatever its length.
    """
    part: list[tuple[int, ResponseGroup]] = []
    used = 0
    for index, group in enumerate(groups):
        chosen: list[torch.Tensor] = []
        needed = group.prompt.num_tokens
        for response in group.responses:
            if (part or chosen) and used + needed + len(response) > token_budget:
                if chosen:
                    part.append((index, ResponseGroup(group.prompt, tuple(chosen))))
                yield part
                part, chosen, used, needed = [], [], 0, group.prompt.num_tokens
            chosen.append(response)
            needed += len(response)
        part.append((index, ResponseGroup(group.prompt, tuple(chosen))))
        used += needed
    if part:
        yield part
