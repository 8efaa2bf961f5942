"""The entries of a cache as files: finding them, reading all of them, and throwing out."""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from vlm_pg.cache.entry_file import Damaged, read_entry

SUFFIX = ".safetensors"
_TEMPORARY = ".tmp"
_DOWN_TO = 0.9
# A temporary file of this age is nobody's any more.
_ABANDONED_SECONDS = 3600.0


@dataclass(frozen=True)
class Place:
    """Where an entry lies: its kind, key, size in bytes, and when it was last used (seconds since the epoch)."""

    path: Path
    kind: str
    key: str
    size: int
    used: float


def places(folder: Path) -> Iterator[Place]:
    """All entries of a cache, of every kind, in no order."""
    for kind in _folders(folder):
        for bucket in _folders(kind):
            try:
                files = list(os.scandir(bucket))
            except FileNotFoundError:
                continue
            for file in files:
                if not file.name.endswith(SUFFIX) or file.is_dir(follow_symlinks=False):
                    continue
                with suppress(FileNotFoundError):
                    state = file.stat(follow_symlinks=False)
                    key = file.name.removesuffix(SUFFIX)
                    yield Place(Path(file.path), kind.name, key, state.st_size, state.st_mtime)


@dataclass(frozen=True)
class Pruned:
    """How many entries were thrown out, their bytes, and the bytes of those that are left."""

    count: int
    freed: int
    left: int


def throw_out(
    found: Collection[Place], max_bytes: int, since: float = math.inf, giving_way: Collection[str] = ()
) -> Pruned:
    """Throw out entries by last use until nine tenths of ``max_bytes`` are left, where there are more than that.

    Args:
        found: all entries of a cache.
        since: those that were used then (seconds since the epoch) or later stay, and there may be more left than that.
        giving_way: kinds whose entries are thrown out all the same, after the others.
    """
    left = sum(place.size for place in found)
    count = freed = 0
    if left > max_bytes:
        may_go = [place for place in found if place.used < since or place.kind in giving_way]
        for place in sorted(may_go, key=lambda place: (place.used >= since, place.used, place.key)):
            if left <= _DOWN_TO * max_bytes:
                break
            with suppress(FileNotFoundError):
                place.path.unlink()
                count, freed = count + 1, freed + place.size
            left -= place.size
    return Pruned(count, freed, left)


def verify(folder: Path) -> Iterator[tuple[Place, bool]]:
    """Each entry, and whether it is as it was written; those that are not are removed."""
    for place in places(folder):
        try:
            read_entry(place.path, place.kind, place.key)
            yield place, True
        except FileNotFoundError:
            continue
        except Damaged:
            with suppress(OSError):
                place.path.unlink()
            yield place, False


@contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Whether no other process is in here."""
    # neither a link to a file of the user's, nor a pipe that waits
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(folder / ".prune.lock", flags, 0o666), "rb+", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # a disk without locks: two that throw out at once do each other no harm
            pass
        yield True


def remove_abandoned(folder: Path) -> None:
    """Files that a killed process was writing."""
    for kind in _folders(folder):
        for bucket in _folders(kind):
            for path in bucket.glob(f".*{_TEMPORARY}"):
                with suppress(FileNotFoundError):
                    if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                        path.unlink()


def _folders(folder: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
