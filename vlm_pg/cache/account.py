"""A cache's account: a small file in which all processes write down what it holds, and who asked for room in vain."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

NAME = ".room"
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
    descriptor = os.open(folder / NAME, flags, 0o666)
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
