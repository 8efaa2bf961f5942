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

import time
from collections.abc import Collection
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path

from vlm_pg.cache.account import Account, Run, opened
from vlm_pg.cache.places import Place, Pruned, alone, places, remove_abandoned, throw_out

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
