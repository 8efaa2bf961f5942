"""Space of a cache: its entries as files, eviction by last use, and admission of one more entry.

Any number of processes write at the same time. The bytes of all entries are kept in an account, a small file to which
every writer adds before it writes; where they are unknown, a process counts before any writes. That is an estimate:
entries are removed by hand, their writers are killed, or write during a count, which alone makes it too low. So the
limit holds but for one entry per process. A writer that finds no space looks through the folder, alone, evicts entries,
and corrects the account. Others wait for a moment: an entry is stored, the cache is full, or it has space later.

Which entries may be evicted? Entries used since the run began stay. Of media that are read in a cycle, epoch after
epoch, and do not fit, a part then stays and is hit each time; plain LRU would always evict the entry that is needed
next. Entries that another run used in the day before are spared as well, as long as they may be of this run's media:
until so many entries in a row had no space that a run on these media would have hit one of them meanwhile. A run on
other media then takes their space, instead of being shut out by yesterday's.

That nothing may be evicted is kept in the account too, so that one process of a run looks, and not each.
"""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

SUFFIX = ".safetensors"
USAGE_FILE = ".room"
# Written at once, at the length of the file, so that a killed process leaves its old or its new content.
_BYTES = 4096
# Of about a hundred bytes each.
_MOST_RUNS = 32
# How long a cache without evictable entries counts as full, before a process looks through it again.
_FULL_SECONDS = 600.0
_EVICT_TO = 0.9
# Temporary files of this age have lost their writer.
_ABANDONED_SECONDS = 3600.0
_DAY = 24 * 3600.0
# Processes that begin within the same ten minutes are one run's: those of a job do not start at once.
_RUN_SECONDS = 600
# After so many entries in a row without space, and no hit of a spared one, spared entries may go. With shuffled media
# of which a twentieth is spared, that happens by chance one time in 170, and costs a tenth of the cache at most.
_IN_VAIN = 100
# How long to wait for another process that evicts, and not again for how long if that was not enough: looking through a
# million entries on a network disk takes minutes.
_WAIT_SECONDS, _POLL_SECONDS, _NO_WAIT_SECONDS = 2.0, 0.05, 60.0
# Neither follow a link to a file of the user's, nor wait on a pipe. ``filelock`` does not guard against the latter, and
# the account is locked and read through one descriptor.
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True)
class EntryFile:
    """``size`` in bytes, ``used``: last use in seconds since the epoch."""

    path: Path
    kind: str
    key: str
    size: int
    used: float


@dataclass(frozen=True)
class Pruned:
    """Number and bytes of the evicted entries, and bytes of the remaining ones."""

    count: int
    freed: int
    left: int


def entry_files(folder: Path) -> Iterator[EntryFile]:
    """All entries of a cache, of every kind, in no order."""
    for bucket in _buckets(folder):
        with suppress(FileNotFoundError):
            for file in list(os.scandir(bucket)):
                if not file.name.endswith(SUFFIX) or file.is_dir(follow_symlinks=False):
                    continue
                with suppress(FileNotFoundError):
                    state = file.stat(follow_symlinks=False)
                    key = file.name.removesuffix(SUFFIX)
                    yield EntryFile(Path(file.path), bucket.parent.name, key, state.st_size, state.st_mtime)


def evict(
    found: Collection[EntryFile], max_bytes: int, since: float = math.inf, giving_way: Collection[str] = ()
) -> Pruned:
    """Evict entries by last use until nine tenths of ``max_bytes`` are left, where there are more than ``max_bytes``.

    Args:
        found: all entries of a cache.
        since: entries used then (seconds since the epoch) or later stay, even beyond the limit.
        giving_way: kinds that are evicted all the same, after the others.
    """
    left = sum(stored.size for stored in found)
    count = freed = 0
    if left > max_bytes:
        evictable = [stored for stored in found if stored.used < since or stored.kind in giving_way]
        for stored in sorted(evictable, key=lambda stored: (stored.used >= since, stored.used, stored.key)):
            if left <= _EVICT_TO * max_bytes:
                break
            with suppress(FileNotFoundError):
                stored.path.unlink()
                count, freed = count + 1, freed + stored.size
            left -= stored.size
    return Pruned(count, freed, left)


def remove_abandoned(folder: Path) -> None:
    """Remove the temporary files of killed writers."""
    for bucket in _buckets(folder):
        for path in bucket.glob(".*.tmp"):
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                    path.unlink()


def prune(folder: Path, max_bytes: int) -> Pruned | None:
    """Evict entries by last use, of all runs; None where another process evicts now."""
    with eviction_lock(folder) as acquired:
        if not acquired:
            return None
        before = None
        with suppress(OSError), opened(folder) as account:  # an unusable account does not keep it from shrinking
            before = account.used
        remove_abandoned(folder)
        pruned = evict(list(entry_files(folder)), max_bytes)
        with suppress(OSError), opened(folder) as account:
            account.counted(pruned.left, before)
        return pruned


