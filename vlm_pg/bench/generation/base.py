"""What all who generate share: one model, the same prompts, the same number of new tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from vlm_pg.bench.contestants.base import ModelCase
from vlm_pg.models.policy import Policy

# New tokens -> int64 [B*G, new tokens] on the CPU; the responses to one prompt lie next to each other.
Generate = Callable[[int], torch.Tensor]
# Ids at the end of the vocabulary that no prompt has and that nobody chooses: end, media and vision tokens.
SPECIAL_IDS = 16


@dataclass(frozen=True)
class GenerationCase(ModelCase):
    """``prompts`` int64 [B, P] on the CPU; G responses of up to ``new_tokens`` tokens to each."""

    prompts: torch.Tensor
    generations: int
    new_tokens: int

    @property
    def rollouts(self) -> int:
        return len(self.prompts) * self.generations


class CannotRun(Exception):
    """This way to generate does not work with this model on this machine; the message says why."""


class Generator(Protocol):
    """One way to generate greedily."""

    name: str

    def unavailable_because(self, device: torch.device) -> str | None:
        """Why it cannot run here at all, or None."""
        ...

    def session(self, case: GenerationCase) -> AbstractContextManager[Generate]:
        """What generates the case's responses. Entering it is not timed: a training run does that once.

        Raises:
            CannotRun: on entering, or when it generates.
        """
        ...


def make_generation_case(
    policy: Policy, prefix: int, generations: int, new_tokens: int, groups: int, seed: int = 0
) -> GenerationCase:
    """Random prompts. Text stands in for visual tokens: past the tower the language model treats them alike."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(0, policy.vocab_size - SPECIAL_IDS, (groups, prefix), generator=generator)
    return GenerationCase(policy, prompts, generations, new_tokens)


@torch.no_grad()
def never_choose_special_tokens(policy: Policy) -> None:
    """Make the logits of end and media tokens 0, below the highest of so many random ones.

    So everybody generates as many tokens as asked for, and nobody has to forbid the end, which costs time per token.
    """
    policy.model.lm_head.weight[policy.vocab_size - SPECIAL_IDS :].zero_()
