"""The sets of records that a run asks, for whoever prepares what it will need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlm_pg.config import RunConfig
from vlm_pg.data.prepared_reader import open_records
from vlm_pg.types import Sample


@dataclass(frozen=True)
class RecordSet:
    """``name``: the set's, if any. ``samples``: those that are asked. ``processes``: how many make features as one."""

    name: str
    path: Path
    samples: Sequence[Sample]
    processes: int = 1


def record_sets(config: RunConfig) -> Iterator[RecordSet]:
    """Training questions, then those of each evaluation set that is chosen.

    Raises:
        ConfigError: records that cannot be read.
    """
    for name, path in config.data.train_sets.items():
        # The frames of a step's prompts are divided over the sequence ranks, those of an evaluation's are not.
        samples, _ = open_records(path)
        yield RecordSet(name, path, samples[: config.data.limit], config.training.sequence_parallel)
    for name in config.eval.chosen_sets(list(config.data.eval)):
        path = config.data.eval[name]
        yield RecordSet(name, path, open_records(path)[0][: config.eval.limit])