@contextmanager
def eviction_lock(folder: Path) -> Iterator[bool]:
    """Whether this process has the lock."""
    with os.fdopen(os.open(folder / ".prune.lock", _LOCK_FLAGS, 0o666), "rb+", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # a disk without locks: two processes that evict at once do each other no harm
            pass
        yield True


def _buckets(folder: Path) -> Iterator[Path]:
    return (bucket for kind in _folders(folder) for bucket in _folders(kind))


def _folders(folder: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []


class Outcome(Enum):
    """Of a request for space. FULL: nothing may be evicted. LATER: not now, and perhaps another time."""

    STORED = auto()
    FULL = auto()
    LATER = auto()


class Run(BaseModel):
    """State that the processes of a run share.

    Attributes:
        in_vain: entries in a row without space, since the last hit of a spared one.
        full_until: until then (seconds since the epoch) no process need look for evictable entries...
        giving_way: ... for which no other kinds give way than these.
        spares: there are spared entries, evictable after more entries in vain.
    """

    in_vain: int = Field(0, ge=0)
    full_until: float = 0.0
    giving_way: tuple[str, ...] = ()
    spares: bool = False

    def is_full(self, giving_way: Collection[str]) -> bool:
        """Whether the cache is known to be full for an entry for which these kinds give way."""
        now = time.time()  # a clock that was set back must not block
        return now < self.full_until <= now + _FULL_SECONDS and set(giving_way) <= set(self.giving_way)

    def refuse(self) -> Outcome:
        """Count one more entry in vain. After the last one that it takes, spared entries may be evicted."""
        if self.in_vain < _IN_VAIN:
            self.in_vain += 1
            if self.in_vain == _IN_VAIN and self.spares:
                self.full_until = 0.0
        return Outcome.LATER if self.spares else Outcome.FULL


class Account(BaseModel):
    """Content of the account. ``used``: bytes of all entries; None where they were not counted."""

    used: int | None = Field(None, ge=0)
    runs: dict[str, Run] = {}

    def run(self, name: str) -> Run:
        """The state of a run. Of many runs those are dropped that are not known to be full."""
        if name not in self.runs:
            while len(self.runs) >= _MOST_RUNS:
                del self.runs[min(self.runs, key=lambda other: (self.runs[other].is_full(()), other))]
            self.runs[name] = Run()
        return self.runs[name]

    def take(self, size: int, max_bytes: int) -> bool:
        """Take space for so many bytes; whether there was any."""
        if self.used is None or self.used + size > max_bytes:
            return False
        self.used += size
        return True

    def counted(self, left: int, before: int | None) -> None:
        """Set to the counted bytes, plus what others took since the account held ``before`` (None: none could)."""
        taken = 0 if self.used is None or before is None else max(0, self.used - before)
        self.used = left + taken


@contextmanager
def opened(folder: Path) -> Iterator[Account]:
    """A cache's account, locked inside the block; changes are written at its end.

    Raises:
        OSError: it cannot be read or written.
    """
    descriptor = os.open(folder / USAGE_FILE, _LOCK_FLAGS, 0o666)
    try:
        with suppress(OSError):  # a disk without locks: a rougher estimate
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        before = os.pread(descriptor, _BYTES, 0)
        try:
            account = Account.model_validate_json(before, strict=True)
        except ValidationError:  # new, or damaged: made anew
            account = Account()
        yield account
        after = account.model_dump_json(exclude_defaults=True).encode()
        after = after.ljust(_BYTES)
        if after != before:
            os.pwrite(descriptor, after, 0)
    finally:
        os.close(descriptor)


class Room:
    """Admission of entries within ``max_bytes``.

    Args:
        began: start of the run, in seconds since the epoch.
        giving_way: kinds whose entries are evicted for this one's, whenever they were used.
    """

    def __init__(self, folder: Path, max_bytes: int, began: float, giving_way: Collection[str]):
        self._folder, self._max_bytes, self._giving_way = folder, max_bytes, giving_way
        self.since = began // _RUN_SECONDS * _RUN_SECONDS
        self._wait_from = 0.0

    def take(self, size: int) -> Outcome:
        """Reserve ``size`` bytes; evict entries where they are missing. Raises OSError: the folder is not writable."""
        if size > self._max_bytes:
            return Outcome.FULL
        begun = time.monotonic()
        while True:
            outcome = self._take(size) or self._make(size)
            if outcome is not None:
                return outcome
            if begun < self._wait_from:
                return Outcome.LATER
            if time.monotonic() > begun + _WAIT_SECONDS:
                self._wait_from = time.monotonic() + _NO_WAIT_SECONDS
                return Outcome.LATER
            time.sleep(_POLL_SECONDS)

    def record_hit(self, used: float) -> None:
        """``used``: the hit entry's last use (seconds since the epoch). Raises OSError: the account is not writable."""
        if self.since - _DAY <= used < self.since:
            with opened(self._folder) as account:
                self._run(account).in_vain = 0

    def _take(self, size: int) -> Outcome | None:
        """None where a process has to look through the folder first."""
        with opened(self._folder) as account:
            if account.take(size, self._max_bytes):
                return Outcome.STORED
            run = self._run(account)
            return run.refuse() if account.used is not None and run.is_full(self._giving_way) else None

    def _make(self, size: int) -> Outcome | None:
        """Count, evict, and take; None where other processes were quicker, or do it now."""
        with eviction_lock(self._folder) as acquired:
            if not acquired:
                return None
            outcome = self._take(size)  # another process may have done it just now
            if outcome is not None:
                return outcome
            with opened(self._folder) as account:
                before, spares = account.used, self._run(account).in_vain < _IN_VAIN
            remove_abandoned(self._folder)
            found = list(entry_files(self._folder))
            stays = self.since - (_DAY if spares else 0)
            left = evict(found, self._max_bytes - size, stays, self._giving_way).left
            with opened(self._folder) as account:
                account.counted(left, before)
                if account.take(size, self._max_bytes):
                    return Outcome.STORED
                if left + size <= self._max_bytes:  # and others have taken it
                    return None
                run = self._run(account)
                spared = (stored for stored in found if self.since - _DAY <= stored.used < self.since)
                spares = spares and any(stored.kind not in self._giving_way for stored in spared)
                run.full_until, run.giving_way = time.time() + _FULL_SECONDS, tuple(self._giving_way)
                run.spares = spares
                return run.refuse()

    def _run(self, account: Account) -> Run:
        return account.run(f"{self.since:.0f}")
