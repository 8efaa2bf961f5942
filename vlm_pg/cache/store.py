"""Entries on disk, found by what they were made of: written whole, checked when they are read, thrown out by last use.

    cache/vlm_pg_cache.json                 the version of this layout
    cache/frames/3f/3f9a....safetensors     one entry: tensors, what describes them, the key, and a checksum of it all

Any number of processes may read and write at the same time. A key says everything that its entry depends on, so two
that write the same entry write the same, and nothing is ever changed: an entry appears, is read, and is thrown out.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_pg.cache.entry_file import MOST_BYTES, Damaged, Entry, read_entry, read_regular, serialized
from vlm_pg.errors import ConfigError, printable
from vlm_pg.files import replacing, write_bytes_atomic

VERSION = 1
MARK = "vlm_pg_cache.json"
_SUFFIX = ".safetensors"
_TEMPORARY = ".tmp"
_MOST_MARK_BYTES = 1 << 16
# A read entry's time of use is written so often at most: disks need not write for every read.
_USE_SECONDS = 600.0
# What was added since the folder was last looked through, as a share of the limit, before it is again.
_LOOK_AGAIN = 0.02
_DOWN_TO = 0.9
# A temporary file of this age is nobody's any more.
_ABANDONED_SECONDS = 3600.0


@dataclass
class Uses:
    """What became of the questions to a store since it was opened."""

    hits: int = 0
    misses: int = 0
    damaged: int = 0
    written: int = 0


def key_of(parts: Mapping[str, Any]) -> str:
    """The key of what depends on these JSON values and nothing else: 64 hexadecimal digits (SHA-256)."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, allow_nan=False).encode()).hexdigest()


class Store:
    """One kind of entries in a cache folder.

    Args:
        folder: the cache; made if need be.
        kind: name of the entries' own folder.
        max_bytes: of all kinds together; None for no limit.

    Raises:
        ConfigError: the folder cannot be made, holds something else, or another version's cache.
    """

    def __init__(self, folder: Path, kind: str, max_bytes: int | None = None):
        self.folder, self.kind, self.uses = folder, kind, Uses()
        self._max_bytes = max_bytes
        self._added = 0
        self._looked = False
        open_folder(folder)

    def read(self, key: str, most_bytes: int = MOST_BYTES) -> Entry | None:
        """The entry of a key; None where there is none. A damaged one is removed and counted.

        ``most_bytes``: a larger file is damaged.
        """
        path = self._path(key)
        try:
            if _leads_away(path):
                raise FileNotFoundError
            entry = read_entry(path, self.kind, key, most_bytes)
        except FileNotFoundError:
            self.uses.misses += 1
            return None
        except Damaged:
            self.uses.misses += 1
            self.remove_damaged(key)
            return None
        self.uses.hits += 1
        with suppress(OSError):  # it may be thrown out at this moment, or the folder be read-only
            if time.time() - path.stat().st_mtime > _USE_SECONDS:
                os.utime(path)
        return entry

    def remove_damaged(self, key: str) -> None:
        """Remove an entry that is not what it should be, and count it."""
        self.uses.damaged += 1
        with suppress(OSError):  # somebody else has; or it is a folder, and stays
            self._path(key).unlink()

    def has(self, key: str) -> bool:
        """Whether there is an entry, damaged or not."""
        return self._path(key).is_file()

    def write(self, key: str, entry: Entry) -> None:
        """Keep an entry, and throw out those that were not used for longest where there is no room.

        One that is larger than the limit by itself, or than entries may be, is not kept.

        Raises:
            OSError: it cannot be written.
        """
        content = serialized(self.kind, key, entry)
        if content is None or (self._max_bytes is not None and len(content) > self._max_bytes):
            return
        path = self._path(key)
        if _leads_away(path):
            raise OSError(errno.ELOOP, "a folder in it is a link that leads elsewhere", str(path.parent))
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, durable=False) as file:
            file.write(content)
        self.uses.written += 1
        self._added += len(content)
        if self._max_bytes is not None and (not self._looked or self._added > _LOOK_AGAIN * self._max_bytes):
            prune(self.folder, self._max_bytes)
            self._looked, self._added = True, 0

    def _path(self, key: str) -> Path:
        return self.folder / self.kind / key[:2] / f"{key}{_SUFFIX}"


def _leads_away(path: Path) -> bool:
    """Whether a folder inside the cache is a link: what lies behind it is not of the cache."""
    return path.parent.is_symlink() or path.parent.parent.is_symlink()


def open_folder(folder: Path) -> None:
    """Make a cache folder, or see that it is one of this version.

    Raises:
        ConfigError: it is not.
    """
    mark = folder / MARK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Asked in this order: another process may make the cache at this moment, and the mark comes before all else.
        holds_something = any(not entry.name.startswith(".") for entry in folder.iterdir())
        is_other = holds_something and not mark.exists()
        if not is_other and not mark.exists():
            write_bytes_atomic(mark, json.dumps({"version": VERSION}).encode())
        written = b"{}" if is_other else read_regular(mark, _MOST_MARK_BYTES)
    except OSError as error:
        raise ConfigError(
            f"cache.folder '{folder}' cannot be used: {error.strerror or error}. A folder that can be made and "
            "written is expected. Choose another."
        ) from error
    if is_other:
        raise ConfigError(
            f"cache.folder '{folder}' holds files and is no cache. An empty or new folder, or a cache, is expected. "
            "Choose another."
        )
    version = _version(written)
    if version != VERSION:
        raise ConfigError(
            f"cache.folder '{folder}' is a cache of version {printable(str(version), 50)}. This program keeps version "
            f"{VERSION}. Choose another folder, or remove this one."
        )


def _version(written: bytes) -> Any:
    try:
        content = json.loads(written)
    except ValueError:
        return None
    return content.get("version") if isinstance(content, dict) else None


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
                if not file.name.endswith(_SUFFIX) or file.is_dir(follow_symlinks=False):
                    continue
                with suppress(FileNotFoundError):
                    state = file.stat(follow_symlinks=False)
                    key = file.name.removesuffix(_SUFFIX)
                    yield Place(Path(file.path), kind.name, key, state.st_size, state.st_mtime)


def prune(folder: Path, max_bytes: int) -> tuple[int, int]:
    """Throw out entries by last use until nine tenths of ``max_bytes`` are left, where there are more than that.

    Returns:
        How many were thrown out, and their bytes.
    """
    with _alone(folder) as alone:
        if not alone:
            return 0, 0  # somebody does it at this moment
        _remove_abandoned(folder)
        found = sorted(places(folder), key=lambda place: (place.used, place.key))
        total = sum(place.size for place in found)
        if total <= max_bytes:
            return 0, 0
        count = freed = 0
        for place in found:
            if total - freed <= _DOWN_TO * max_bytes:
                break
            with suppress(FileNotFoundError):
                place.path.unlink()
                count, freed = count + 1, freed + place.size
        return count, freed


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
def _alone(folder: Path) -> Iterator[bool]:
    """Whether no other process is in here."""
    # neither a link to a file of the user's, nor a pipe that waits
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(folder / ".prune.lock", flags, 0o666), "rb+", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def _remove_abandoned(folder: Path) -> None:
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
