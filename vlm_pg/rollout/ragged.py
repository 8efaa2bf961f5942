"""Decoding all running rollouts as rows of one batch, whatever their lengths: shapes that stay the same for many steps.

R rows, C tokens of room in each (capacity), K key-value heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vlm_pg.attention.kernels import Kernel
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.cohort import Cohort
from vlm_pg.rollout.cohort_attention import BLOCK_TOKENS, PromptPart, Prompts
from vlm_pg.rollout.delta_rule import DeltaRule, rule_of, triton_rule
from vlm_pg.rollout.fused.choice import FusedStep, fused_step, fused_unchecked
from vlm_pg.rollout.graphs import DecodeGraph, GraphMemory, GraphUse
from vlm_pg.rollout.kv import PrefixStore
from vlm_pg.rollout.linear_step import linear_attention_step_
from vlm_pg.rollout.own_states import OwnStates
from vlm_pg.rollout.settings import RolloutSettings


def row_bucket(rollouts: int) -> int:
    """Rows for so many rollouts: 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ... so that shapes are few."""
    if rollouts < 2:
        return rollouts
    power = 1 << (rollouts - 1).bit_length()
    between = power * 3 // 4
    return between if power >= 32 and rollouts <= between else power


def room_for(tokens: int, longest: int) -> int:
    """Capacity for so many own tokens: a power of two from ``BLOCK_TOKENS`` on, but no more than responses fill."""
    blocks = -(-longest // BLOCK_TOKENS)
    return min(max(BLOCK_TOKENS, 1 << (tokens - 1).bit_length()), blocks * BLOCK_TOKENS)


class OwnRows:
    """Keys and values of the tokens that rollouts have generated themselves: [R, C, K, H] per layer.

    ``lengths``: int32 [R], tokens of each row, the newest included. An idle row has one, which nobody reads.
    All tensors stay where they are until ``move``.
    """

    def __init__(self, device: torch.device):
        self.num_rows = 0
        self.capacity = BLOCK_TOKENS
        self._device = device
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._make_lengths()

    def move(self, kept: Sequence[int], num_rows: int, capacity: int) -> None:
        """The rows ``kept`` become the first ones of ``num_rows`` with this capacity; one layer at a time is copied."""
        rows = torch.tensor(kept, dtype=torch.int64).to(self._device, non_blocking=True)
        for tensors in (self._keys, self._values):
            for layer, old in tensors.items():
                new = old.new_zeros(num_rows, capacity, *old.shape[2:])
                both = min(capacity, old.shape[1])
                new[: len(kept), :both] = old[rows, :both]
                tensors[layer] = new
        self.num_rows, self.capacity = num_rows, capacity
        self._make_lengths()

    def _make_lengths(self) -> None:
        self.lengths = torch.ones(self.num_rows, dtype=torch.int32, device=self._device)
        self._running = torch.zeros_like(self.lengths)
        self._newest = torch.zeros(self.num_rows, dtype=torch.int64, device=self._device)

    def set_lengths(self, lengths: dict[int, int]) -> None:
        """Tokens of each running row so far; all others are idle."""
        rows = range(self.num_rows)
        self.lengths.copy_(torch.tensor([lengths.get(row, 1) for row in rows]), non_blocking=True)
        self._running.copy_(torch.tensor([row in lengths for row in rows]), non_blocking=True)
        self._newest.copy_(
            torch.tensor([row * self.capacity + lengths.get(row, 1) - 1 for row in rows]), non_blocking=True
        )

    def advance(self) -> None:
        """Every running row gets one more token, which every layer then writes to its ``slots``."""
        self.lengths += self._running
        self._newest += self._running

    def slots(self, layer_index: int, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys and values of all tokens, [R, C, K, H] each, and the newest one's place in each row, int64 [R] of R * C.

        ``k``: [R, K, H] of the new tokens.
        """
        for tensors in (self._keys, self._values):
            if layer_index not in tensors:
                # Zeros: what lies behind a row's length must be finite.
                tensors[layer_index] = k.new_zeros(self.num_rows, self.capacity, *k.shape[1:])
        return self._keys[layer_index], self._values[layer_index], self._newest


