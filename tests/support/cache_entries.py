"""Small entries for tests of a cache's limit, and runs that ask for them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vlm_pg.cache.eviction import entry_files
from vlm_pg.cache.store import Entry, Store, key_of, serialized

BYTES = 1000
DAY = 24 * 3600.0


def entry(number: int, size: int = BYTES) -> Entry:
    """An entry of its own for each number."""
    return Entry({"values": np.random.default_rng(number).integers(0, 255, size, dtype=np.uint8)}, {})


def key(number: int) -> str:
    """The key of that entry."""
    return key_of({"n": number})


def size_of(one: Entry) -> int:
    """Its bytes on disk, among frames."""
    content = serialized("frames", key(0), one)
    assert content is not None
    return len(content)


def held(folder: Path, kind: str) -> int:
    """How many entries there are."""
    return sum(stored.kind == kind for stored in entry_files(folder))


def age(folder: Path, seconds: float) -> None:
    """As after a while, in which nobody used it."""
    for stored in entry_files(folder):
        os.utime(stored.path, (stored.used - seconds, stored.used - seconds))


def epoch(store: Store, order: Sequence[int]) -> int:
    """Each is read, and made where it is not there; how many were there."""
    hits = store.uses.hits
    for number in order:
        if store.read(key(number)) is None:
            store.write(key(number), entry(number))
    return store.uses.hits - hits
