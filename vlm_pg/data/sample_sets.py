"""Sets of samples: prepared ones read on demand, so that memory does not grow with the set; several sets as one. And in
which order samples are used: a pure function of the position, so that resuming needs one number."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, compress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from vlm_pg.data.files import files_of
from vlm_pg.data.prepared import check_sizes, check_version, is_shard
from vlm_pg.data.records import parse_record, read_records
from vlm_pg.data.settings import DataSettings
from vlm_pg.data.tables import naming_damage
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


def ids_of(samples: Sequence[Sample]) -> Iterator[str]:
    """The samples' ids, in order."""
    return samples.ids() if isinstance(samples, StreamedSamples) else (sample.sample_id for sample in samples)


def media_of(samples: Sequence[Sample]) -> np.ndarray:
    """A number for the media of each sample, int64 [N]: equal for samples of equal media, unique for those without."""
    keys = samples.media_keys() if isinstance(samples, StreamedSamples) else (sample.media for sample in samples)
    codes: dict[Any, int] = {}
    return np.fromiter((codes.setdefault(key or index, len(codes)) for index, key in enumerate(keys)), np.int64)


class StreamedSamples(Sequence[Sample], ABC):
    """Samples that are not in memory, with what can be known of all of them without reading each whole."""

    @abstractmethod
    def any_media(self) -> bool:
        """See ``any_media``."""

    @abstractmethod
    def sources(self) -> tuple[list[str], np.ndarray]:
        """See ``sources_of``."""

    @abstractmethod
    def ids(self) -> Iterator[str]:
        """See ``ids_of``."""

    @abstractmethod
    def media_keys(self) -> Iterator[Any]:
        """A key for the media of each sample, equal for equal ones; an empty one without media."""

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

    def ids(self) -> Iterator[str]:
        """See ``ids_of``; reads that column alone."""
        return self._column("problem_id")

    def media_keys(self) -> Iterator[Any]:
        """See ``StreamedSamples``."""
        for paths, starts, ends, times in zip(*map(self._column, ("path", "start", "end", "times")), strict=True):
            yield tuple(zip(paths, starts, ends, map(tuple, times), strict=True))

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


def _damage_named(file: Path) -> AbstractContextManager[None]:
    shown = f"The prepared set's '{printable(str(file), 300)}' cannot be read"
    return naming_damage(shown, "A complete shard is expected. Prepare the data set again.", 300)


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


def named_id(sample_id: str, dataset: str) -> str:
    """The id of a sample of one of several sets; "": there is one set, and the id is unchanged."""
    return f"{dataset}/{sample_id}" if dataset else sample_id


def named(record: Record, dataset: str) -> Record:
    """A record of one of several sets with the set's name; "": there is one set, and the record is unchanged."""
    if not dataset:
        return record
    changes: dict[str, Any] = {"sample_id": named_id(record.sample_id, dataset)}
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

    def ids(self) -> Iterator[str]:
        """See ``ids_of``."""
        return (named_id(one, name) for name, samples in self.sets.items() for one in ids_of(samples))

    def media_keys(self) -> Iterator[Any]:
        """See ``StreamedSamples``; media of different sets count as different."""
        for name, samples in self.sets.items():
            yield from ((name, int(number)) for number in media_of(samples))

    def sources(self) -> tuple[list[str], np.ndarray]:
        """The sets are the sources (``data.mixture``): see ``sources_of``."""
        sizes = [len(samples) for samples in self.sets.values()]
        return self._names, np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)


# 2^64 over the golden ratio, odd: multiples of it fill the circle of 64-bit numbers as evenly as any sequence can
# (Knuth, The Art of Computer Programming 3, 6.4), so that after any number of positions every source has had its share,
# give or take a few.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 4096


def index_at(num_samples: int, position: int, seed: int, shuffle: bool) -> int:
    """Index of the sample at position ``position``, from 0. Epochs follow each other; each has every sample once.

        [index_at(5, position, seed=0, shuffle=False) for position in (3, 4, 5)] == [3, 4, 0]

    Raises:
        ValueError: there are no samples.
    """
    if num_samples < 1:
        raise ValueError(f"There are {num_samples} usable samples; at least one is needed. Check the data file.")
    epoch, offset = divmod(position, num_samples)
    return int(_permutation(num_samples, seed, epoch)[offset]) if shuffle else offset


