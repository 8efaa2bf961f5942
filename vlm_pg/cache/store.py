"""Content-addressed entries on disk: written whole, verified when they are read, evicted by last use.

    cache/vlm_pg_cache.json                 the version of this layout
    cache/frames/3f/3f9a....safetensors     one entry: tensors, metadata, key, and a checksum

Any number of processes may read and write at the same time. A key covers everything that its entry depends on, so
concurrent writers of an entry write equal content, and entries never change: one appears, is read, and is evicted.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vlm_pg.cache.eviction import SUFFIX, EntryFile, Outcome, Room, entry_files, prune
from vlm_pg.cache.notes import warn_once
from vlm_pg.errors import ConfigError, printable
from vlm_pg.files import parse_json_line, replacing, write_bytes_atomic

# Frames of the longest video at its largest size are some 100 MB. A larger file is no entry.
MOST_BYTES = 4 << 30
# Of the metadata; parsed JSON takes many times its length.
_MOST_HEADER_BYTES = 16 << 20
_ENTRY = "entry"


@dataclass(frozen=True)
class Entry:
    """An entry's tensors by name, and its metadata as JSON values."""

    tensors: Mapping[str, np.ndarray]
    about: Mapping[str, Any]


class Damaged(Exception):
    """An entry differs from what was written."""


def read_entry(path: Path, kind: str, key: str, most_bytes: int = MOST_BYTES) -> Entry:
    """The entry in a file.

    Raises:
        FileNotFoundError, Damaged: it is not as it was written, of another key, no regular file, or too large.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        content = read_regular(path, most_bytes)
    except FileNotFoundError:
        raise
    except OSError as error:  # a folder, a link, a pipe, a disk that fails
        raise Damaged(str(error)) from error
    try:
        length = int.from_bytes(content[:8], "little")
        if length > _MOST_HEADER_BYTES:
            raise Damaged(f"it states a header of {length} bytes")
        about = json.loads(json.loads(content[8 : 8 + length])["__metadata__"][_ENTRY])
        tensors = load(content)
        right = (about["kind"], about["key"], about["checksum"]) == (kind, key, _checksum(tensors, about))
        if right:
            return Entry(tensors, json.loads(about["about"]))
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise Damaged(str(error)) from error
    raise Damaged("its checksum is another")


def read_regular(path: Path, most_bytes: int) -> bytes:
    """The content of a regular file that is no link. Raises OSError: it cannot be read, or is larger."""
    # a pipe must not wait for a writer
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise OSError("it is not a regular file")
        if state.st_size > most_bytes:
            raise OSError(f"it has {state.st_size} bytes, more than {most_bytes}")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(most_bytes)
    finally:
        os.close(descriptor)


def serialized(kind: str, key: str, entry: Entry) -> bytes | None:
    """The content of an entry's file; None if it exceeds the limits."""
    from safetensors.numpy import save

    about = {"kind": kind, "key": key, "about": json.dumps(entry.about, sort_keys=True)}
    tensors = {name: np.ascontiguousarray(value) for name, value in entry.tensors.items()}
    # One value: safetensors would write several in any order, and equal entries must be equal bytes.
    content = save(tensors, {_ENTRY: json.dumps({**about, "checksum": _checksum(tensors, about)}, sort_keys=True)})
    is_small = int.from_bytes(content[:8], "little") <= _MOST_HEADER_BYTES and len(content) <= MOST_BYTES
    return content if is_small else None


def _checksum(tensors: Mapping[str, np.ndarray], about: Mapping[str, str]) -> str:
    """Of everything that is read from the file; against damage, not against tampering."""
    import xxhash

    digest = xxhash.xxh3_128()
    for name in ("kind", "key", "about"):
        digest.update(f"{name}\0{about[name]}\0".encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"{name}\0{value.dtype.str}\0{value.shape}\0".encode())
        digest.update(np.ascontiguousarray(value).view(np.uint8).data if value.size else b"")
    return digest.hexdigest()


VERSION = 1
MARK = "vlm_pg_cache.json"
_MOST_MARK_BYTES = 1 << 16
# The least time between updates of an entry's last use: disks need not write for every read.
_USE_SECONDS = 600.0
# Start of this process for the purpose of eviction.
BEGAN = time.time()


