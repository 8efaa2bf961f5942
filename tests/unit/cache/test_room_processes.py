"""One limit for many processes: it holds, nobody's entry is lost to another's look, and kills do no harm."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.cache_entries import DAY, age, entry, epoch, held, key, size_of
from vlm_pg.cache import eviction
from vlm_pg.cache.eviction import EntryFile, Outcome, entry_files, eviction_lock
from vlm_pg.cache.store import Store

SIZE, PROCESSES = size_of(entry(0)), 6


def together(work: Callable[..., None], *arguments: Any) -> list[int | None]:
    """Run it in several processes, which are given their numbers; their exit codes."""
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=work, args=(number, *arguments)) for number in range(PROCESSES)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return [worker.exitcode for worker in workers]


def slow_looks(patch: pytest.MonkeyPatch) -> None:
    """As in a large folder on a network's disk; others have the patience for it, on a machine of any load."""

    def slowly(folder: Path) -> Iterator[EntryFile]:
        yield from entry_files(folder)
        time.sleep(0.3)

    patch.setattr(eviction, "entry_files", slowly)
    patch.setattr(eviction, "_WAIT_SECONDS", 120.0)


def _fill(number: int, folder: Path, limit: int, entries: int) -> None:
    """Ends with how many were not kept."""
    store = Store(folder, "frames", limit)
    outcomes = [store.write(key(other), entry(other)) for other in range(1000 * number, 1000 * number + entries)]
    os._exit(sum(outcome is not Outcome.STORED for outcome in outcomes))


@pytest.mark.parametrize("account_of", ["no cache", "a cache without one", "one that is odd", "a cache"])
def test_many_processes_keep_to_one_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, account_of: str) -> None:
    """Each of them would fill it alone, and asks while the first one counts."""
    folder, limit = tmp_path / "cache", 50 * SIZE
    slow_looks(monkeypatch)
    if account_of != "no cache":
        epoch(Store(folder, "frames", limit), range(10_000, 10_030))
    if account_of == "a cache without one":
        (folder / eviction.USAGE_FILE).unlink()
    elif account_of == "one that is odd":
        (folder / eviction.USAGE_FILE).write_bytes(b"odd")
    together(_fill, folder, limit, 100)
    assert 45 <= held(folder, "frames") <= 50 + PROCESSES


def test_nobodys_entries_are_lost_while_another_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, limit = tmp_path / "cache", 100 * SIZE
    epoch(Store(folder, "frames", limit), range(10_000, 10_100))
    age(folder, 7 * DAY)
    slow_looks(monkeypatch)
    assert together(_fill, folder, limit, 10) == [0] * PROCESSES
    assert held(folder, "frames") <= 100 + PROCESSES


def test_who_waits_in_vain_is_told_so_and_does_not_wait_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is not full."""
    folder, waits = tmp_path / "cache", [0.0]
    store = Store(folder, "frames", 10 * SIZE)
    epoch(store, range(10))
    age(folder, 2 * DAY)
    monkeypatch.setattr(eviction.time, "sleep", waits.append)
    monkeypatch.setattr(eviction.time, "monotonic", lambda: 1000 + sum(waits))
    with eviction_lock(folder) as acquired:
        assert acquired
        assert store.write(key(100), entry(100)) is Outcome.LATER
        number = len(waits)
        assert number > 10
        assert store.write(key(100), entry(100)) is Outcome.LATER and len(waits) == number
        waits.append(100.0)
        assert store.write(key(100), entry(100)) is Outcome.LATER and len(waits) > number + 10
    assert store.write(key(100), entry(100)) is Outcome.STORED


def test_what_others_take_while_somebody_looks_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they have taken what was made, more is."""
    folder, limit, looks = tmp_path / "cache", 50 * SIZE, [0]
    small, large = (Store(folder, "frames", limit) for _ in range(2))
    epoch(small, range(45))
    age(folder, 2 * DAY)

    def meanwhile(cache: Path) -> list[EntryFile]:
        found = list(entry_files(cache))
        if looks[0] == 0:
            assert [small.write(key(number), entry(number)) for number in range(100, 105)] == [Outcome.STORED] * 5
        looks[0] += 1
        return found

    monkeypatch.setattr(eviction, "entry_files", meanwhile)
    monkeypatch.setattr(eviction, "_WAIT_SECONDS", 120.0)
    assert large.write(key(200), entry(200, 9 * SIZE)) is Outcome.STORED
    with eviction.opened(folder) as known:
        assert known.used == sum(stored.size for stored in entry_files(folder)) <= limit
    assert looks == [2]


