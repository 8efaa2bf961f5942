"""In which order samples are used: a pure function of the position, so that resuming needs one number."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from vlm_pg.data.sample_sets import sources_of
from vlm_pg.errors import ConfigError, printable
from vlm_pg.types import Sample

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
    """The order with every sample once per epoch."""

    def __init__(self, num_samples: int):
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def index_at(self, position: int, seed: int, shuffle: bool) -> int:
        """See ``index_at``."""
        return index_at(self._num_samples, position, seed, shuffle)


class Mixture:
    """The order of samples of several sources: each has its own order, epoch after epoch, and a share of the positions.

    Args:
        sources: index of each sample's source, int32 [N].
        weights: by name, for every source; those of weight 0 are left out.

    Raises:
        ConfigError: a source has no weight, or a weight no source, or all are 0.
    """

    def __init__(self, names: Sequence[str], sources: np.ndarray, weights: Mapping[str, float]):
        check_weights(names, weights)
        values = np.array([weights[name] for name in names])
        self.names = list(names)
        self.shares = values / values.sum()
        self.members = [np.flatnonzero(sources == index).astype(np.int32) for index in range(len(names))]
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
        members = self.members[source]
        return int(members[index_at(len(members), earlier, seed, shuffle)])

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


def order_of(samples: Sequence[Sample], weights: Mapping[str, float]) -> EpochOrder | Mixture:
    """The order of training: by weights of sources (``data.mixture``), or without any each sample once per epoch.

    Raises:
        ConfigError: see ``Mixture``.
    """
    return Mixture(*sources_of(samples), weights) if weights else EpochOrder(len(samples))


def used_samples(samples: Sequence[Sample], weights: Mapping[str, float]) -> Sequence[Sample]:
    """The samples that ``order_of`` ever uses, in their own order. Raises ConfigError: see ``Mixture``."""
    order = order_of(samples, weights)
    return _Subset(samples, order.used()) if isinstance(order, Mixture) else samples


class _Subset(Sequence[Sample]):
    """Some of many samples, which may be on disk and are read on demand. ``indices``: int64 [N]."""

    def __init__(self, samples: Sequence[Sample], indices: np.ndarray):
        self._samples, self._indices = samples, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return _Subset(self._samples, self._indices[index])
        return self._samples[int(self._indices[index])]


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
