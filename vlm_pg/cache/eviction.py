"""Whether one more entry has room in a cache, of which many processes take at the same time.

The bytes of all entries are kept in an account (``account.py``), to which every writer adds before it writes. Where
they are not known, nobody takes any before somebody has counted. That is an estimate: an entry may be removed by hand,
its writer be killed, or be writing while somebody counts, which alone makes it too low. So the limit holds but for an
entry a process. Who finds no room looks through the folder, alone, throws out what may go, and puts down what is left
and what others took meanwhile. These wait for a moment: an entry is kept, the cache is full, or it has room later.

What may go? What was used since the run began stays. Of media that are asked for in turns, epoch after epoch, and do
not fit, a part then stays and is found each time; thrown out by last use alone, the next to go would always be the next
that is wanted. What a fill or another run used in the day before is spared as well, as long as it may be of this run's
media: until so many entries in a row had no room that a run on these media would have found one of them meanwhile. A
run on other media then takes their place, instead of being shut out by those of yesterday.

That nothing may go is put down in the account as well, so that one process of a run looks, and not each.
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

USAGE_FILE = ".room"
# Written at once, at the length of the file, so that a process that is killed leaves what was there or what it wrote.
_BYTES = 4096
_MOST_RUNS = 32
# How long a cache in which nothing may be thrown out counts as full, before somebody looks through it again.
_FULL_SECONDS = 600.0


class Run(BaseModel):
    """What the processes of a run have found out together.

    Attributes:
        in_vain: how many of its entries in a row had no room, while it found nothing of what is spared for it.
        full_until: until then (seconds since the epoch) nobody need look for something that may be thrown out...
        giving_way: ... and so for those for whom no other kinds give way than these.
        spares: there is something that may be thrown out once the run has asked in vain for longer.
    """

    in_vain: int = Field(0, ge=0)
    full_until: float = 0.0
    giving_way: tuple[str, ...] = ()
    spares: bool = False

    def is_full(self, giving_way: Collection[str]) -> bool:
        """Whether that is known, for somebody for whom these kinds give way."""
        now = time.time()  # and a clock that was put back keeps nobody waiting
        return now < self.full_until <= now + _FULL_SECONDS and set(giving_way) <= set(self.giving_way)

    def found_full(self, giving_way: Collection[str], spares: bool) -> None:
        """Somebody has looked, and there was nothing."""
        self.full_until, self.giving_way, self.spares = time.time() + _FULL_SECONDS, tuple(giving_way), spares


class Account(BaseModel):
    """What the file holds. ``used``: bytes of all entries; None where nobody has counted them."""

    used: int | None = Field(None, ge=0)
    runs: dict[str, Run] = {}

    def run(self, name: str) -> Run:
        """A run's part, of which it is the only reader. Of many runs those are dropped that nobody knows to be full."""
        if name not in self.runs:
            while len(self.runs) >= _MOST_RUNS:
                del self.runs[min(self.runs, key=lambda other: (self.runs[other].is_full(()), other))]
            self.runs[name] = Run()
        return self.runs[name]

    def take(self, size: int, max_bytes: int) -> bool:
        """Whether there is room for so many bytes more; then it is taken."""
        if self.used is None or self.used + size > max_bytes:
            return False
        self.used += size
        return True

    def counted(self, left: int, before: int | None) -> None:
        """So much was found, and more was taken meanwhile, since the account said ``before``.

        Where that was None, nobody could take any.
        """
        taken = 0 if self.used is None or before is None else max(0, self.used - before)
        self.used = left + taken


@contextmanager
def opened(folder: Path) -> Iterator[Account]:
    """A cache's account, which is nobody else's inside the block; what is changed there is written at its end.

    Raises:
        OSError: it cannot be read or written.
    """
    # neither a link to a file of the user's, nor a pipe that waits
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(folder / USAGE_FILE, flags, 0o666)
    try:
        with suppress(OSError):  # a disk without locks: then it is an estimate a little more
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        before = os.pread(descriptor, _BYTES, 0)
        account = _read(before)
        yield account
        after = _written(account)
        if after != before:
            os.pwrite(descriptor, after, 0)
    finally:
        os.close(descriptor)


def _read(content: bytes) -> Account:
    try:
        return Account.model_validate_json(content, strict=True)
    except ValidationError:  # new, or odd: made anew
        return Account()


