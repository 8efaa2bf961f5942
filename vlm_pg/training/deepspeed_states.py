"""DeepSpeed's optimizer states by the weights' names.

Stages 1 and 2 divide all weights, one after the other, into equal parts: ``_hp_mapping`` says which piece of a weight
lies where in this rank's part. Stage 3 divides each weight. DeepSpeed's own way between layouts, universal checkpoints,
turns a whole checkpoint into files of pickles first, on one host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from vlm_pg.models.weights import whole_shape
from vlm_pg.training.optimizer_states import Kind, OptimizerStates, StateSlice, adam_state


class _DeepSpeedStates(OptimizerStates):
    def __init__(self, engine: Any, trained: Mapping[str, torch.nn.Parameter], masters: bool):
        self._engine, self._zero, self._trained, self.masters = engine, engine.optimizer, trained, masters
        self.shapes = {name: whole_shape(weight) for name, weight in trained.items()}
        # DeepSpeed's AdamW for CPUs counts with ints.
        self._whole_steps = not isinstance(self._adam, torch.optim.AdamW)

    @property
    def _adam(self) -> Any:
        return self._zero.optimizer

    @property
    def updates(self) -> int:
        states = [self._adam.state.get(flat, {}) for flat in self._flats()]
        return max((int(state.get("step", 0)) for state in states), default=0)

    def slices(self) -> Iterator[StateSlice]:
        return self._pieces(self.updates, fill=False)

    def blank(self, updates: int) -> Iterator[StateSlice]:
        self._engine.global_steps = updates
        self._engine.global_samples = updates * self._engine.train_batch_size()
        return self._pieces(updates, fill=True)

    def _flats(self) -> list[torch.Tensor]:
        """This rank's fp32 weights, as the optimizer knows them: flat, many weights in one tensor."""
        raise NotImplementedError

    def _pieces(self, updates: int, fill: bool) -> Iterator[StateSlice]:
        raise NotImplementedError

    def _begin(self, flat: torch.Tensor, updates: int) -> None:
        if updates:
            self._adam.state[flat] = adam_state(flat, updates, self._whole_steps)


class DividedTogether(_DeepSpeedStates):
    """Stages 1 and 2."""

    def _flats(self) -> list[torch.Tensor]:
        # Of its optimizer for stage 1 in bf16, and of its optimizer for all else.
        of_bf16 = getattr(self._zero, "fp32_groups_flat_partition", None)
        return self._zero.single_partition_of_fp32_groups if of_bf16 is None else of_bf16

    def _pieces(self, updates: int, fill: bool) -> Iterator[StateSlice]:
        if fill:
            for flat in self._flats():
                self._begin(flat, updates)
            if updates:
                link_states(self._zero)
        for name, weight in self._trained.items():
            mapping = weight._hp_mapping  # type: ignore[attr-defined]
            if mapping is None:
                continue
            for kind in self.kinds(updates):
                part = mapping.get_hp_fragment(None if kind == "master" else kind)
                yield StateSlice(name, kind, mapping.lp_fragment_address.start, part.detach())


def link_states(zero: Any) -> None:
    """Stages 1 and 2: DeepSpeed tells weights where their states lie, as it does after its first step."""
    if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


class DividedEach(_DeepSpeedStates):
    """Stage 3, states in memory or on NVMe, from where one group of weights at a time is fetched."""

    def _flats(self) -> list[torch.Tensor]:
        return self._zero.fp32_partitioned_groups_flat

    def _pieces(self, updates: int, fill: bool) -> Iterator[StateSlice]:
        names = {id(weight): name for name, weight in self._trained.items()}
        for group, (flat, weights) in enumerate(zip(self._flats(), self._zero.fp16_groups, strict=True)):
            on_nvme = self._zero._swappable_optimizer_subgroup(group)
            if on_nvme:
                self._zero._optimizer_states_and_gradient_swap_in(group)
            if fill:
                self._begin(flat, updates)
            for weight in weights:
                yield from self._of_weight(names[id(weight)], weight, flat, updates)
            if on_nvme and fill:
                self._zero._optimizer_states_and_gradient_swap_out(group)
            elif on_nvme:
                self._zero._release_swap_buffers(group)

    def _of_weight(self, name: str, weight: Any, flat: torch.Tensor, updates: int) -> Iterator[StateSlice]:
        _, offset, size = self._zero.grad_position[self._zero.get_param_id(weight)]
        first = self._zero._get_param_partition_rank(weight) * size
        # The last ranks' parts end in padding, or are nothing else.
        count = min(size, weight.ds_numel - first)
        for kind in self.kinds(updates) if count > 0 else ():
            state = self._state(flat, kind)
            yield StateSlice(name, kind, first, state[offset : offset + count])

    def _state(self, flat: torch.Tensor, kind: Kind) -> torch.Tensor:
        return flat.detach() if kind == "master" else self._adam.state[flat][kind]
