"""Rollouts that started together: what they have said so far, and which of them still run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vlm_pg.rollout.cohort_attention import OwnTokens
from vlm_pg.rollout.sampling import Choice
from vlm_pg.types import FinishReason


@dataclass(frozen=True)
class FinishedRollout:
    """A rollout as it left its cohort, on the CPU: tensors [R]."""

    prompt: int
    index: int
    token_ids: torch.Tensor
    logprobs: torch.Tensor
    sampling_logprobs: torch.Tensor
    entropies: torch.Tensor
    finish_reason: FinishReason


class Cohort:
    """Rollouts of one or more prompts, admitted together, so that all running ones have equally many tokens.

    Args:
        rollouts: (prompt, index among the prompt's rollouts) of each.
        paths: its prompt's stored nodes.
        first_hidden: [rollouts, D], the hidden state from which the first token is sampled.
        first_positions: int64 [rollouts], the rotary position of a response's first token.
        uniforms: float64 [rollouts, max_new_tokens] in [0, 1).
        seen: bool [rollouts, V], tokens that repetition penalties count; None where there is no penalty.
        said: bool [rollouts, V], tokens that presence penalties count: none yet; None where there is no penalty.
    """

    def __init__(
        self,
        rollouts: Sequence[tuple[int, int]],
        paths: Sequence[tuple[int, ...]],
        first_hidden: torch.Tensor,
        first_positions: torch.Tensor,
        uniforms: torch.Tensor,
        seen: torch.Tensor | None,
        said: torch.Tensor | None = None,
    ):
        self.own = OwnTokens(paths)
        self.hidden = first_hidden
        self.last_tokens = torch.empty(0, dtype=torch.int64)
        self.seen, self.said = seen, said
        self.num_generated = 0
        self._positions = first_positions
        self._uniforms = uniforms
        self._rollouts = list(rollouts)
        self._running = [True] * len(rollouts)
        self._tokens: list[list[int]] = [[] for _ in rollouts]
        shape, device = uniforms.shape, uniforms.device
        self._records = torch.zeros(3, *shape, device=device)
        self._slots = torch.arange(shape[0], device=device)
        self._slot_of_row = list(range(shape[0]))

    @property
    def num_rows(self) -> int:
        """Rollouts that are computed: the running ones, and finished ones that have not been let go yet."""
        return len(self._rollouts)

    @property
    def num_running(self) -> int:
        return sum(self._running)

    @property
    def uniform(self) -> torch.Tensor:
        """float64 [rows] for the next token."""
        return self._uniforms[self._slots, self.num_generated]

    @property
    def positions(self) -> torch.Tensor:
        """int64 [rows], rotary position of the token sampled last."""
        return self._positions[self._slots] + (self.num_generated - 1)

    def tokens_of(self, row: int) -> list[int]:
        """What a rollout has said so far."""
        return self._tokens[row]

    def running_rows(self) -> list[int]:
        return [row for row, running in enumerate(self._running) if running]

    def record(self, choice: Choice, place: slice, token_ids: Sequence[int]) -> None:
        """The next token of every row: what lies at ``place`` of the choice; ``token_ids`` are the same on the host."""
        self.last_tokens = choice.tokens[place]
        values = torch.stack([choice.logprobs, choice.sampling_logprobs, choice.entropies])[:, place]
        self._records[:, self._slots, self.num_generated] = values
        for tokens in (self.seen, self.said):
            if tokens is not None:
                tokens[torch.arange(self.num_rows, device=tokens.device), self.last_tokens] = True
        for row in self.running_rows():
            self._tokens[row].append(token_ids[row])
        self.num_generated += 1

    def finish(self, row: int, reason: FinishReason) -> FinishedRollout:
        """This rollout has said everything."""
        self._running[row] = False
        tokens = self._tokens[row]
        logprobs, sampling, entropies = self._records[:, self._slot_of_row[row], : len(tokens)].cpu().clone()
        return FinishedRollout(*self._rollouts[row], torch.tensor(tokens), logprobs, sampling, entropies, reason)

    def let_go(self) -> None:
        """Leave finished rollouts behind."""
        rows = self.running_rows()
        kept = torch.tensor(rows, dtype=torch.int64, device=self._slots.device)
        self.own.keep(kept)
        self.hidden, self.last_tokens = self.hidden[kept], self.last_tokens[kept]
        self._slots = self._slots[kept]
        self.seen, self.said = (None if tokens is None else tokens[kept] for tokens in (self.seen, self.said))
        self._slot_of_row = [self._slot_of_row[row] for row in rows]
        self._rollouts = [self._rollouts[row] for row in rows]
        self._tokens = [self._tokens[row] for row in rows]
        self._running = [True] * len(rows)
