"""Decoding all running rollouts as rows of one ragged batch, with shapes that stay the same for many steps.

R rows, C tokens of room in each (capacity), N query heads, K key-value heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from vlm_pg.attention.kernels import Kernel
from vlm_pg.memory import gpu_bytes
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.decoding import Cohort, CohortDecoder, Decoder
from vlm_pg.rollout.fused.choice import FusedStep, fused_step, fused_unchecked
from vlm_pg.rollout.graphs import DecodeGraph, GraphMemory, GraphUse
from vlm_pg.rollout.kv import BLOCK_TOKENS, PrefixStore, store_room
from vlm_pg.rollout.linear_step import DeltaRule, RowStates, linear_attention_step_, rule_of, triton_rule
from vlm_pg.rollout.merged import adapter_state
from vlm_pg.rollout.prefix_attention import PrefixAttention, SplitPrefixAttention
from vlm_pg.rollout.recording import StepRing
from vlm_pg.rollout.settings import RolloutSettings

# Room of a row at first, and from how many rows on idle ones cost enough (states of linear-attention layers, routes of
# a mixture) to have fewer: a dense layer takes as long for 8 rows as for one.
FIRST_ROOM = 512
MANY_ROWS = 32
# Recorded steps that are cached, some MB each.
MOST_STEPS = 8


def row_bucket(rollouts: int) -> int:
    """Rows for so many rollouts: 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ... so that shapes are few."""
    if rollouts < 2:
        return rollouts
    power = 1 << (rollouts - 1).bit_length()
    between = power * 3 // 4
    return between if power >= 32 and rollouts <= between else power


def room_for(tokens: int, longest: int) -> int:
    """Capacity for so many own tokens: 512, four times as many, ..., but no more than the longest response fills."""
    capacity = FIRST_ROOM
    while capacity < tokens:
        capacity *= 4
    return min(capacity, -(-longest // BLOCK_TOKENS) * BLOCK_TOKENS)


def reusable_bytes(device: torch.device) -> int:
    """Most bytes of buffers that stay on a GPU from one call to the next, so that recorded steps can be replayed."""
    return (gpu_bytes(device) or 0) // 32


class OwnRows:
    """Keys and values of the tokens that rollouts have generated themselves: [R, C, K, H] per layer.

    ``lengths``: int32 [R], tokens of each row, the newest included. An idle row has one, which is never read.
    Other numbers of rows and capacities are other views of the same memory, until that is too small.

    Args:
        like: of each layer the prompts' keys [tokens, K, H], there when rows are first laid out.
    """

    def __init__(self, device: torch.device, like: Mapping[int, torch.Tensor]):
        self._like, self._device = like, device
        self.num_rows = self.capacity = 0
        self._room = 0  # tokens of all rows together
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._make_tables(0)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self._keys.values(), *self._values.values()))

    def clear(self) -> None:
        """Zero all rows: keys beyond a row's length have no weight in attention, unless they are NaN."""
        for flat in (*self._keys.values(), *self._values.values()):
            flat.zero_()

    def move(self, rows: Sequence[int], num_rows: int, capacity: int) -> bool:
        """These rows become the first ones of ``num_rows`` with this capacity; one layer at a time is copied.

        Returns whether addresses have changed.
        """
        moves = num_rows * capacity > self._room or num_rows > len(self._tables[0])
        unchanged = not moves and capacity == self.capacity and list(rows) == list(range(len(rows)))
        room = max(self._room, num_rows * capacity)
        sources = _sent(rows, self._device)
        for tensors in (self._keys, self._values):
            for layer, flat in {} if unchanged else tensors.items():
                both = min(capacity, self.capacity)
                found = self._view(flat, self.num_rows, self.capacity)[sources, :both]
                tensors[layer] = flat.new_zeros(room, *flat.shape[1:]) if moves else flat
                self._view(tensors[layer], num_rows, capacity)[: len(rows), :both] = found
            # Zeros: what lies behind a row's length must be finite. Not made in a capture, whose memory is that of the
            # next one's intermediate results.
            for layer, keys in self._like.items():
                if layer not in tensors:
                    tensors[layer] = keys.new_zeros(room, *keys.shape[1:])
        self.num_rows, self.capacity, self._room = num_rows, capacity, room
        if moves:
            self._make_tables(max(num_rows, len(self._tables[0])))
        self.lengths, self._running, self._newest = (table[:num_rows] for table in self._tables)
        return moves

    def _make_tables(self, rows: int) -> None:
        kinds = (torch.int32, torch.int32, torch.int64)
        self._tables = [torch.zeros(rows, dtype=kind, device=self._device) for kind in kinds]
        self.lengths, self._running, self._newest = self._tables

    @staticmethod
    def _view(flat: torch.Tensor, num_rows: int, capacity: int) -> torch.Tensor:
        return flat[: num_rows * capacity].unflatten(0, (num_rows, capacity))

    def set_lengths(self, lengths: dict[int, int]) -> None:
        """Tokens of each running row so far; all others are idle."""
        rows = range(self.num_rows)
        newest = [row * self.capacity + lengths.get(row, 1) - 1 for row in rows]
        values = [lengths.get(row, 1) for row in rows], [row in lengths for row in rows], newest
        for table, numbers in zip((self.lengths, self._running, self._newest), values, strict=True):
            table.copy_(torch.tensor(numbers), non_blocking=True)

    def advance(self) -> None:
        """Every running row gets one more token, which every layer then writes to its ``slots``."""
        self.lengths += self._running
        self._newest += self._running

    def slots(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys and values of all tokens, [R, C, K, H] each, and where the newest go: int64 [R], of R * C."""
        keys, values = (
            self._view(tensors[layer_index], self.num_rows, self.capacity) for tensors in (self._keys, self._values)
        )
        return keys, values, self._newest


class OwnStates:
    """``RowStates`` of all layers. Fewer rows are a view of the same memory; more move to another address.

    An idle row steps on from its last state: it is never read, rows do not mix, and the rule keeps it finite (keys have
    length 1, decay and learning rate lie between 0 and 1, so a state never grows).
    """

    def __init__(self, device: torch.device) -> None:
        self.num_rows = 0
        self._device = device
        self._layers: dict[int, RowStates] = {}

    def __getitem__(self, layer_index: int) -> RowStates:
        of_layer = self._layers[layer_index]
        return RowStates(of_layer.inputs[: self.num_rows], of_layer.recurrent[: self.num_rows])

    @property
    def nbytes(self) -> int:
        return sum(layer.inputs.nbytes + layer.recurrent.nbytes for layer in self._layers.values())

    def move(self, rows: Sequence[int], num_rows: int) -> bool:
        """These rows become the first ones of ``num_rows``; one layer is copied at a time.

        Returns whether addresses have changed.
        """
        self.num_rows = num_rows
        if not self._layers:
            return False
        room = max(len(next(iter(self._layers.values())).inputs), num_rows)
        moves = any(len(layer.inputs) < num_rows for layer in self._layers.values())
        if not moves and list(rows) == list(range(len(rows))):
            return False
        sources = _sent(rows, self._device)
        for layer, old in self._layers.items():
            parts = []
            for part in (old.inputs, old.recurrent):
                found = part[sources]
                parts.append(part if len(part) == room else part.new_zeros(room, *part.shape[1:]))
                parts[-1][: len(rows)] = found
            self._layers[layer] = RowStates(*parts)
        return moves

    def start(self, rows: Sequence[int], nodes: Sequence[int], store: PrefixStore) -> None:
        """These rows begin behind the last tokens of these nodes, one node a row."""
        readers: dict[int, list[int]] = {}
        for row, node in zip(rows, nodes, strict=True):
            readers.setdefault(node, []).append(row)
        if not store.states:
            return
        # All in one copy, whatever the number of layers and nodes.
        sent = _sent([row for reading in readers.values() for row in reading], self._device)
        of_nodes = dict(zip(readers, sent.split([len(reading) for reading in readers.values()]), strict=True))
        for layer, states in store.states.items():
            for node, at in of_nodes.items():
                parts = states[node].conv_tail.transpose(1, 2), states[node].recurrent
                if layer not in self._layers:
                    self._layers[layer] = RowStates(*(x.new_zeros(self.num_rows, *x.shape[1:]) for x in parts))
                of_layer = self._layers[layer]
                of_layer.inputs[at], of_layer.recurrent[at] = parts


def _sent(rows: Sequence[int], device: torch.device) -> torch.Tensor:
    """Row numbers int64 on the device, without waiting for the transfer."""
    return torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)


class RaggedContext:
    """One new token a row: one call over the rows' own tokens, and one for each level of the prompts.

    Args:
        states, rule: what linear-attention layers keep of the rows, and what replaces it; no rule where there are none.
        fused: what stores new keys and values, attends to own tokens, and merges that with prompts.
    """

    recorded = None

    def __init__(
        self,
        own: OwnRows,
        prompts: PrefixAttention,
        kernel: Kernel,
        states: OwnStates,
        rule: DeltaRule | None = None,
        fused: FusedStep | None = None,
    ):
        self.recorder: StepRing | None = None
        self._own, self._states, self._rule, self._prompts, self._kernel = own, states, rule, prompts, kernel
        self._fused = fused or FusedStep("torch")

    def attend(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """q [R, N, H], k, v [R, K, H] of the new tokens -> [R, N, H]."""
        keys, values, newest = self._own.slots(layer_index)
        slots = (keys.flatten(0, 1), values.flatten(0, 1))
        merging = self._prompts if self._fused.merges and isinstance(self._prompts, SplitPrefixAttention) else None
        queries = None
        if rotation := self._fused.deferred and self._fused.deferred.take():
            from vlm_pg.rollout.fused.rotation import rotate_append

            queries, starts = merging.queries_for(q) if merging else (None, None)
            q = rotate_append(q, k, v, *rotation, *slots, newest, queries, starts)
        else:
            for tensor, rows in zip(slots, (k, v), strict=True):
                tensor.index_copy_(0, newest, rows)
        if merging and self._fused.attends:
            from vlm_pg.rollout.fused.attention import own_attention

            out, lse = own_attention(q, keys, values, self._own.lengths, scale)
        else:
            out, lse = self._kernel.ragged_forward(q, keys, values, self._own.lengths, scale)
            out, lse = (out[None], lse[None]) if merging else (out, lse)
        if merging:
            out, lse = merging.merged_with(layer_index, q, out, lse, scale, queries)
        else:
            merged = out.to(lse.dtype)
            self._prompts.merge_into(layer_index, q, merged, lse, scale)
            out = merged.to(q.dtype)
        if self.recorder is not None:
            self.recorder.attended(layer_index, out, lse)
        return out

    def mix_linear(self, layer_index: int, mixer: Any, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, D] of the new tokens -> [R, D]; the rows' states are replaced in place."""
        assert self._rule is not None
        return linear_attention_step_(mixer, hidden, self._states[layer_index], self._rule.step_)


@dataclass(frozen=True)
class StepOperators:
    """Operators of a step beside matrix products and attention; ``rule``: of linear-attention layers, if any."""

    fused: FusedStep
    rule: DeltaRule | None

    @classmethod
    def on_cuda(cls, policy: Policy) -> StepOperators:
        """Those of a GPU on which all agree, whatever the policy's device: for work that is counted, not computed."""
        return cls(fused_unchecked(policy), triton_rule() if policy.family.linear_attention else None)


class RaggedDecoder(Decoder):
    """Rollouts are rows of one batch; the step is a CUDA graph unless ``graphs.off_because``.

    A rollout that ends leaves an idle row, which the next to be admitted take. Rows become more when these are too few,
    and fewer when three quarters of many are idle; their room grows fourfold when the longest rollout has filled it. A
    step is recorded once for each number of rows, room and size of the prompts' tables, and replayed whenever they
    come again, in later ``generate`` calls too: weights are updated where they lie.

    Args:
        operators: None: those that run on the policy's device and agree with torch's.
    """

    def __init__(
        self,
        policy: Policy,
        store: PrefixStore,
        settings: RolloutSettings,
        prompts: PrefixAttention | None = None,
        operators: StepOperators | None = None,
    ):
        if operators is None:
            rule = rule_of(policy) if policy.family.linear_attention else None
            operators = StepOperators(fused_step(policy, settings), rule)
        self.graphs = GraphUse.of(policy, settings, prompts is not None)
        self.fused, self._rule = operators.fused, operators.rule
        self.graphs.fused = self.fused.name if policy.device.type == "cuda" else None
        self.graphs.linear_rule = None if self._rule is None else self._rule.name
        self._memory = None if self.graphs.off_because else GraphMemory(policy.device)
        self._policy, self.store = policy, store
        store.fixed = self._memory is not None
        self._settings, self._longest_response = settings, settings.max_new_tokens
        self._own, self._states = OwnRows(policy.device, store.keys), OwnStates(policy.device)
        self._split: SplitPrefixAttention | None = None
        if prompts is None:
            heads = policy.family.head_shape(policy.model.config)[:2]
            prompts = self._split = SplitPrefixAttention(store, policy.kernel, heads, policy.device)
        self._context = RaggedContext(self._own, prompts, policy.kernel, self._states, self._rule, self.fused)
        self._rows: dict[Cohort, list[int]] = {}
        self._steps: dict[tuple[int, ...], DecodeGraph] = {}
        self._step: DecodeGraph | None = None
        self._running: torch.Tensor | None = None
        self._weights = self._addresses()

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        ring = 0 if self.ring is None else self.ring.nbytes
        return self.store.nbytes + self._own.nbytes + self._states.nbytes + ring

    def reset(self) -> bool:
        if self._memory is None or self.nbytes > reusable_bytes(self._policy.device):
            return False
        self.store.rearrange((), {})
        self._own.clear()
        self._rows.clear()
        if self.ring is not None:
            self.ring.clear()
        self.graphs = replace(self.graphs, captures=0, replays=0, eager_steps=0)
        self._step = self._running = None
        return True

    def is_current(self) -> bool:
        because = GraphUse.of(self._policy, self._settings).off_because
        return because == self.graphs.off_because and self._weights == self._addresses()

    def _addresses(self) -> list[Any]:
        """Addresses of the weights that a recorded step reads, and the state of its adapters."""
        if self._memory is None:
            return []
        model = self._policy.model
        weights = (*model.parameters(), *model.buffers())
        return [0 if isinstance(x, FakeTensor) else x.data_ptr() for x in weights] + adapter_state(model)

    def rows_for(self, rollouts: int) -> int:
        return max(row_bucket(rollouts), self._own.num_rows if self._rows else 0)

    def prompt_room(self, tokens: int) -> int:
        return store_room(tokens) if self.store.fixed else tokens

    def admit(self, cohort: Cohort) -> None:
        running, new = self._num_rollouts, cohort.num_rows
        if not running or running + new > self._own.num_rows:
            self._lay_out(row_bucket(running + new))
        taken = {row for rows in self._rows.values() for row in rows}
        free = [row for row in range(self._own.num_rows) if row not in taken]
        self._rows[cohort] = free[:new]
        if self.ring is not None:
            self.ring.admit(cohort, free[:new])
        self._states.start(self._rows[cohort], [path[-1] for path in cohort.own.paths], self.store)
        self._step = self._running = None

    def retain(self, cohort: Cohort, rows: Sequence[int]) -> None:
        of_cohort = self._rows[cohort]
        self._rows[cohort] = [of_cohort[row] for row in rows]
        if self.ring is not None:
            self.ring.retain(cohort, rows)
        if not rows:
            del self._rows[cohort]
        self._running = None
        if self._own.num_rows >= MANY_ROWS and 0 < 4 * self._num_rollouts <= self._own.num_rows:
            self._lay_out(row_bucket(self._num_rollouts))

    def rows(self) -> list[tuple[int, ...]]:
        self._make_room()
        paths: list[tuple[int, ...]] = [()] * self._own.num_rows
        for cohort, rows in self._rows.items():
            for row, path in zip(rows, cohort.own.paths, strict=True):
                paths[row] = path
        return paths

    def step(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self._make_room()
        if self._running is None:
            # In the order of the rollouts; other rows become idle. The token that the step reads is not stored yet.
            lengths = {row: cohort.num_generated - 1 for cohort, rows in self._rows.items() for row in rows}
            self._own.set_lengths(lengths)
            self._running = _sent(list(lengths), self._policy.device)
        if self._step is None:
            self._step = self._step_here()
        if self.ring is not None:
            self.ring.next_step()
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

    def _make_room(self) -> None:
        """Grow the capacity to the longest rollout; rows keep their numbers."""
        if self._longest > self._own.capacity:
            self._move(range(self._own.num_rows), self._own.num_rows)

    def _move(self, rows: Sequence[int], num_rows: int) -> None:
        capacity = max(self._own.capacity, room_for(self._longest, self._longest_response))
        moved = self._own.move(rows, num_rows, capacity)
        if self._states.move(rows, num_rows) or moved:
            self._steps.clear()
        self._step = self._running = None

    def _lay_out(self, num_rows: int) -> None:
        """Move running rows to the front of ``num_rows``."""
        self._move([row for rows in self._rows.values() for row in rows], num_rows)
        front = iter(range(num_rows))
        self._rows = {cohort: [next(front) for _ in rows] for cohort, rows in self._rows.items()}
        self._context.recorder = self.ring
        if self.ring is not None and self.ring.lay_out(self._rows, num_rows, in_place=True):
            self._steps.clear()

    def _step_here(self) -> DecodeGraph:
        """The step for the current layout: one that was recorded for it, or a new one."""
        tables = () if self._split is None else self._split.arrange(self.rows())
        key = (self._own.num_rows, self._own.capacity, self.store.reallocations, *tables)
        if key not in self._steps:
            if len(self._steps) == MOST_STEPS:
                del self._steps[next(iter(self._steps))]
            layers = self.fused.deferred or self.fused.layers
            self._steps[key] = DecodeGraph(
                self._policy, self._context, self._own.num_rows, self._memory, self.graphs, layers
            )
        self._steps[key] = step = self._steps.pop(key)  # the last that was used
        step.use = self.graphs
        return step


def decoder_for(
    policy: Policy, store: PrefixStore, settings: RolloutSettings, prompts: PrefixAttention | None = None
) -> Decoder:
    """On CUDA few large calls win, and the ragged batch makes them; on a CPU dense blocks do.

    Args:
        prompts: attention to the prompts; None: they are all in ``store``.
    """
    if policy.device.type == "cuda":
        return RaggedDecoder(policy, store, settings, prompts)
    return CohortDecoder(policy, store, settings, prompts)