@lru_cache(maxsize=16)
def _permutation(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """The order of one epoch. Sorts raw Philox output: numpy promises to keep it, unlike ``Generator.permutation``."""
    key = int.from_bytes(hashlib.sha256(f"order/{seed}/{epoch}".encode()).digest()[:16], "big")
    return np.argsort(np.random.Philox(key=key).random_raw(num_samples), kind="stable")


class EpochOrder:
    """The order with every sample once per epoch.

    Args:
        media: int64 [N] number of each sample's media: samples with equal ones follow each other. Each epoch has its
            own random order of media, and of the samples of each. None: the media do not count.
    """

    def __init__(self, num_samples: int, media: np.ndarray | None = None):
        self._num_samples, self._media = num_samples, media
        self._of_epoch: tuple[Any, np.ndarray] = (None, np.empty(0))

    def __len__(self) -> int:
        return self._num_samples

    def index_at(self, position: int, seed: int, shuffle: bool) -> int:
        """See ``index_at``."""
        if self._media is None or not self._num_samples:
            return index_at(self._num_samples, position, seed, shuffle)
        epoch, offset = divmod(position, self._num_samples)
        if self._of_epoch[0] != (key := (epoch, seed) if shuffle else "file"):
            order = _permutation(self._num_samples, seed, epoch) if shuffle else np.arange(self._num_samples)
            # Not by first appearance in ``order``, which puts media with many samples first.
            ranks = _permutation(int(self._media.max()) + 1, seed, -1 - epoch)[self._media] if shuffle else self._media
            self._of_epoch = key, order[np.argsort(ranks[order], kind="stable")]
        return int(self._of_epoch[1][offset])


class Mixture:
    """The order of samples of several sources: each has its own order, epoch after epoch, and a share of the positions.

    Args:
        sources: index of each sample's source, int32 [N].
        weights: by name, for every source; those of weight 0 are left out.
        media: as of ``EpochOrder``.

    Raises:
        ConfigError: a source has no weight, or a weight no source, or all are 0.
    """

    def __init__(
        self, names: Sequence[str], sources: np.ndarray, weights: Mapping[str, float], media: np.ndarray | None = None
    ):
        check_weights(names, weights)
        values = np.array([weights[name] for name in names])
        self.names = list(names)
        self.shares = values / values.sum()
        self.members = [np.flatnonzero(sources == index).astype(np.int32) for index in range(len(names))]
        self._orders = [EpochOrder(len(one), None if media is None else media[one]) for one in self.members]
        # Upper ends of the sources' arcs of the circle; the last one goes to its end, whatever the rounding.
        last = int(np.flatnonzero(values)[-1])
        self._ends = np.array([int(end * 2**64) if end < 1 else 2**64 - 1 for end in np.cumsum(self.shares)], np.uint64)
        self._ends[last:] = np.uint64(2**64 - 1)
        # Positions of each source before each block.
        self._before: list[np.ndarray] = [np.zeros(len(names), dtype=np.int64)]

    def __len__(self) -> int:
        """The number of samples that are ever used."""
        return sum(len(one) for one, share in zip(self.members, self.shares, strict=True) if share > 0)

    def used(self) -> np.ndarray:
        """Ascending indices of the samples that are ever used: int64 [N]."""
        used = [one for one, share in zip(self.members, self.shares, strict=True) if share > 0]
        return np.sort(np.concatenate(used)).astype(np.int64)

    def index_at(self, position: int, seed: int, shuffle: bool) -> int:
        """Index of the sample at position ``position``, from 0."""
        block, offset = divmod(position, _BLOCK)
        chosen = self._chosen(block, seed)
        source = int(chosen[offset])
        while len(self._before) <= block:
            counts = np.bincount(self._chosen(len(self._before) - 1, seed), minlength=len(self.names))
            self._before.append(self._before[-1] + counts)
        earlier = int(self._before[block][source] + np.count_nonzero(chosen[:offset] == source))
        return int(self.members[source][self._orders[source].index_at(earlier, seed, shuffle)])

    def _chosen(self, block: int, seed: int) -> np.ndarray:
        """The source at each position of a block."""
        key = np.uint64(int.from_bytes(hashlib.sha256(f"mixture/{seed}".encode()).digest()[:8], "big"))
        positions = np.arange(block * _BLOCK, (block + 1) * _BLOCK, dtype=np.uint64)
        return np.searchsorted(self._ends, positions * _STEP + key, side="right").clip(max=len(self._ends) - 1)

    def __str__(self) -> str:
        """A line for the log."""
        return ", ".join(
            f"{name} {share:.1%} ({len(members):,} records)"
            for name, share, members in zip(self.names, self.shares, self.members, strict=True)
        )


def order_of(
    samples: Sequence[Sample], weights: Mapping[str, float], media_together: bool = False
) -> EpochOrder | Mixture:
    """The order of training: by weights of sources (``data.mixture``), or without any each sample once per epoch.

    Args:
        media_together: samples on equal media follow each other (``data.media_together``).

    Raises:
        ConfigError: see ``Mixture``.
    """
    media = media_of(samples) if media_together else None
    return Mixture(*sources_of(samples), weights, media) if weights else EpochOrder(len(samples), media)


def used_samples(samples: Sequence[Sample], weights: Mapping[str, float]) -> Sequence[Sample]:
    """The samples that ``order_of`` ever uses, in their own order. Raises ConfigError: see ``Mixture``."""
    order = order_of(samples, weights)
    return _Subset(samples, order.used()) if isinstance(order, Mixture) else samples


def chosen_samples(samples: Sequence[Sample], chosen_N: np.ndarray) -> Sequence[Sample]:
    """The samples for which a boolean array is true, in order; those of several sets as sets."""
    if isinstance(samples, SeveralSets):
        parts = np.split(chosen_N, np.cumsum([len(one) for one in samples.sets.values()])[:-1])
        chosen = (chosen_samples(one, part) for one, part in zip(samples.sets.values(), parts, strict=True))
        return SeveralSets(dict(zip(samples.sets, chosen, strict=True)))
    if isinstance(samples, StreamedSamples):
        return _Subset(samples, np.flatnonzero(chosen_N))
    return [sample for sample, is_chosen in zip(samples, chosen_N, strict=True) if is_chosen]


class _Subset(StreamedSamples):
    """Some of many samples, which may be on disk and are read on demand. ``indices``: int64 [N]."""

    def __init__(self, samples: Sequence[Sample], indices: np.ndarray):
        self._samples, self._indices = samples, indices

    def __len__(self) -> int:
        return len(self._indices)

    def _slice(self, indices: range) -> Sequence[Sample]:
        return _Subset(self._samples, self._indices[indices.start : indices.stop : indices.step])

    def _sample(self, index: int) -> Sample:
        return self._samples[int(self._indices[index])]

    def any_media(self) -> bool:
        """See ``any_media``."""
        return any_media(self._samples) and any(sample.media for sample in self)

    def sources(self) -> tuple[list[str], np.ndarray]:
        """See ``sources_of``."""
        names, sources_N = sources_of(self._samples)
        present, own_N = np.unique(sources_N[self._indices], return_inverse=True)
        return [names[index] for index in present], own_N.astype(np.int32)

    def ids(self) -> Iterator[str]:
        """See ``ids_of``."""
        chosen = np.zeros(len(self._samples), dtype=bool)
        chosen[self._indices] = True  # ascending
        return compress(ids_of(self._samples), chosen)

    def media_keys(self) -> Iterator[Any]:
        """See ``StreamedSamples``."""
        return ((int(number),) for number in media_of(self._samples)[self._indices])


def check_weights(names: Sequence[str], weights: Mapping[str, float]) -> None:
    """Raise ConfigError unless exactly these sources have weights, one of them above 0."""
    shown = ", ".join(printable(name, 80) for name in names)
    unknown, lacking = sorted(set(weights) - set(names)), sorted(set(names) - set(weights))
    if unknown:
        raise ConfigError(
            f"data.mixture has a weight for {', '.join(unknown)}, which no record's data_source is. The records' "
            f"sources are {shown}. Correct data.mixture."
        )
    if lacking:
        raise ConfigError(
            f"data.mixture has no weight for {', '.join(printable(name, 80) for name in lacking)}. Each source of the "
            f"records needs one: {shown}. Add it; 0 leaves a source out."
        )
    if not any(weights.values()):
        raise ConfigError("All weights of data.mixture are 0. At least one must be greater. Raise it.")
