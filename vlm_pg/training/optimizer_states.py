"""What AdamW keeps of each weight, as the slices that one rank holds; and those of torch's own AdamW.

Names, not places, say what a slice is of: the weight's name, the kind of state, the first element in the flattened
weight. So what one layout has written another can read (``state_files.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from vlm_pg.distributed import RankLayout

Kind = Literal["master", "exp_avg", "exp_avg_sq"]
MOMENTS: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StateSlice:
    """Elements ``first`` and following of the flattened state of one weight; ``values`` [n] is a view of it, fp32."""

    weight: str
    kind: Kind
    first: int
    values: torch.Tensor


class OptimizerStates(ABC):
    """The states of all trained weights, of which this rank holds some or all.

    ``shapes``: name -> shape of each whole weight. ``masters``: whether weights have an fp32 copy that takes updates.
    """

    shapes: Mapping[str, tuple[int, ...]]
    masters: bool

    @property
    @abstractmethod
    def updates(self) -> int:
        """AdamW's step; before the first update there are no moments."""

    @abstractmethod
    def slices(self) -> Iterator[StateSlice]:
        """What this rank writes: all ranks together everything."""

    @abstractmethod
    def blank(self, updates: int) -> Iterator[StateSlice]:
        """What this rank needs, to be filled before the next one is taken: as after so many updates, moments zero."""

    def kinds(self, updates: int) -> Sequence[Kind]:
        """What there is of each weight after so many updates."""
        return (*(("master",) if self.masters else ()), *(MOMENTS if updates else ()))


def adam_state(like: torch.Tensor, updates: int, whole_steps: bool = False) -> dict[str, torch.Tensor | int]:
    """As AdamW itself makes it. ``whole_steps``: the step is an int, as DeepSpeed's AdamW for CPUs has it."""
    state: dict[str, torch.Tensor | int] = {kind: torch.zeros_like(like, requires_grad=False) for kind in MOMENTS}
    return state | {"step": updates if whole_steps else torch.tensor(float(updates), dtype=torch.float32)}


class TorchStates(OptimizerStates):
    """Of torch's AdamW over ``trained`` (name -> the tensor that takes updates), whole and alike on every rank."""

    def __init__(
        self,
        trained: Mapping[str, torch.Tensor],
        optimizer: torch.optim.Optimizer,
        masters: bool,
        ranks: RankLayout,
    ):
        self._trained, self._optimizer, self.masters, self._ranks = trained, optimizer, masters, ranks
        self.shapes = {name: tuple(weight.shape) for name, weight in trained.items()}

    @property
    def updates(self) -> int:
        states = [self._optimizer.state.get(weight, {}) for weight in self._trained.values()]
        return max((int(state.get("step", 0)) for state in states), default=0)

    def slices(self) -> Iterator[StateSlice]:
        """An equal share of every weight: all ranks have the same."""
        rank, of = self._ranks.rank, self._ranks.world_size
        for whole in self._whole(self.kinds(self.updates)):
            first, end = (whole.values.numel() * part // of for part in (rank, rank + 1))
            if end > first:
                yield StateSlice(whole.weight, whole.kind, first, whole.values[first:end])

    def blank(self, updates: int) -> Iterator[StateSlice]:
        for weight in self._trained.values() if updates else ():
            self._optimizer.state[weight] = adam_state(weight, updates)
        yield from self._whole(self.kinds(updates))

    def _whole(self, kinds: Sequence[Kind]) -> Iterator[StateSlice]:
        for name, weight in self._trained.items():
            for kind in kinds:
                state = weight.detach() if kind == "master" else self._optimizer.state[weight][kind]
                flat = state.reshape(-1)
                yield StateSlice(name, kind, 0, flat)
                if not state.is_contiguous():  # a copy was filled
                    state.copy_(flat.view(state.shape))
