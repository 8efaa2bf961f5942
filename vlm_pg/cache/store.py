"""Entries on disk, found by what they were made of: written whole, checked when they are read, thrown out by last use.

    cache/vlm_pg_cache.json                 the version of this layout
    cache/frames/3f/3f9a....safetensors     one entry: tensors, what describes them, the key, and a checksum of it all

Any number of processes may read and write at the same time. A key says everything that its entry depends on, so two
that write the same entry write the same, and nothing is ever changed: an entry appears, is read, and is thrown out.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_pg.cache.entry_file import MOST_BYTES, Damaged, Entry, read_entry, read_regular, serialized
from vlm_pg.cache.places import SUFFIX
from vlm_pg.cache.room import Outcome, Room
from vlm_pg.errors import ConfigError, printable
from vlm_pg.files import replacing, write_bytes_atomic

VERSION = 1
MARK = "vlm_pg_cache.json"
_MOST_MARK_BYTES = 1 << 16
# A read entry's time of use is written so often at most: disks need not write for every read.
_USE_SECONDS = 600.0
# When this process began, as far as a cache is concerned.
BEGAN = time.time()


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
        since: when the run began (seconds since the epoch), by default this process. What may be thrown out for
            something else goes by that, as ``room`` says.
        giving_way: kinds whose entries are thrown out for this one's, whenever they were used.

    Raises:
        ConfigError: the folder cannot be made, holds something else, or another version's cache.
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
            used = path.stat().st_mtime
            if used < self._since or time.time() - used > _USE_SECONDS:
                os.utime(path)
            if self._room is not None:
                self._room.found(used)
        return entry

    def remove_damaged(self, key: str) -> None:
        """Remove an entry that is not what it should be, and count it."""
        self.uses.damaged += 1
        with suppress(OSError):  # somebody else has; or it is a folder, and stays
            self._path(key).unlink()

    def has(self, key: str) -> bool:
        """Whether there is an entry, damaged or not."""
        return self._path(key).is_file()

    def write(self, key: str, entry: Entry) -> Outcome:
        """Keep an entry, and throw out those that were not used for longest where there is no room.

        Returns:
            Whether it is kept. One that is larger than entries may be finds a cache full.

        Raises:
            OSError: it cannot be written.
        """
        content = serialized(self.kind, key, entry)
        path = self._path(key)
        if _leads_away(path):
            raise OSError(errno.ELOOP, "a folder in it is a link that leads elsewhere", str(path.parent))
        if content is None:
            return Outcome.FULL
        if self._room is not None:
            outcome = self._room.take(len(content))
            if outcome is not Outcome.KEPT:
                return outcome
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, durable=False) as file:
            file.write(content)
        self.uses.written += 1
        return Outcome.KEPT

    def _path(self, key: str) -> Path:
        return self.folder / self.kind / key[:2] / f"{key}{SUFFIX}"


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
