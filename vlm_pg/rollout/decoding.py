"""Rollouts as they are decoded: cohorts of equally many tokens, and on a CPU their steps, a dense block for each.

N query heads, K key-value heads, H head dim, D model dim, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from vlm_pg.attention.kernels import Kernel
from vlm_pg.models.linear_attention import LinearStates
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.fused.choice import FusedStep
from vlm_pg.rollout.graphs import GraphUse
from vlm_pg.rollout.kv import BLOCK_TOKENS, PrefixStore
from vlm_pg.rollout.linear_step import linear_attention_step
from vlm_pg.rollout.prefix_attention import LevelPrefixAttention, PrefixAttention
from vlm_pg.rollout.recording import StepRing
from vlm_pg.rollout.sampling import Choice
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.types import FinishReason, RecordedRows


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
    recorded: Sequence[RecordedRows] = ()


class Cohort:
    """Rollouts of one or more prompts, admitted together, so that all running ones have equally many tokens.

    Args:
        rollouts: (prompt, index among the prompt's rollouts) of each.
        paths: its prompt's stored nodes.
        first_hidden: [rollouts, D], the hidden state from which the first token is sampled.
        first_positions: int64 [rollouts], the rotary position of a response's first token.
        uniforms: float64 [rollouts, max_new_tokens] in [0, 1).
        seen: bool [rollouts, V], tokens that the repetition penalty counts; None without one.
        generated: bool [rollouts, V], tokens that the presence penalty counts: none yet; None without one.
        records: its steps are recorded for the update.
    """

    def __init__(
        self,
        rollouts: Sequence[tuple[int, int]],
        paths: Sequence[tuple[int, ...]],
        first_hidden: torch.Tensor,
        first_positions: torch.Tensor,
        uniforms: torch.Tensor,
        seen: torch.Tensor | None,
        generated: torch.Tensor | None = None,
        records: bool = False,
    ):
        self.records = records
        self.own, self.hidden, self.seen, self.generated = OwnTokens(paths), first_hidden, seen, generated
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

    def record(self, choice: Choice, rows: slice, token_ids: Sequence[int]) -> None:
        """Append the next token of every row: ``rows`` of the choice; ``token_ids`` are the same on the host."""
        self.last_tokens = choice.tokens[rows]
        values = torch.stack([choice.logprobs, choice.sampling_logprobs, choice.entropies])[:, rows]
        self._records[:, self._slots, self.num_generated] = values
        for tokens in (self.seen, self.generated):
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

    def evict_finished(self) -> None:
        rows = self.running_rows()
        running = torch.tensor(rows, dtype=torch.int64, device=self._slots.device)
        self.own.select(running)
        self.hidden, self.last_tokens = self.hidden[running], self.last_tokens[running]
        self._slots = self._slots[running]
        self.seen, self.generated = (None if x is None else x[running] for x in (self.seen, self.generated))
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

    def select(self, rows: torch.Tensor) -> None:
        """Evict all rollouts but these (int64, ascending)."""
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


class Decoder(ABC):
    """The decode steps of one ``generate`` call. Rollouts are ordered by cohort, as admitted, then by row.

    ``fused``: whether Triton kernels replace small operations. ``nbytes``: of all buffers that outlive the call.
    ``ring``: records steps for the update; None: they are not.
    """

    store: PrefixStore
    graphs: GraphUse
    fused = FusedStep("torch")
    nbytes = 0
    ring: StepRing | None = None

    def rows_for(self, rollouts: int) -> int:
        """Rows of keys and values that so many rollouts take."""
        return rollouts

    def prompt_room(self, tokens: int) -> int:
        """Tokens allocated for so many prompt tokens."""
        return tokens

    def reset(self) -> bool:
        """End a call; whether the next one may reuse the buffers and recorded steps."""
        return False

    def is_current(self) -> bool:
        """Whether weights and settings are where they were when ``reset`` was called."""
        return False

    @abstractmethod
    def admit(self, cohort: Cohort) -> None:
        """Add a cohort; the store has been rearranged for it."""

    @abstractmethod
    def retain(self, cohort: Cohort, rows: Sequence[int]) -> None:
        """Drop all but these of the cohort's rows (none: the cohort has ended); ``cohort`` has dropped its own."""

    @abstractmethod
    def rows(self) -> list[tuple[int, ...]]:
        """Rows of the next step: the stored nodes of each one's prompt, none for an idle row. ``step`` must follow."""

    @abstractmethod
    def step(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [rollouts, D] of the tokens sampled last, int64 [rollouts], at these rotary positions."""


class DecodeContext:
    """One new token for each rollout: attention to its own tokens, cohort by cohort, merged with that to its prompt.

    Args:
        owns: the rollouts, in the order of the stream.
        prompts: attention to the prompts; None: they are all in ``store``.
    """

    def __init__(
        self, store: PrefixStore, owns: Sequence[OwnTokens], kernel: Kernel, prompts: PrefixAttention | None = None
    ):
        self._store, self._owns, self._kernel = store, list(owns), kernel
        self._sizes = [len(own.paths) for own in owns]
        self.recorder: StepRing | None = None
        self.recorded = None
        self._prompts = prompts or LevelPrefixAttention(store, [path for own in owns for path in own.paths], kernel)

    def attend(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """q [rollouts, N, H], k, v [rollouts, K, H] of the new tokens -> [rollouts, N, H]."""
        of_cohorts = zip(self._owns, q.split(self._sizes), k.split(self._sizes), v.split(self._sizes), strict=True)
        parts = [
            self._kernel.dense_forward(one_q[:, None], *own.append(layer_index, one_k, one_v), scale)
            for own, one_q, one_k, one_v in of_cohorts
        ]
        lse = torch.cat([part_lse[:, :, 0] for _, part_lse in parts]).transpose(0, 1).contiguous()
        merged = torch.cat([part[:, 0] for part, _ in parts]).to(lse.dtype)
        self._prompts.merge_into(layer_index, q, merged, lse, scale)
        out = merged.to(q.dtype)
        if self.recorder is not None:
            self.recorder.attended(layer_index, out, lse)
        return out

    def mix_linear(self, layer_index: int, mixer: Any, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rollouts, D] of the new tokens -> [rollouts, D]."""
        before = [own.states(layer_index, self._store) for own in self._owns]
        tails, recurrent = [states.conv_tail for states in before], [states.recurrent for states in before]
        out, after = linear_attention_step(mixer, hidden, LinearStates(torch.cat(tails), torch.cat(recurrent)))
        parts = zip(after.conv_tail.split(self._sizes), after.recurrent.split(self._sizes), strict=True)
        for own, (tail, state) in zip(self._owns, parts, strict=True):
            # Copies where there are several: a view would keep the states of all alive.
            if len(self._owns) > 1:
                tail, state = tail.clone(), state.clone()
            own.set_states(layer_index, LinearStates(tail, state))
        return out


class CohortDecoder(Decoder):
    """One dense block of own keys and values, and one attention call, for each cohort."""

    def __init__(
        self, policy: Policy, store: PrefixStore, settings: RolloutSettings, prompts: PrefixAttention | None = None
    ):
        self.graphs = GraphUse.of(policy, settings, prompts is not None)
        self._policy, self.store, self._prompts = policy, store, prompts
        self._cohorts: list[Cohort] = []
        self._context: DecodeContext | None = None

    def admit(self, cohort: Cohort) -> None:
        self._cohorts.append(cohort)
        self._context = None

    def retain(self, cohort: Cohort, rows: Sequence[int]) -> None:
        if not rows:
            self._cohorts.remove(cohort)
        if self.ring is not None:
            self.ring.retain(cohort, rows)
        self._context = None

    def rows(self) -> list[tuple[int, ...]]:
        return [path for cohort in self._cohorts for path in cohort.own.paths]

    def step(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        owns = [cohort.own for cohort in self._cohorts]
        if self._context is None:
            self._context = DecodeContext(self.store, owns, self._policy.kernel, self._prompts)
            if self.ring is not None:
                self._context.recorder = self.ring
                ends = list(accumulate(cohort.num_rows for cohort in self._cohorts))
                rows = {one: range(end - one.num_rows, end) for one, end in zip(self._cohorts, ends, strict=True)}
                self.ring.lay_out(rows, len(tokens))
        if self.ring is not None:
            self.ring.next_step()
        hidden = self._policy.hidden_states(tokens, positions.expand(3, -1), self._context)
        for own in owns:
            own.length += 1
        return hidden
