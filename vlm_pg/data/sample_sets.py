"""Sets of samples: prepared ones read on demand, so that memory does not grow with the set; several sets as one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from vlm_pg.data.files import files_of
from vlm_pg.data.prepared import check_sizes, check_version, is_shard
from vlm_pg.data.records import parse_record, read_records
from vlm_pg.data.settings import DataSettings
from vlm_pg.errors import ConfigError, SampleError, printable
from vlm_pg.types import BadSample, Sample

_CACHED_GROUPS = 16
Record = TypeVar("Record", bound=Sample | BadSample)


def open_records(path: Path) -> tuple[Sequence[Sample], list[BadSample]]:
    """All usable samples of a file or folder in its order, and the records that are not.

    Records of a prepared set were checked by its preparation: they stay on disk, and all are usable.

    Raises:
        ConfigError: as ``read_records``, or a file is not as the manifest of its set says.
    """
    if not is_prepared(path):
        return read_records(path)
    files = files_of(path)
    check_sizes(files)
    return PreparedRecords(files), []


def is_prepared(path: Path) -> bool:
    """Whether records are shards of a prepared set, which are read on demand."""
    return all(file.suffix == ".parquet" and file.is_file() and is_shard(file) for file in files_of(path))


def any_media(samples: Sequence[Sample]) -> bool:
    """Whether one of the samples has media."""
    return samples.any_media() if isinstance(samples, StreamedSamples) else any(sample.media for sample in samples)


def sources_of(samples: Sequence[Sample]) -> tuple[list[str], np.ndarray]:
    """The names of the samples' sources in alphabetical order, and of each sample the index of its own: int32 [N]."""
    if isinstance(samples, StreamedSamples):
        return samples.sources()
    names = sorted({sample.source for sample in samples})
    indices = {name: index for index, name in enumerate(names)}
    return names, np.array([indices[sample.source] for sample in samples], dtype=np.int32)


class StreamedSamples(Sequence[Sample], ABC):
    """Samples that are not in memory, with what can be known of all of them without reading each whole."""

    @abstractmethod
    def any_media(self) -> bool:
        """See ``any_media``."""

    @abstractmethod
    def sources(self) -> tuple[list[str], np.ndarray]:
        """See ``sources_of``."""

    @abstractmethod
    def _sample(self, index: int) -> Sample:
        """The sample at an index from 0."""

    def _slice(self, indices: range) -> Sequence[Sample]:
        return [self[index] for index in indices]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._slice(range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._sample(index % len(self))


class PreparedRecords(StreamedSamples):
    """The samples of a split's shards, or the first ``limit``; reading one reads its row group, cached for a while.

    Raises:
        ConfigError: a shard cannot be read; also later, when a damaged part of it is.
    """

    def __init__(self, files: Sequence[Path], limit: int | None = None):
        self._files = list(files)
        groups = [(file, group, rows) for file in self._files for group, rows in enumerate(_group_rows(file))]
        self._groups = [(file, group) for file, group, _ in groups]
        self._ends = list(accumulate(rows for _, _, rows in groups))
        total = self._ends[-1] if self._ends else 0
        if not total:
            raise ConfigError(
                f"Data set '{printable(str(self._files[0].parent), 300)}' has no records in this split. At least one "
                "is expected. Check how it was prepared."
            )
        self._length = total if limit is None else min(limit, total)
        self._cached: dict[int, list[Any]] = {}

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sample]:
        return map(self._sample, range(self._length))

    def _slice(self, indices: range) -> Sequence[Sample]:
        if (indices.start, indices.step) == (0, 1):
            return PreparedRecords(self._files, indices.stop) if indices.stop else []
        return super()._slice(indices)

    def any_media(self) -> bool:
        """Whether one of the records has media; reads that column alone."""
        return any(any(kinds) for kinds in self._column("data_type"))

    def sources(self) -> tuple[list[str], np.ndarray]:
        """See ``sources_of``."""
        codes: dict[str, int] = {}
        codes_N = np.fromiter((codes.setdefault(name, len(codes)) for name in self._column("data_source")), np.int32)
        names = sorted(codes)
        order = np.argsort([codes[name] for name in names]).astype(np.int32)
        return names, order[codes_N]

    def _column(self, name: str) -> Iterator[Any]:
        import pyarrow.parquet

        left = self._length
        for file in self._files:
            with pyarrow.parquet.ParquetFile(file) as shard:
                for batch in shard.iter_batches(columns=[name]):
                    yield from batch.column(0).to_pylist()[:left]
                    left -= min(left, batch.num_rows)

    def _sample(self, index: int) -> Sample:
        group = bisect_right(self._ends, index)
        row = index - (self._ends[group - 1] if group else 0)
        file, group_of_file = self._groups[group]
        where = f"{file.name}:{row + 1} of group {group_of_file + 1}"
        try:
            return parse_record(self._rows(group)[row], where)
        except SampleError as error:
            raise ConfigError(
                f"A record of the prepared set '{printable(str(file), 300)}' is not as it was written ({where}): "
                f"{error} Prepare the data set again."
            ) from error

    def _rows(self, group: int) -> list[Any]:
        rows = self._cached.pop(group, None) or _read_group(*self._groups[group])
        self._cached[group] = rows  # the last used is last
        if len(self._cached) > _CACHED_GROUPS:
            del self._cached[next(iter(self._cached))]
        return rows


