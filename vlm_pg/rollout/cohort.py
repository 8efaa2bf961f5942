"""Rollouts admitted together: their tokens so far, their own keys, values and states, and which of them still run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vlm_pg.models.linear_attention import LinearStates
from vlm_pg.rollout.kv import BLOCK_TOKENS, PrefixStore
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
        seen: bool [rollouts, V], tokens that the repetition penalty counts; None without one.
        said: bool [rollouts, V], tokens that the presence penalty counts: none yet; None without one.
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
        self.own, self.hidden, self.seen, self.said = OwnTokens(paths), first_hidden, seen, said
        self.last_tokens = torch.empty(0, dtype=torch.int64)
        self.num_generated = 0
        self._positions, self._uniforms, self._rollouts = first_positions, uniforms, list(rollouts)
        self._running = [True] * len(rollouts)
        self._tokens: list[list[int]] = [[] for _ in rollouts]
        shape, device = uniforms.shape, uniforms.device
        self._records = torch.zeros(3, *shape, device=device)
        self._slots = torch.arange(shape[0], device=device)
        self._slot_of_row = list(range(shape[0]))

    @property
    def num_rows(self) -> int:
        """Rollouts that are computed: the running ones, and finished ones that have not been evicted yet."""
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
        """The tokens of a rollout so far."""
        return self._tokens[row]

    def running_rows(self) -> list[int]:
        return [row for row, running in enumerate(self._running) if running]

    def record(self, choice: Choice, place: slice, token_ids: Sequence[int]) -> None:
        """Append the next token of every row: slice ``place`` of the choice; ``token_ids`` are the same on the host."""
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
        """End a rollout."""
        self._running[row] = False
        tokens = self._tokens[row]
        logprobs, sampling, entropies = self._records[:, self._slot_of_row[row], : len(tokens)].cpu().clone()
        return FinishedRollout(*self._rollouts[row], torch.tensor(tokens), logprobs, sampling, entropies, reason)

    def let_go(self) -> None:
        """Evict finished rollouts."""
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


class OwnTokens:
    """Keys, values and states of the tokens that rollouts have generated themselves.

    Rollouts that were admitted together have equally many, ``length``, at any time: nothing is padded. Room grows in
    blocks, not to the longest length.

    Args:
        paths: for each rollout the stored nodes of its prompt, first to last.
    """

    def __init__(self, paths: Sequence[tuple[int, ...]]):
        self.paths = list(paths)
        self.length = 0
        self._keys_values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._states: dict[int, LinearStates] = {}

    def keep(self, rows: torch.Tensor) -> None:
        """Evict all rollouts but these (int64 [kept], ascending)."""
        self.paths = [self.paths[i] for i in rows.tolist()]
        # One layer at a time: no more than one exists twice.
        for layer, (k, v) in self._keys_values.items():
            self._keys_values[layer] = (k[rows], v[rows])
        for layer, states in self._states.items():
            self._states[layer] = LinearStates(states.conv_tail[rows], states.recurrent[rows])

    def append(self, layer_index: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This token's keys and values [rollouts, K, H] behind the earlier ones: [rollouts, length + 1, K, H] each."""
        own: Any = self._keys_values.get(layer_index)
        if own is None or own[0].shape[1] == self.length:
            room = k.new_empty(2, k.shape[0], BLOCK_TOKENS, *k.shape[1:]).unbind()
            own = room if own is None else tuple(torch.cat(pair, dim=1) for pair in zip(own, room, strict=True))
            self._keys_values[layer_index] = own
        end = self.length + 1
        own[0][:, self.length], own[1][:, self.length] = k, v
        return own[0][:, :end], own[1][:, :end]

    def states(self, layer_index: int, store: PrefixStore) -> LinearStates:
        """A linear-attention layer's states [rollouts, ...]; a rollout starts from its prompt's."""
        return self._states.get(layer_index) or store.read_states(layer_index, [path[-1] for path in self.paths])

    def set_states(self, layer_index: int, states: LinearStates) -> None:
        self._states[layer_index] = states
