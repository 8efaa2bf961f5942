"""Sets of samples: prepared ones read on demand, so that memory does not grow with the set; several sets as one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np

from vlm_pg.data.files import files_of
from vlm_pg.data.manifest import check_sizes
from vlm_pg.data.prepared import check_version, is_shard
from vlm_pg.data.records import parse_record, read_records
from vlm_pg.data.settings import DataSettings
from vlm_pg.errors import ConfigError, SampleError, printable
from vlm_pg.types import BadSample, Sample

_GROUPS_HELD = 16


def open_records(path: Path) -> tuple[Sequence[Sample], list[BadSample]]:
    """All usable samples of a file or folder in its order, and the records that are not.

    Those of a prepared set were checked when it was prepared: they stay on disk, and all are usable.

    Raises:
        ConfigError: as ``read_records``, or a file is not as the manifest of its set says.
    """
    if not is_prepared(path):
        return read_records(path)
    files = files_of(path)
    check_sizes(files)
    return PreparedRecords(files), []


def is_prepared(path: Path) -> bool:
    """Whether records are shards of a prepared set, of which only those that are asked for are read."""
    return all(file.suffix == ".parquet" and file.is_file() and is_shard(file) for file in files_of(path))


def any_media(samples: Sequence[Sample]) -> bool:
    """Whether one of the samples has media."""
    return samples.any_media() if isinstance(samples, StreamedSamples) else any(sample.media for sample in samples)


def sources_of(samples: Sequence[Sample]) -> tuple[list[str], np.ndarray]:
    """The names of the samples' sources in alphabetical order, and of each sample the place of its own: int32 [N]."""
    if isinstance(samples, StreamedSamples):
        return samples.sources()
    names = sorted({sample.source for sample in samples})
    places = {name: place for place, name in enumerate(names)}
    return names, np.array([places[sample.source] for sample in samples], dtype=np.int32)


class StreamedSamples(Sequence[Sample], ABC):
    """Samples that are not in memory, and what can be said of all of them without reading each whole."""

    @abstractmethod
    def any_media(self) -> bool:
        """See ``any_media``."""

    @abstractmethod
    def sources(self) -> tuple[list[str], np.ndarray]:
        """See ``sources_of``."""


class PreparedRecords(StreamedSamples):
    """The samples of a split's shards. Reading one reads its row group, of which the last few are kept.

    Args:
        files: the shards in order.
        limit: only the first so many rows.

    Raises:
        ConfigError: a shard cannot be read; also later, when a damaged part of it is.
    """

    def __init__(self, files: Sequence[Path], limit: int | None = None):
        self._files = list(files)
        groups = [(file, place, rows) for file in self._files for place, rows in enumerate(_group_rows(file))]
        self._groups = [(file, place) for file, place, _ in groups]
        self._ends = list(accumulate(rows for _, _, rows in groups))
        total = self._ends[-1] if self._ends else 0
        if not total:
            raise ConfigError(
                f"Data set '{printable(str(self._files[0].parent), 300)}' has no records in this split. At least one "
                "is expected. Check how it was prepared."
            )
        self._length = total if limit is None else min(limit, total)
        self._held: OrderedDict[int, list[Any]] = OrderedDict()

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, place: int) -> Sample: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Sample]: ...

    def __getitem__(self, place: int | slice) -> Sample | Sequence[Sample]:
        if isinstance(place, slice):
            start, stop, step = place.indices(self._length)
            if (start, step) == (0, 1):
                return PreparedRecords(self._files, stop) if stop else []
            return [self[one] for one in range(start, stop, step)]
        if not -self._length <= place < self._length:
            raise IndexError(place)
        place %= self._length
        group = bisect_right(self._ends, place)
        first = self._ends[group - 1] if group else 0
        return self._sample(group, place - first)

    def __iter__(self) -> Iterator[Sample]:
        return (self[place] for place in range(self._length))

    def any_media(self) -> bool:
        """Whether one of the records has media; reads that column alone."""
        return any(any(kinds) for kinds in self._column("data_type"))

    def sources(self) -> tuple[list[str], np.ndarray]:
        """See ``sources_of``."""
        places: dict[str, int] = {}
        codes = np.fromiter(
            (places.setdefault(name, len(places)) for name in self._column("data_source")), np.int32, self._length
        )
        names = sorted(places)
        order = np.empty(len(names), dtype=np.int32)
        for place, name in enumerate(names):
            order[places[name]] = place
        return names, order[codes]

    def _column(self, name: str) -> Iterator[Any]:
        import pyarrow.parquet

        left = self._length
        for file in self._files:
            with pyarrow.parquet.ParquetFile(file) as shard:
                for batch in shard.iter_batches(columns=[name]):
                    yield from batch.column(0).to_pylist()[:left]
                    left -= min(left, batch.num_rows)

    def _sample(self, group: int, row: int) -> Sample:
        rows = self._rows(group)
        file, _ = self._groups[group]
        where = f"{file.name}:{row + 1} of group {self._groups[group][1] + 1}"
        try:
            return parse_record(rows[row], where)
        except SampleError as error:
            raise ConfigError(
                f"A record of the prepared set '{printable(str(file), 300)}' is not as it was written ({where}): "
                f"{error} Prepare the data set again."
            ) from error

    def _rows(self, group: int) -> list[Any]:
        if group in self._held:
            self._held.move_to_end(group)
            return self._held[group]
        file, place = self._groups[group]
        rows = self._held[group] = _read_group(file, place)
        if len(self._held) > _GROUPS_HELD:
            self._held.popitem(last=False)
        return rows


def _group_rows(file: Path) -> list[int]:
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_metadata(file)
        check_version(file, metadata.metadata)
        return [metadata.row_group(place).num_rows for place in range(metadata.num_row_groups)]
    except ConfigError:
        raise
    except Exception as error:  # whatever the reader raises on a file is wrong with the file
        raise _unreadable(file, error) from error


def _read_group(file: Path, place: int) -> list[Any]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file, page_checksum_verification=True) as shard:
            return list(shard.read_row_group(place).to_pylist())
    except Exception as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"The prepared set's '{printable(str(file), 300)}' cannot be read: {printable(str(error), 300)}. A complete "
        "shard is expected. Prepare the data set again."
    )


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
