"""Interfaces of what samples and scores for a step: the policy in this process, or a server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from vlm_pg.tally import Tally
from vlm_pg.types import BadSample, Prompt, ResponseGroup, Rollout


class Sampler(Protocol):
    """Samples rollouts.

    ``scores_itself``: ``rollout_logprobs`` come from the sampling passes; elsewhere the trainer computed them.
    """

    scores_itself: bool

    def generate(self, prompts: Sequence[Prompt], step: int | str) -> list[tuple[Rollout, ...]]:
        """``num_generations`` rollouts of every prompt; none of one for which ``take_faults`` has a reason.

        Args:
            step: the optimizer step, or a name such as "eval/seen", that keys the random numbers.

        Raises:
            InterruptedError: a stop was asked for.
        """
        ...

    def take_faults(self) -> list[BadSample] | None:
        """Questions since the last call that have no usable rollouts; None of a sampler that always has some."""
        ...

    def report(self, tally: Tally) -> None:
        """Add what was done since the last report, also where that is nothing."""
        ...

    def use_checkpoint(self, checkpoint: Path) -> None:
        """The present policy is saved in this folder; for samplers with weights of their own."""
        ...


class Scorer(Protocol):
    """Computes log-probabilities of sampled responses: the reference of a KL, the policy itself."""

    def score(self, groups: Sequence[ResponseGroup], temperature: float) -> list[list[torch.Tensor]]:
        """Per group, per response: fp32 [R] on the CPU, logits divided by ``temperature``.

        Raises:
            InterruptedError: a stop was asked for.
        """
        ...