class RaggedContext:
    """One new token a row: one call over the rows' own tokens, and one for each level of the prompts.

    Args:
        states, rule: what linear-attention layers keep of the rows, and what replaces it; no rule where there are none.
        fused: what stores new keys and values, attends to own tokens, and merges that with prompts.
    """

    def __init__(
        self,
        own: OwnRows,
        prompts: Prompts,
        kernel: Kernel,
        states: OwnStates,
        rule: DeltaRule | None = None,
        fused: FusedStep | None = None,
    ):
        self._own, self._states, self._rule = own, states, rule
        self._prompts = prompts
        self._kernel = kernel
        self._fused = fused or FusedStep("torch")

    def attend(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """q [R, N, H], k, v [R, K, H] of the new tokens -> [R, N, H]."""
        keys, values, newest = self._own.slots(layer_index, k)
        slots = (keys.flatten(0, 1), values.flatten(0, 1))
        merging = self._prompts if self._fused.merges and isinstance(self._prompts, PromptPart) else None
        queries = None
        if turn := self._fused.deferred and self._fused.deferred.take():
            from vlm_pg.rollout.fused.rotation import rotate_append

            queries, starts = merging.queries_for(layer_index, q) if merging else (None, None)
            q = rotate_append(q, k, v, *turn, *slots, newest, queries, starts)
        else:
            for tensor, rows in zip(slots, (k, v), strict=True):
                tensor.index_copy_(0, newest, rows)
        if merging and self._fused.attends:
            from vlm_pg.rollout.fused.parts import own_attention

            out, lse = own_attention(q, keys, values, self._own.lengths, scale)
            return merging.merged_with(layer_index, q, out, lse, scale, queries)
        out, lse = self._kernel.ragged_forward(q, keys, values, self._own.lengths, scale)
        if merging:
            return merging.merged_with(layer_index, q, out[None], lse[None], scale, queries)
        merged = out.to(lse.dtype)
        self._prompts.merge_into(layer_index, q, merged, lse, scale)
        return merged.to(q.dtype)

    def mix_linear(self, layer_index: int, mixer: Any, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, D] of the new tokens -> [R, D]; the rows' states go on in place."""
        assert self._rule is not None
        return linear_attention_step_(mixer, hidden, self._states[layer_index], self._rule.step_)


@dataclass(frozen=True)
class StepOperators:
    """What a step runs on beside matrix products and attention; ``rule``: of linear-attention layers, if any."""

    fused: FusedStep
    rule: DeltaRule | None

    @classmethod
    def of(cls, policy: Policy, settings: RolloutSettings) -> StepOperators:
        """Those that run, and agree with torch's, where the policy is."""
        return cls(fused_step(policy, settings), rule_of(policy) if policy.family.linear_attention else None)

    @classmethod
    def on_cuda(cls, policy: Policy) -> StepOperators:
        """Those of a GPU on which all agree, wherever the policy is: for work that is counted and not computed."""
        return cls(fused_unchecked(policy), triton_rule() if policy.family.linear_attention else None)


class RaggedDecoder:
    """A ``Decoder`` whose rollouts are rows of one batch; its step is a CUDA graph where ``graphs`` does not say no.

    A rollout that ends leaves an idle row. Rows close up when they then fit into a smaller bucket, and when others are
    admitted; they move to larger tensors when the longest rollout has filled its room. Each of these makes a new step.

    Args:
        operators: None: those that run where the policy is.
    """

    def __init__(
        self,
        policy: Policy,
        store: PrefixStore,
        settings: RolloutSettings,
        prompts: Prompts | None = None,
        operators: StepOperators | None = None,
    ):
        operators = operators or StepOperators.of(policy, settings)
        self.graphs = GraphUse.of(policy, settings, prompts is not None)
        self._prompts = prompts
        self.fused, self._rule = operators.fused, operators.rule
        self.graphs.fused = self.fused.name if policy.device.type == "cuda" else None
        self.graphs.linear_rule = None if self._rule is None else self._rule.name
        self._memory = None if self.graphs.off_because else GraphMemory(policy.device)
        self._policy = policy
        self._store = store
        self._longest_response = settings.max_new_tokens
        self._own, self._states = OwnRows(policy.device), OwnStates(policy.device)
        self._rows: dict[Cohort, list[int]] = {}
        self._step: DecodeGraph | None = None
        self._running: torch.Tensor | None = None

    def rows_for(self, rollouts: int) -> int:
        return row_bucket(rollouts)

    def admit(self, cohort: Cohort) -> None:
        first = self._num_rollouts
        self._lay_out(first + cohort.num_rows)
        self._rows[cohort] = list(range(first, first + cohort.num_rows))
        self._states.start(self._rows[cohort], [path[-1] for path in cohort.own.paths], self._store)

    def let_go(self, cohort: Cohort, rows: Sequence[int]) -> None:
        of_cohort = self._rows[cohort]
        self._rows[cohort] = [of_cohort[row] for row in rows]
        if not rows:
            del self._rows[cohort]
        self._running = None
        if row_bucket(self._num_rollouts) != self._own.num_rows:
            self._lay_out(self._num_rollouts)

    def rows(self) -> list[tuple[int, ...]]:
        if self._longest > self._own.capacity:
            self._lay_out(self._num_rollouts)
        paths: list[tuple[int, ...]] = [()] * self._own.num_rows
        for cohort, rows in self._rows.items():
            for row, path in zip(rows, cohort.own.paths, strict=True):
                paths[row] = path
        return paths

    def step(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self._longest > self._own.capacity:
            self._lay_out(self._num_rollouts)
        if self._running is None:
            self._running = self._set_rows()
        if self._step is None:
            self._step = self._new_step()
        self._own.advance()
        steps_left = min(self._own.capacity + 1, self._longest_response) - self._longest
        return self._step.step(self._running, tokens, positions, steps_left)

    @property
    def _num_rollouts(self) -> int:
        return sum(len(rows) for rows in self._rows.values())

    @property
    def _longest(self) -> int:
        """Own tokens of the longest rollout, the one that the next step reads included."""
        return max((cohort.num_generated for cohort in self._rows), default=1)

    def _lay_out(self, rollouts: int) -> None:
        """Running rows side by side, in tensors of the size that so many rollouts need now."""
        kept = [row for rows in self._rows.values() for row in rows]
        num_rows = row_bucket(rollouts)
        self._own.move(kept, num_rows, room_for(self._longest, self._longest_response))
        if num_rows != self._states.num_rows or kept != list(range(len(kept))):
            self._states.move(kept, num_rows)
        places = iter(range(len(kept)))
        self._rows = {cohort: [next(places) for _ in rows] for cohort, rows in self._rows.items()}
        self._step = self._running = None

    def _set_rows(self) -> torch.Tensor:
        """The running rows, int64 [rollouts] in the order of the rollouts; the others become idle."""
        # The token that the step reads is not stored yet.
        lengths = {row: cohort.num_generated - 1 for cohort, rows in self._rows.items() for row in rows}
        self._own.set_lengths(lengths)
        return torch.tensor(list(lengths)).to(self._policy.device, non_blocking=True)

    def _new_step(self) -> DecodeGraph:
        prompts = self._prompts or PromptPart(self._store, self.rows(), self._policy.kernel)
        kernel = self._policy.kernel
        context = RaggedContext(self._own, prompts, kernel, self._states, self._rule, self.fused)
        rows, layers = self._own.num_rows, self.fused.deferred or self.fused.layers
        return DecodeGraph(self._policy, context, rows, self._memory, self.graphs, layers)
