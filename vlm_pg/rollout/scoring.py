"""Log-probabilities of responses that something else sampled, a bounded number of tokens per pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vlm_pg.distributed import SINGLE_SP_RANK, SequenceGroup
from vlm_pg.models.packing import one_by_one
from vlm_pg.models.policy import Policy
from vlm_pg.models.reference import ScoringPolicy
from vlm_pg.types import ResponseGroup, TopTokens


@dataclass(frozen=True)
class PolicyScorer:
    """Scores with the present weights of a policy, at most ``token_budget`` tokens per pass."""

    policy: ScoringPolicy
    token_budget: int
    should_stop: Callable[[], bool] = lambda: False

    @torch.no_grad()
    def score(
        self, groups: Sequence[ResponseGroup], temperature: float, sequence: SequenceGroup = SINGLE_SP_RANK
    ) -> list[list[torch.Tensor]]:
        """Per group, per response: fp32 [R] on the CPU, under the policy at ``temperature``.

        Args:
            sequence: processes that were given the same groups; each computes its share of every pass.

        Raises:
            InterruptedError: ``should_stop`` returned True before a pass.
        """
        if not self.policy.settings.share_prefix:
            alone = iter(self._score_once(one_by_one(groups), temperature, sequence))
            return [[next(alone)[0] for _ in group.responses] for group in groups]
        return self._score_once(groups, temperature, sequence)

    def _score_once(
        self, groups: Sequence[ResponseGroup], temperature: float, sequence: SequenceGroup
    ) -> list[list[Any]]:
        results: list[list[Any]] = [[] for _ in groups]
        for part in passes(groups, self.token_budget):
            if self.should_stop():
                raise InterruptedError("scoring was asked to stop")
            scored = self._of_pass([group for _, group in part], temperature, sequence)
            for (index, _), of_responses in zip(part, scored, strict=True):
                results[index].extend(of_responses)
        return results

    def _of_pass(
        self, groups: Sequence[ResponseGroup], temperature: float, sequence: SequenceGroup
    ) -> Iterator[list[Any]]:
        for logprobs in self.policy.logprobs(groups, temperature=temperature, sequence=sequence):
            yield [values.cpu() for values in logprobs]


@dataclass(frozen=True)
class TeacherScorer(PolicyScorer):
    """Scores with another model: ``score`` returns its ``top_k`` most probable tokens (``TopTokens``) on the CPU.

    ``vocabulary``: ids below it alone, which the policy has, too: sizes of a family pad one tokenizer to different
    numbers of logits. None: all.
    """

    top_k: int = 64
    vocabulary: int | None = None

    def _of_pass(
        self, groups: Sequence[ResponseGroup], temperature: float, sequence: SequenceGroup
    ) -> Iterator[list[Any]]:
        teacher = self.policy
        assert isinstance(teacher, Policy)
        # Features that prompts carry are those of the policy's tower.
        groups = [replace(group, prompt=replace(group.prompt, features=None), forwards=()) for group in groups]
        for found in teacher.top_tokens(groups, self.top_k, temperature, sequence, self.vocabulary):
            yield [TopTokens(one.token_ids.cpu(), one.logprobs.cpu()) for one in found]


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