def test_who_comes_after_another_does_not_look_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, looks = tmp_path / "cache", [0]
    store, other = (Store(folder, "frames", 30 * SIZE) for _ in range(2))
    epoch(store, range(30))
    age(folder, 2 * DAY)

    def counted(cache: Path) -> Iterator[EntryFile]:
        looks[0] += 1
        return entry_files(cache)

    @contextmanager
    def after_the_other(cache: Path) -> Iterator[bool]:
        monkeypatch.setattr(eviction, "eviction_lock", eviction_lock)
        assert other.write(key(100), entry(100)) is Outcome.STORED
        with eviction_lock(cache) as acquired:
            yield acquired

    monkeypatch.setattr(eviction, "entry_files", counted)
    monkeypatch.setattr(eviction, "eviction_lock", after_the_other)
    assert store.write(key(200), entry(200)) is Outcome.STORED and looks == [1]


def _write_and_be_killed(folder: Path, limit: int, step: int) -> None:
    """Make room and keep an entry; killed before the operation on files of that number, or halfway through a write."""
    seen = 0

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in ("open", "os.rename", "os.remove", "os.scandir") and str(folder) in str(arguments[0]):
            one_more()

    def one_more() -> None:
        nonlocal seen
        seen += 1
        if seen == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(descriptor: int, content: bytes, offset: int) -> int:
        one_more()
        done = pwrite(descriptor, content, offset)
        one_more()
        return done

    pwrite, os.pwrite = os.pwrite, write  # type: ignore[assignment]
    sys.addaudithook(count)
    assert Store(folder, "frames", limit).write(key(1000), entry(1000)) is Outcome.STORED
    os._exit(0)


@pytest.mark.parametrize("has_account", [False, True])
def test_who_is_killed_while_making_room_leaves_an_account_that_others_use(tmp_path: Path, has_account: bool) -> None:
    context, limit = multiprocessing.get_context("fork"), 10 * SIZE
    for step in range(1, 200):
        folder = tmp_path / f"killed-{step}"
        epoch(Store(folder, "frames", limit), range(10))
        age(folder, 2 * DAY)
        if not has_account:
            (folder / eviction.USAGE_FILE).unlink()
        writer = context.Process(target=_write_and_be_killed, args=(folder, limit, step))
        writer.start()
        writer.join()
        assert writer.exitcode in (0, -signal.SIGKILL)
        store = Store(folder, "frames", limit)
        kept = [store.write(key(number), entry(number)) for number in range(2000, 2012)].count(Outcome.STORED)
        assert held(folder, "frames") == 10 and kept == 10 - store.has(key(1000))
        if writer.exitcode == 0:
            break
    assert writer.exitcode == 0 and step > 12


def _ask(folder: Path, limit: int, seed: int) -> None:
    """For ever. Now and then half of the entries grow old."""
    store, chance = Store(folder, "frames", limit), random.Random(seed)
    while True:
        epoch(store, [chance.randrange(1000) for _ in range(50)])
        for stored in entry_files(folder):
            if chance.random() < 0.5:
                with suppress(FileNotFoundError):
                    os.utime(stored.path, (0, 0))


@pytest.mark.parametrize(
    "kills, loses_account", [(20, True), *(pytest.param(200, lost, marks=pytest.mark.matrix) for lost in (False, True))]
)
def test_the_limit_holds_at_every_moment(tmp_path: Path, kills: int, loses_account: bool) -> None:
    """While writers are killed and others come, and the account is lost, so that all is counted while they write."""
    context, chance = multiprocessing.get_context("fork"), random.Random(kills)
    folder, limit, most = tmp_path / "cache", 100 * SIZE, 0
    Store(folder, "frames", limit)
    processes: list[Any] = [None] * PROCESSES
    for number in range(kills):
        stored = chance.randrange(PROCESSES)
        if processes[stored] is not None:
            processes[stored].kill()
            processes[stored].join()
        processes[stored] = context.Process(target=_ask, args=(folder, limit, number))
        processes[stored].start()
        for _ in range(chance.randrange(4)):
            most = max(most, sum(entry.size for entry in entry_files(folder)))
        if loses_account and chance.random() < 0.1:
            (folder / eviction.USAGE_FILE).unlink(missing_ok=True)
    while most < 50 * SIZE:
        most = sum(entry.size for entry in entry_files(folder))
    for process in processes:
        if process is not None:
            process.kill()
            process.join()
    print(f"at most {most / SIZE:.0f} entries where 100 are allowed, after {kills} kills")
    assert most <= limit + PROCESSES * SIZE
