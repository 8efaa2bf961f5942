"""Interfaces of what generates, samples and scores for a step: the policy in this process, a server, another engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from vlm_pg.errors import AnswerError
from vlm_pg.tally import Tally
from vlm_pg.types import BadSample, FinishReason, Prompt, ResponseGroup, Rollout


@dataclass(frozen=True)
class Answer:
    """Token ids of one response that a ``Generator`` sampled, the stop token included.

    ``exact``: the sampled ids, not those of its text. ``num_read``: their number before the response was cut to its
    longest allowed length. ``logprobs``: the generator's log-probabilities of the first of them, nats; None: unknown.
    ``weight_versions``: which weights sampled the first of them, one entry a token; None: unknown.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    text: str
    exact: bool
    num_read: int
    logprobs: tuple[float, ...] | None = None
    weight_versions: tuple[str, ...] | None = None


class Generator(Protocol):
    """Samples responses with weights of its own: an OpenAI-compatible server (``ServerGenerator``), or another engine.

    ``server.engine.ServerEngine`` makes a ``Sampler`` of it that scores the responses with the policy,
    ``UnscoredSampler`` one for evaluations.
    """

    stop_token_ids: tuple[int, ...]

    def generate(self, prompts: Sequence[Prompt], step: int | str) -> list[list[Answer] | AnswerError]:
        """``num_generations`` answers to every prompt, or why there are none. Calls may overlap, in several threads.

        Raises:
            SampleError: a prompt that the generator or the model does not support (``check_prompt``).
            ServerError: the generator is away, or gave no valid answer to many questions in a row.
            InterruptedError: a stop was requested.
        """

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise SampleError for a prompt that the model, or this kind of generator, does not support."""

    def take_num_retried(self) -> int:
        """Number of invalid answers that were requested again since the last call."""


def control_key(step: int) -> str:
    """Keys the seeds of a step's control groups (T-GRPO), in place of the step."""
    return f"{step}/control"


class Sampler(Protocol):
    """Samples rollouts. A sampler that subclasses this has no weights but those that train, unless it says so.

    ``scores_itself``: ``rollout_logprobs`` come from the sampling passes; elsewhere the trainer computed them.
    """

    @property
    def scores_itself(self) -> bool: ...

    def generate(self, prompts: Sequence[Prompt], step: int | str) -> list[tuple[Rollout, ...]]:
        """``num_generations`` rollouts of every prompt; none of one for which ``take_faults`` has a reason.

        Args:
            step: the optimizer step, or a name such as "eval/seen", that keys the random numbers.

        Raises:
            InterruptedError: a stop was requested.
        """

    def take_faults(self) -> list[BadSample] | None:
        """Questions since the last call that have no usable rollouts; None of a sampler that always has some."""

    def report(self, tally: Tally) -> None:
        """Add what was done since the last report, also where that is nothing."""

    def sync_weights(self, step: int) -> None:
        """Sample from the policy's present weights from now on. All ranks call this before each step."""
        return  # not abstract

    def may_start(self, step: int) -> bool:
        """Whether ``start`` may be called for this step now: its rollouts would be recent enough by then."""
        return False

    def start(self, prompts: Sequence[Prompt], step: int | str) -> None:
        """Begin to sample a later step, while the trainer updates; ``generate`` returns its rollouts."""
        raise RuntimeError("This sampler cannot sample ahead: may_start is False.")

    def release_memory(self) -> None:
        """Give memory of the device to the update; all ranks call this after each step was sampled."""
        return  # not abstract


class Scorer(Protocol):
    """Computes log-probabilities of sampled responses: the reference of a KL, the policy itself."""

    def score(self, groups: Sequence[ResponseGroup], temperature: float) -> list[list[torch.Tensor]]:
        """Per group, per response: fp32 [R] on the CPU, logits divided by ``temperature``.

        Raises:
            InterruptedError: a stop was requested.
        """