def _written(account: Account) -> bytes:
    """At the file's length. What has grown longer by odd names in it starts with no runs."""
    content = account.model_dump_json(exclude_defaults=True).encode()
    if len(content) > _BYTES:
        content = Account(used=account.used).model_dump_json(exclude_defaults=True).encode()
    return content.ljust(_BYTES)


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


_DAY = 24 * 3600.0
# Processes that begin within the same ten minutes are one run's: those of a job do not start at once.
_RUN_SECONDS = 600
# So many entries in a row without room, and nothing spared was found: of shuffled media of which a twentieth is spared,
# that happens one time in 170, and costs a tenth of the cache at most.
_IN_VAIN = 100
# How long somebody waits for another process that makes room, and not again for how long if that was not enough: a look
# through a million entries on a network's disk takes minutes.
_WAIT_SECONDS, _ASK_SECONDS, _NO_WAIT_SECONDS = 2.0, 0.05, 60.0


class Outcome(Enum):
    """Of asking for room. FULL: nothing may be thrown out. LATER: not now, and perhaps another time."""

    KEPT = auto()
    FULL = auto()
    LATER = auto()


class Room:
    """What is left of a cache's bytes.

    Args:
        max_bytes: of all entries.
        began: when the run did, in seconds since the epoch.
        giving_way: kinds whose entries are thrown out for this one's, whenever they were used.
    """

    def __init__(self, folder: Path, max_bytes: int, began: float, giving_way: Collection[str]):
        self._folder, self._max_bytes, self._giving_way = folder, max_bytes, giving_way
        self.since = began // _RUN_SECONDS * _RUN_SECONDS
        self._wait_from = 0.0

    def take(self, size: int) -> Outcome:
        """Take room for ``size`` bytes, which is made where there is none.

        Raises:
            OSError: the folder cannot be written.
        """
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
            time.sleep(_ASK_SECONDS)

    def found(self, used: float) -> None:
        """The run has found an entry, which had last been used then (seconds since the epoch).

        Raises:
            OSError: the account cannot be written.
        """
        if self.since - _DAY <= used < self.since:
            with opened(self._folder) as account:
                self._run(account).in_vain = 0

    def _take(self, size: int) -> Outcome | None:
        """None where somebody has to look through the folder before that is known."""
        with opened(self._folder) as account:
            if account.take(size, self._max_bytes):
                return Outcome.KEPT
            run = self._run(account)
            return _refused(run) if account.used is not None and run.is_full(self._giving_way) else None

    def _make(self, size: int) -> Outcome | None:
        """Count, throw out what may go, and take; None where others were quicker, or do it at this moment."""
        with alone(self._folder) as is_alone:
            if not is_alone:
                return None
            outcome = self._take(size)  # somebody else may have done it just now
            if outcome is not None:
                return outcome
            with opened(self._folder) as account:
                before, spares = account.used, self._run(account).in_vain < _IN_VAIN
            remove_abandoned(self._folder)
            found = list(places(self._folder))
            stays = self.since - (_DAY if spares else 0)
            left = throw_out(found, self._max_bytes - size, stays, self._giving_way).left
            with opened(self._folder) as account:
                account.counted(left, before)
                if account.take(size, self._max_bytes):
                    return Outcome.KEPT
                if left + size <= self._max_bytes:  # and others have taken it
                    return None
                run = self._run(account)
                run.found_full(self._giving_way, any(self._is_spared(place) for place in found) and spares)
                return _refused(run)

    def _is_spared(self, place: Place) -> bool:
        return self.since - _DAY <= place.used < self.since and place.kind not in self._giving_way

    def _run(self, account: Account) -> Run:
        return account.run(f"{self.since:.0f}")


def _refused(run: Run) -> Outcome:
    """One more in vain. With the last one that it takes, what was spared may go."""
    if run.in_vain < _IN_VAIN:
        run.in_vain += 1
        if run.in_vain == _IN_VAIN and run.spares:
            run.full_until = 0.0
    return Outcome.LATER if run.spares else Outcome.FULL


def prune(folder: Path, max_bytes: int) -> Pruned | None:
    """Throw out entries by last use, whoever uses them, as ``throw_out``; None where somebody else makes room now."""
    with alone(folder) as is_alone:
        if not is_alone:
            return None
        before = None
        with (
            suppress(OSError),
            opened(folder) as account,
        ):  # without one that can be used, it is made smaller all the same
            before = account.used
        remove_abandoned(folder)
        pruned = throw_out(list(places(folder)), max_bytes)
        with suppress(OSError), opened(folder) as account:
            account.counted(pruned.left, before)
        return pruned