def _group_rows(file: Path) -> list[int]:
    import pyarrow.parquet

    with _damage_named(file):
        metadata = pyarrow.parquet.read_metadata(file)
        check_version(file, metadata.metadata)
        return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def _read_group(file: Path, group: int) -> list[Any]:
    import pyarrow.parquet

    with _damage_named(file), pyarrow.parquet.ParquetFile(file, page_checksum_verification=True) as shard:
        return list(shard.read_row_group(group).to_pylist())


@contextmanager
def _damage_named(file: Path) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # whatever the reader raises on a file is wrong with the file
        raise ConfigError(
            f"The prepared set's '{printable(str(file), 300)}' cannot be read: {printable(str(error), 300)}. A "
            "complete shard is expected. Prepare the data set again."
        ) from error


def open_training(data: DataSettings) -> tuple[Sequence[Sample], list[BadSample]]:
    """All usable samples of ``data.train``, and the records that are not usable.

    Several sets follow each other in the order of their names, and an id begins with its set's: ``videos/17``.

    Raises:
        ConfigError: as ``open_records``.
    """
    opened = {name: open_records(path) for name, path in data.train_sets.items()}
    if list(opened) == [""]:
        return opened[""]
    bad = [named(one, name) for name in opened for one in opened[name][1]]
    return SeveralSets({name: samples for name, (samples, _) in opened.items()}), bad


def named(record: Record, dataset: str) -> Record:
    """A record of one of several sets with the set's name; "": there is one set, and the record is unchanged."""
    if not dataset:
        return record
    changes: dict[str, Any] = {"sample_id": f"{dataset}/{record.sample_id}"}
    if isinstance(record, Sample):
        changes["dataset"] = dataset
    return replace(record, **changes)


def first_of_each(samples: Sequence[Sample], count: int | None) -> Sequence[Sample]:
    """The first ``count`` samples (``data.limit``); of several sets the first so many of each."""
    if not isinstance(samples, SeveralSets):
        return samples[:count]
    return SeveralSets({name: one[:count] for name, one in samples.sets.items()})


def refuse_empty(samples: Sequence[Sample], data: DataSettings, see: str) -> None:
    """Raise ConfigError where there is no sample to train on, or a set has none. ``see``: where the bad ones are."""
    for name in (name for name, count in usable_of_each(samples).items() if not count):
        raise ConfigError(
            f"{data.train_sets[name]} has no usable record ({see}). Training needs at least one. Repair the records or "
            f"set {'.'.join(filter(None, ('data.train', name)))} to another file."
        )


def usable_of_each(samples: Sequence[Sample]) -> dict[str, int]:
    """The number of samples of ``open_training`` by set; of one set by ""."""
    sets = samples.sets if isinstance(samples, SeveralSets) else {"": samples}
    return {name: len(one) for name, one in sets.items()}


class SeveralSets(StreamedSamples):
    """The samples of several ``sets`` by name as one sequence; see ``open_training``."""

    def __init__(self, sets: Mapping[str, Sequence[Sample]]):
        self.sets = dict(sets)
        self._names = list(sets)
        self._ends = list(accumulate(len(samples) for samples in self.sets.values()))

    def __len__(self) -> int:
        return self._ends[-1]

    def __iter__(self) -> Iterator[Sample]:
        return (named(sample, name) for name, samples in self.sets.items() for sample in samples)

    def _sample(self, index: int) -> Sample:
        number = bisect_right(self._ends, index)
        name = self._names[number]
        return named(self.sets[name][index - (self._ends[number - 1] if number else 0)], name)

    def any_media(self) -> bool:
        """See ``any_media``."""
        return any(map(any_media, self.sets.values()))

    def sources(self) -> tuple[list[str], np.ndarray]:
        """The sets are the sources (``data.mixture``): see ``sources_of``."""
        sizes = [len(samples) for samples in self.sets.values()]
        return self._names, np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
