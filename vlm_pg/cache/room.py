"""Whether one more entry has room in a cache, of which many processes take at the same time."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vlm_pg.cache.places import prune

_ACCOUNT = ".room"
_MOST_ACCOUNT_BYTES = 32
# How long a cache in which nothing may be thrown out counts as full, before it is looked through again.
_FULL_SECONDS = 600.0


class Room:
    """What is left of a cache's bytes.

    The bytes of all entries are kept in a file, which every writer adds to before it writes. That is an estimate: an
    entry may be removed by hand, or its writer killed, or be writing while somebody counts. Who finds no room looks
    through the folder, throws out what may go, and corrects it. So the limit holds but for an entry a process.

    Args:
        max_bytes: of all entries.
        since, giving_way: as in ``prune``.
    """

    def __init__(self, folder: Path, max_bytes: int, since: float, giving_way: Collection[str]):
        self._folder, self._max_bytes, self._since, self._giving_way = folder, max_bytes, since, giving_way
        self._full_until = 0.0

    def take(self, size: int) -> bool:
        """Take room for ``size`` bytes, which is made where there is none. Whether there is.

        Raises:
            OSError: the folder cannot be written.
        """
        if size > self._max_bytes:
            return False
        taken = self._take(size)
        if taken or (taken is False and time.monotonic() < self._full_until):
            return bool(taken)
        before = self._used()
        pruned = prune(self._folder, self._max_bytes - size, self._since, self._giving_way)
        if pruned is None:  # somebody counts or makes room at this moment
            return taken is None
        self._correct(pruned.left, before)
        taken = self._take(size)
        self._full_until = 0.0 if taken else time.monotonic() + _FULL_SECONDS
        return bool(taken)

    def _take(self, size: int) -> bool | None:
        """None where nobody knows how much there is."""
        with self._account() as account:
            used = _number(os.pread(account, _MOST_ACCOUNT_BYTES, 0))
            if used is None:
                return None
            if used + size > self._max_bytes:
                return False
            _put(account, used + size)
            return True

    def _used(self) -> int | None:
        with self._account() as account:
            return _number(os.pread(account, _MOST_ACCOUNT_BYTES, 0))

    def _correct(self, counted: int, before: int | None) -> None:
        """Put down what was counted, and what others took since the account said ``before``."""
        with self._account() as account:
            now = _number(os.pread(account, _MOST_ACCOUNT_BYTES, 0))
            taken = 0 if now is None or before is None else max(0, now - before)
            _put(account, counted + taken)

    @contextmanager
    def _account(self) -> Iterator[int]:
        # neither a link to a file of the user's, nor a pipe that waits
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(self._folder / _ACCOUNT, flags, 0o666)
        try:
            with suppress(OSError):  # a disk without locks: then it is an estimate a little more
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)


def _number(content: bytes) -> int | None:
    return int(content) if content.isdigit() else None


def _put(account: int, used: int) -> None:
    os.pwrite(account, str(used).zfill(_MOST_ACCOUNT_BYTES).encode(), 0)
