"""Where a process stands among all that work on a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from vlm_pg.distributed.collectives import gather_objects, sum_over_ranks
from vlm_pg.distributed.processes import is_distributed

T = TypeVar("T")


@dataclass(frozen=True)
class RankLayout:
    """Where this process stands among all that work on a run.

    A data rank is ``sequence_size`` processes in a row (its sequence ranks). In an update they work on the same groups,
    each on its part of every token stream; everywhere else each process has questions of its own.

    Raises:
        ValueError: there is no such rank, or the processes cannot be divided so.
    """

    rank: int = 0
    world_size: int = 1
    sequence_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size or self.sequence_size < 1 or self.world_size % self.sequence_size:
            raise ValueError(
                f"There is no rank {self.rank} in {self.world_size} processes with {self.sequence_size} to a data rank."
            )

    @classmethod
    def here(cls, sequence_size: int = 1) -> RankLayout:
        """Of this process, once it is connected to the others."""
        place = (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)
        return cls(*place, sequence_size)

    @property
    def is_rank0(self) -> bool:
        """Whether this process writes and prints for all of them."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        return self.rank // self.sequence_size

    @property
    def data_size(self) -> int:
        return self.world_size // self.sequence_size

    @property
    def sequence_rank(self) -> int:
        return self.rank % self.sequence_size

    def sum_over_data_ranks(self, values: Mapping[str, float], device: torch.device) -> dict[str, float]:
        """As ``sum_over_ranks``, of values that all sequence ranks of a data rank hold alike: each counts once."""
        return sum_over_ranks({name: 0.0 if self.sequence_rank else value for name, value in values.items()}, device)

    def of_data_ranks(self, of_processes: Sequence[T]) -> Sequence[T]:
        """One entry for each data rank, of entries for each process."""
        return of_processes[:: self.sequence_size]

    def first_says(self, ask: Callable[[], T]) -> T:
        """What ``ask()`` says on the first rank: a network file system may show the others something else."""
        return gather_objects(ask() if self.is_rank0 else None)[0]


SINGLE_RANK = RankLayout()
