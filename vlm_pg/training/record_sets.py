"""The sets of records that a run asks, for whoever prepares what it will need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlm_pg.config import RunConfig
from vlm_pg.data.order import asked_of, check_weights
from vlm_pg.data.sample_sets import open_records
from vlm_pg.eval.exam import EvalSet
from vlm_pg.types import Sample


@dataclass(frozen=True)
class RecordSet:
    """``name``: the set's, if any. ``samples``: those that are asked. ``processes``: how many make features as one.

    ``held``: an evaluation set, which says how it is shown; None: one that is trained on.
    """

    name: str
    path: Path
    samples: Sequence[Sample]
    processes: int = 1
    held: EvalSet | None = None


def record_sets(config: RunConfig) -> Iterator[RecordSet]:
    """Training questions that ``data.mixture`` gives a weight, then those of each evaluation set that is chosen.

    Of a set with a protocol: those that it asks, with the media that it shows.

    Raises:
        ConfigError: records that cannot be read, or weights that are not those of their sources.
    """
    data = config.data
    if data.mixture and isinstance(data.train, dict):
        check_weights(list(data.train_sets), data.mixture)
    for name, path in data.asked_sets.items():
        samples = open_records(path)[0][: data.limit]
        if samples and not name:
            samples = asked_of(samples, data.mixture)
        # The frames of a step's prompts are divided over the sequence ranks, those of an evaluation's are not.
        yield RecordSet(name, path, samples, config.training.sequence_parallel)
    for name in config.eval.chosen_sets(list(data.eval)):
        path, protocol = data.eval[name], config.eval.protocol_of(name)
        samples = open_records(path)[0]
        if protocol is not None:
            samples = config.eval.asked(name, samples)
        held = EvalSet(name, path, (), protocol=protocol)
        yield RecordSet(name, path, samples[: config.eval.limit], held=held)


def left_out(config: RunConfig) -> list[str]:
    """Lines about the records that ``record_sets`` leaves out."""
    return [*config.data.left_out(), *config.eval.left_out(list(config.data.eval))]
