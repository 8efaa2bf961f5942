"""The records that a run trains on: one set, or several whose media lie in folders of their own."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeVar, overload

import numpy as np

from vlm_pg.data.prepared_reader import StreamedSamples, any_media, open_records
from vlm_pg.data.settings import DataSettings
from vlm_pg.errors import ConfigError
from vlm_pg.types import BadSample, Sample


def open_training(data: DataSettings) -> tuple[Sequence[Sample], list[BadSample]]:
    """All usable samples of ``data.train``, and the records that are not usable.

    Of several sets they come one set after the other, in the order of their names, and an id begins with its set's:
    ``videos/17``.

    Raises:
        ConfigError: as ``open_records``.
    """
    sets = data.train_sets
    opened = {name: open_records(path) for name, path in sets.items()}
    if list(sets) == [""]:
        return opened[""]
    bad = [named(one, name) for name in opened for one in opened[name][1]]
    return SeveralSets({name: samples for name, (samples, _) in opened.items()}), bad


Record = TypeVar("Record", bound=Sample | BadSample)


def named(record: Record, dataset: str) -> Record:
    """A record of one of several sets as a run knows it; "": there is one set, and the record is as it was."""
    if not dataset:
        return record
    changes: dict[str, Any] = {"sample_id": f"{dataset}/{record.sample_id}"}
    if isinstance(record, Sample):
        changes["dataset"] = dataset
    return replace(record, **changes)


def first_of_each(samples: Sequence[Sample], count: int | None) -> Sequence[Sample]:
    """The first ``count`` samples (``data.limit``); of several sets the first so many of each."""
    return samples.first_of_each(count) if isinstance(samples, SeveralSets) else samples[:count]


def refuse_empty(samples: Sequence[Sample], data: DataSettings, see: str) -> None:
    """Raise ConfigError where there is no sample to train on, or a set has none. ``see``: where the bad ones are."""
    empty = samples.empty if isinstance(samples, SeveralSets) else [] if samples else [""]
    for name in empty:
        raise ConfigError(
            f"{data.train_sets[name]} has no usable record ({see}). Training needs at least one. Repair the records or "
            f"set {'.'.join(filter(None, ('data.train', name)))} to another file."
        )


def usable_of_each(samples: Sequence[Sample]) -> dict[str, int]:
    """How many samples of ``open_training`` each set has, by its name; of one set by ""."""
    return samples.usable_of_each() if isinstance(samples, SeveralSets) else {"": len(samples)}


class SeveralSets(StreamedSamples):
    """The samples of several sets as one sequence; see ``open_training``. ``sets``: those by name."""

    def __init__(self, sets: Mapping[str, Sequence[Sample]]):
        self._names, self._sets = list(sets), list(sets.values())
        self._ends = list(accumulate(len(samples) for samples in self._sets))

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, place: int) -> Sample: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Sample]: ...

    def __getitem__(self, place: int | slice) -> Sample | Sequence[Sample]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        place %= len(self)
        number = bisect_right(self._ends, place)
        sample = self._sets[number][place - (self._ends[number - 1] if number else 0)]
        return self._named(number, sample)

    def __iter__(self) -> Iterator[Sample]:
        return (self._named(number, sample) for number, samples in enumerate(self._sets) for sample in samples)

    def _named(self, number: int, sample: Sample) -> Sample:
        return named(sample, self._names[number])

    def first_of_each(self, count: int | None) -> SeveralSets:
        """Only the first so many of each set."""
        return SeveralSets({name: samples[:count] for name, samples in zip(self._names, self._sets, strict=True)})

    def usable_of_each(self) -> dict[str, int]:
        """See ``usable_of_each``."""
        return {name: len(samples) for name, samples in zip(self._names, self._sets, strict=True)}

    @property
    def empty(self) -> list[str]:
        """The names of sets without a sample."""
        return [name for name, samples in zip(self._names, self._sets, strict=True) if not samples]

    def any_media(self) -> bool:
        """Whether one of the samples has media."""
        return any(any_media(samples) for samples in self._sets)

    def sources(self) -> tuple[list[str], np.ndarray]:
        """The sets are the sources (``data.mixture``): see ``sources_of``."""
        sizes = [len(samples) for samples in self._sets]
        return self._names, np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