@dataclass
class Uses:
    """Counts since a store was opened."""

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
        kind: name of the entries' own folder in the cache ``folder``.
        max_bytes: of all kinds together; None for no limit.
        since: start of the run (seconds since the epoch), by default of this process, for ``eviction``.
        giving_way: kinds whose entries are evicted for this one's, whenever they were used.

    Raises:
        ConfigError: the folder cannot be made, holds other files, or a cache of another version.
    """

    def __init__(
        self,
        folder: Path,
        kind: str,
        max_bytes: int | None = None,
        since: float | None = None,
        giving_way: Collection[str] = (),
    ):
        self.folder, self.kind, self.uses = folder, kind, Uses()
        self._since = BEGAN if since is None else since
        self._room = None if max_bytes is None else Room(folder, max_bytes, self._since, giving_way)
        open_folder(folder)

    def read(self, key: str, most_bytes: int = MOST_BYTES) -> Entry | None:
        """The entry of a key; None where there is none. A damaged one, or a larger file, is removed and counted."""
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
        with suppress(OSError):  # evicted just now, or a read-only folder
            used = path.stat().st_mtime
            if used < self._since or time.time() - used > _USE_SECONDS:
                os.utime(path)
            if self._room is not None:
                self._room.record_hit(used)
        return entry

    def remove_damaged(self, key: str) -> None:
        """Remove and count a damaged entry."""
        self.uses.damaged += 1
        with suppress(OSError):  # removed by another process; or it is a folder, and stays
            self._path(key).unlink()

    def has(self, key: str) -> bool:
        """Whether there is an entry, damaged or not."""
        return self._path(key).is_file()

    def write(self, key: str, entry: Entry) -> Outcome:
        """Store an entry; FULL for one beyond the limits of an entry. Raises OSError: it cannot be written."""
        content = serialized(self.kind, key, entry)
        path = self._path(key)
        if _leads_away(path):
            raise OSError(errno.ELOOP, "a folder in it is a link that leads elsewhere", str(path.parent))
        if content is None:
            return Outcome.FULL
        if self._room is not None:
            outcome = self._room.take(len(content))
            if outcome is not Outcome.STORED:
                return outcome
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, durable=False) as file:
            file.write(content)
        self.uses.written += 1
        return Outcome.STORED

    def keep(self, key: str, entry: Entry, what: str, made: str) -> Outcome | None:
        """``write``, with a warning where the disk fails (None) or is full.

        Args:
            what, made: of the warning: "frames" are "decoded" again.
        """
        try:
            outcome = self.write(key, entry)
        except OSError as error:
            warn_once(
                f"cache.folder '{self.folder}' cannot be written ({error.strerror or error}): {what} are {made} again. "
                "Make room, or lower cache.max_gb."
            )
            return None
        if outcome is Outcome.FULL:
            warn_once(
                f"cache.folder '{self.folder}' has no room for more {what} within cache.max_gb (what this run has used "
                f"is not thrown out): those that do not fit are {made} every time. Raise cache.max_gb, or make room "
                "with vlm-pg cache prune."
            )
        return outcome

    def _path(self, key: str) -> Path:
        return self.folder / self.kind / key[:2] / f"{key}{SUFFIX}"


def verify(folder: Path) -> Iterator[tuple[EntryFile, bool]]:
    """Each entry, and whether it is as it was written; those that are not are removed."""
    for stored in entry_files(folder):
        try:
            read_entry(stored.path, stored.kind, stored.key)
            yield stored, True
        except FileNotFoundError:
            continue
        except Damaged:
            with suppress(OSError):
                stored.path.unlink()
            yield stored, False


def _leads_away(path: Path) -> bool:
    """Whether a folder inside the cache is a link: its target is not part of the cache."""
    return path.parent.is_symlink() or path.parent.parent.is_symlink()


def open_folder(folder: Path) -> None:
    """Make a cache folder, or check that it is one of this version. Raises ConfigError: it is not."""
    mark = folder / MARK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # In this order: another process may make the cache meanwhile, and the mark is its first file.
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
    version = (parse_json_line(written) or {}).get("version")
    if version != VERSION:
        raise ConfigError(
            f"cache.folder '{folder}' is a cache of version {printable(str(version), 50)}. This program keeps version "
            f"{VERSION}. Choose another folder, or remove this one."
        )


_GIB = 2**30


def print_stats(folder: Path) -> None:
    """Entries, bytes and last use of each kind."""
    _check(folder)
    counts: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0, time.time(), 0.0])
    for stored in entry_files(folder):
        found = counts[stored.kind]
        found[0] += 1
        found[1] += stored.size
        found[2], found[3] = min(found[2], stored.used), max(found[3], stored.used)
    for kind, (count, size, oldest, newest) in sorted(counts.items()):
        first, last = (time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) for seconds in (oldest, newest))
        used = f"last used between {first} and {last}"
        print(f"{kind:10} {int(count):9,} entries {size / _GIB:10.3f} GiB, {used}")
    if not counts:
        print(f"{folder} is empty")


def print_verified(folder: Path) -> None:
    """Read every entry and remove the damaged ones."""
    _check(folder)
    whole = damaged = 0
    for stored, is_whole in verify(folder):
        whole, damaged = whole + is_whole, damaged + (not is_whole)
        if not is_whole:
            print(f"damaged, removed: {printable(str(stored.path), 300)}")
        if (whole + damaged) % 1000 == 0:
            print(f"{whole + damaged:,} read", flush=True)
    print(f"{whole:,} entries are as they were written, {damaged:,} were damaged and are removed: they are made again")


def print_pruned(folder: Path, max_gb: float) -> None:
    """Evict the least recently used entries."""
    _check(folder)
    pruned = prune(folder, int(max_gb * _GIB))
    if pruned is None:
        raise ConfigError(
            f"Another process throws out entries of '{printable(str(folder), 300)}' at this moment. Nothing was done. "
            "Try again."
        )
    print(f"{pruned.count:,} entries evicted, {pruned.freed / _GIB:.3f} GiB freed")


def _check(folder: Path) -> None:
    if not (folder / MARK).is_file():
        raise ConfigError(
            f"'{printable(str(folder), 300)}' is no cache. The folder that cache.folder names is expected. Correct it."
        )
    open_folder(folder)
