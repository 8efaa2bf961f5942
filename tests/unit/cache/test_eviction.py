"""Admission and eviction: of media in turns a part stays, other runs' entries are spared, one limit for all."""

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

from tests.support.cache_entries import BYTES, DAY, age, entry, epoch, held, key, size_of
from vlm_pg.cache import eviction
from vlm_pg.cache.eviction import EntryFile, Outcome, entry_files, eviction_lock
from vlm_pg.cache.store import Store

SIZE, ENTRIES, PROCESSES = size_of(entry(0)), 40, 6

ORDERS: dict[str, Callable[[int], list[int]]] = {
    "the same": lambda _: list(range(ENTRIES)),
    "another each epoch": lambda seed: random.Random(seed).sample(range(ENTRIES), ENTRIES),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
def test_a_part_of_the_size_gives_that_part_of_the_hits(tmp_path: Path, order: str, share: float) -> None:
    """Throwing out what was not used for longest gives none in an order that stays the same."""
    limit = int(share * ENTRIES * SIZE)
    store = Store(tmp_path / "cache", "frames", limit)
    hits = [epoch(store, ORDERS[order](number)) for number in range(4)]
    assert hits == [0, *[int(share * ENTRIES)] * 3]
    assert store.uses.written == int(share * ENTRIES), "nothing is thrown out for its like"
    assert sum(stored.size for stored in entry_files(tmp_path / "cache")) <= limit


@pytest.mark.parametrize("first", ["features", "frames"])
def test_features_take_what_frames_leave(tmp_path: Path, first: str) -> None:
    """In whatever order they come, and though they were used in this run."""
    folder = tmp_path / "cache"
    frames, features = entry(0), entry(0, 4 * BYTES)
    limit = ENTRIES * size_of(frames) + 10 * (size_of(features) + 8)  # the kind has a longer name
    stores = {
        "frames": Store(folder, "frames", limit, giving_way=("features",)),
        "features": Store(folder, "features", limit),
    }
    sizes = {"frames": BYTES, "features": 4 * BYTES}
    for kind in sorted(stores, key=lambda kind: kind != first):
        for number in range(ENTRIES):
            stores[kind].write(key(number), entry(number, sizes[kind]))
    assert held(folder, "frames") == ENTRIES
    if first == "frames":
        assert held(folder, "features") == 10
    assert sum(stored.size for stored in entry_files(folder)) <= limit
    remaining = {stored.key for stored in entry_files(folder)}
    assert stores["features"].write(key(1000), entry(0, limit)) is Outcome.FULL
    assert {stored.key for stored in entry_files(folder)} == remaining


def test_one_that_is_not_kept_says_so(tmp_path: Path) -> None:
    limit = 2 * SIZE
    store = Store(tmp_path / "cache", "frames", limit)
    outcomes = [store.write(key(number), entry(number)) for number in range(4)]
    assert outcomes == [Outcome.STORED, Outcome.STORED, Outcome.FULL, Outcome.FULL]
    assert store.write(key(9), entry(9, 10 * BYTES)) is Outcome.FULL, "larger than the limit by itself"
    assert (held(tmp_path / "cache", "frames"), store.uses.written) == (2, 2)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every look through a folder."""
    seen: list[int] = []
    evict = eviction.evict
    monkeypatch.setattr(eviction, "evict", lambda *given: seen.append(1) or evict(*given))  # type: ignore[func-returns-value]
    return seen


def test_a_full_cache_is_looked_through_again_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: list[int]
) -> None:
    """Not for every entry: it may have a million. Nor by each process of a run."""
    folder, limit = tmp_path / "cache", 10 * SIZE
    store, other = (Store(folder, "frames", limit) for _ in range(2))
    epoch(store, list(range(ENTRIES)))
    assert len(looks) == 2, "at the beginning, and when it was full"
    for stored in entry_files(folder):
        stored.path.unlink()
    assert [one.write(key(0), entry(0)) for one in (store, other)] == [Outcome.FULL, Outcome.FULL]
    assert len(looks) == 2
    later = time.time() + 601
    monkeypatch.setattr(eviction.time, "time", lambda: later)
    assert other.write(key(0), entry(0)) is Outcome.STORED and len(looks) == 3
    assert store.write(key(1), entry(1)) is Outcome.STORED and len(looks) == 3


def test_a_clock_that_is_put_back_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: list[int]
) -> None:
    store = Store(tmp_path / "cache", "frames", 10 * SIZE)
    epoch(store, list(range(ENTRIES)))
    earlier = time.time() - 3600
    monkeypatch.setattr(eviction.time, "time", lambda: earlier)
    store.write(key(100), entry(100))
    assert len(looks) == 3


def test_frames_look_though_there_is_nothing_for_features(tmp_path: Path) -> None:
    """Features give way to frames."""
    folder, limit = tmp_path / "cache", 10 * (size_of(entry(0)) + 8)
    features = Store(folder, "features", limit)
    frames = Store(folder, "frames", limit, giving_way=("features",))
    assert [features.write(key(number), entry(number)) for number in range(11)][-2:] == [Outcome.STORED, Outcome.FULL]
    assert frames.write(key(0), entry(0)) is Outcome.STORED


def test_pruning_by_hand_makes_room_at_once(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache", "frames", 10 * SIZE)
    epoch(store, list(range(ENTRIES)))
    assert store.write(key(100), entry(100)) is Outcome.FULL
    assert eviction.prune(tmp_path / "cache", 0) is not None
    assert [store.write(key(number), entry(number)) for number in range(11)] == [Outcome.STORED] * 10 + [Outcome.FULL]


ODD = [
    *(b"", b"\xb2" * 32, b"[" * 9000, b'{"used": -1}', b'{"used": true}'),
    *(b'{"used": 100, "runs": {"1": {"in_vain": -3}}}', b'{"used": 100000000, "runs": {"' + b"x" * 4000 + b'": {}}}'),
]


@pytest.mark.parametrize("content", ODD)
def test_an_account_that_is_odd_is_made_anew(tmp_path: Path, content: bytes) -> None:
    folder, limit = tmp_path / "cache", 10 * SIZE
    epoch(Store(folder, "frames", limit), list(range(5)))
    (folder / eviction.USAGE_FILE).write_bytes(content)
    store = Store(folder, "frames", limit)
    epoch(store, list(range(ENTRIES)))
    assert held(folder, "frames") == 10 and store.uses.hits == 5


def left_by_another(folder: Path, entries: int, requested: int, seconds: float) -> None:
    """A cache for so many entries, which is full of what a run that ended some time ago has requested."""
    began = time.time() - seconds - 1200
    epoch(Store(folder, "frames", entries * SIZE, began), range(requested))
    age(folder, seconds)


@pytest.mark.parametrize("days, hits", [(0.02, [20, 20]), (0.9, [20, 20]), (1.1, [0, 20])])
def test_what_was_filled_before_a_run_is_there_in_its_first_epoch(tmp_path: Path, days: float, hits: list[int]) -> None:
    """Or was left by another run on the same media. Others evict what was unused for longer."""
    left_by_another(tmp_path / "cache", 20, 40, days * DAY)
    store = Store(tmp_path / "cache", "frames", 20 * SIZE, time.time())
    # Backwards: what is there comes last.
    assert [epoch(store, range(40)[::-1]) for _ in range(2)] == hits


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in (1, 2))])
def test_what_is_found_now_and_then_stays(tmp_path: Path, seed: int) -> None:
    """Of shuffled media, however many of the others find no room meanwhile."""
    chance, entries, requested = random.Random(seed), 60, 300
    left_by_another(tmp_path / "cache", entries, requested, 0.8 * DAY)
    store = Store(tmp_path / "cache", "frames", entries * SIZE, time.time())
    assert requested - entries > 2 * eviction._IN_VAIN
    assert [epoch(store, chance.sample(range(requested), requested)) for _ in range(3)] == [entries] * 3
    assert store.uses.written == 0


def test_media_of_yesterdays_other_run_make_room_for_todays(tmp_path: Path) -> None:
    """At first it is not known that they are others; then nothing of them stays that this run could use the room of."""
    left_by_another(tmp_path / "cache", 150, 150, 0.8 * DAY)
    store, others = Store(tmp_path / "cache", "frames", 150 * SIZE, time.time()), range(1000, 1150)
    outcomes = [store.write(key(number), entry(number)) for number in others]
    assert outcomes == [Outcome.LATER] * eviction._IN_VAIN + [Outcome.STORED] * 50
    assert [epoch(store, others) for _ in range(2)] == [50, 150]
    assert store.write(key(2000), entry(2000)) is Outcome.FULL, "what this run has used stays"


def test_processes_of_a_run_count_together(tmp_path: Path) -> None:
    """So do those of a rank that has begun a little later."""
    left_by_another(tmp_path / "cache", 150, 150, 0.8 * DAY)
    began = time.time() // 600 * 600
    stores = [Store(tmp_path / "cache", "frames", 150 * SIZE, began + 50 * number) for number in range(10)]
    outcomes = [stores[number % 10].write(key(number), entry(number)) for number in range(1000, 1110)]
    assert outcomes == [Outcome.LATER] * eviction._IN_VAIN + [Outcome.STORED] * 10


def test_another_run_counts_anew(tmp_path: Path) -> None:
    """That one had no use for what is there says nothing of the next."""
    left_by_another(tmp_path / "cache", 50, 50, 0.8 * DAY)
    now = time.time()
    first, second = (Store(tmp_path / "cache", "frames", 50 * SIZE, began) for began in (now - 1200, now))
    for number in range(eviction._IN_VAIN):
        assert first.write(key(1000 + number), entry(number)) is Outcome.LATER
    assert second.write(key(2000), entry(0)) is Outcome.LATER
    assert epoch(second, range(50)) == 50
    assert first.write(key(2000), entry(0)) is Outcome.FULL, "since it began somebody has used it all"


def test_what_was_used_just_before_a_run_and_in_it_is_of_the_run(tmp_path: Path) -> None:
    """Disks need not write the time of every read, but of this one."""
    left_by_another(tmp_path / "cache", 20, 20, 0)
    now = time.time() + 900
    store = Store(tmp_path / "cache", "frames", 20 * SIZE, now)
    age(tmp_path / "cache", -(now // 600 * 600 - time.time() - 60))  # a minute before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eviction.time, "time", lambda: now)
        before = {stored.key: stored.used for stored in eviction.entry_files(tmp_path / "cache")}
        assert epoch(store, [3, 4]) == 2
    changed = {stored.key for stored in eviction.entry_files(tmp_path / "cache") if stored.used != before[stored.key]}
    assert changed == {key(3), key(4)}


def test_an_account_of_many_runs_stays_small_and_knows_who_found_it_full(tmp_path: Path) -> None:
    """An old run's entries would otherwise each be looked for through the whole folder."""
    folder, now = tmp_path / "cache", time.time()
    store = Store(folder, "frames", 5 * SIZE, now - 7 * DAY, giving_way=("features",))
    epoch(store, range(10))
    full = eviction.Run(in_vain=100, full_until=now + 599.123456, giving_way=("features",), spares=True)
    with eviction.opened(folder) as of_all:
        of_all.runs = {name: full.model_copy() for name in of_all.runs}
        [name] = of_all.runs
    for number in range(100):
        later = Store(folder, "frames", 5 * SIZE, now - 600 * number)
        later._room.record_hit(now - 600 * number - 3600)  # type: ignore[union-attr]
    with eviction.opened(folder) as of_all:
        assert of_all.runs[name] == full and len(of_all.runs) == eviction._MOST_RUNS
        of_all.runs = {f"{1_700_000_000 + number}": full for number in range(eviction._MOST_RUNS)}
    assert (folder / eviction.USAGE_FILE).stat().st_size == eviction._BYTES
    with eviction.opened(folder) as of_all:
        assert len(of_all.runs) == eviction._MOST_RUNS and held(folder, "frames") == 5


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
    """Ends with how many were not stored."""
    store = Store(folder, "frames", limit)
    outcomes = [store.write(key(other), entry(other)) for other in range(1000 * number, 1000 * number + entries)]
    os._exit(sum(outcome is not Outcome.STORED for outcome in outcomes))


@pytest.mark.parametrize(
    "account_of",
    ["no cache", *(pytest.param(one, marks=pytest.mark.matrix) for one in ("no account", "odd", "its own"))],
)
def test_many_processes_keep_to_one_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, account_of: str) -> None:
    """Each of them would fill it alone, and asks while the first one counts."""
    folder, limit = tmp_path / "cache", 50 * SIZE
    slow_looks(monkeypatch)
    if account_of != "no cache":
        epoch(Store(folder, "frames", limit), range(10_000, 10_030))
    if account_of == "no account":
        (folder / eviction.USAGE_FILE).unlink()
    elif account_of == "odd":
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


@pytest.mark.parametrize("has_account", [pytest.param(False, marks=pytest.mark.matrix), True])
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
        remaining = [store.write(key(number), entry(number)) for number in range(2000, 2012)].count(Outcome.STORED)
        assert held(folder, "frames") == 10 and remaining == 10 - store.has(key(1000))
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
    "kills, loses_account", [(10, True), *(pytest.param(200, lost, marks=pytest.mark.matrix) for lost in (False, True))]
)
def test_the_limit_holds_at_every_moment(tmp_path: Path, kills: int, loses_account: bool) -> None:
    """While writers are killed and others come, and the account is lost, so that all is counted while they write."""
    context, chance = multiprocessing.get_context("fork"), random.Random(kills)
    folder, limit, most = tmp_path / "cache", 100 * SIZE, 0
    Store(folder, "frames", limit)
    processes: list[Any] = [None] * PROCESSES
    for number in range(kills):
        slot = chance.randrange(PROCESSES)
        if processes[slot] is not None:
            processes[slot].kill()
            processes[slot].join()
        processes[slot] = context.Process(target=_ask, args=(folder, limit, number))
        processes[slot].start()
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
