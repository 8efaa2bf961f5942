"""What a run has of a cache that is full of earlier runs' entries: those of its media, and the room of all others."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.support.cache_entries import DAY, age, entry, epoch, held, key, size_of
from vlm_pg.cache import eviction
from vlm_pg.cache.eviction import Outcome
from vlm_pg.cache.store import Store

SIZE = size_of(entry(0))


def left_by_another(folder: Path, entries: int, asked: int, seconds: float) -> None:
    """A cache for so many entries, which is full of what a run that ended some time ago has asked for."""
    began = time.time() - seconds - 1200
    epoch(Store(folder, "frames", entries * SIZE, began), range(asked))
    age(folder, seconds)


@pytest.mark.parametrize("days, hits", [(0.02, [20, 20]), (0.9, [20, 20]), (1.1, [0, 20])])
def test_what_was_filled_before_a_run_is_there_in_its_first_epoch(tmp_path: Path, days: float, hits: list[int]) -> None:
    """Or was left by another run on the same media. Of what nobody used for longer others take the stored."""
    left_by_another(tmp_path / "cache", 20, 40, days * DAY)
    store = Store(tmp_path / "cache", "frames", 20 * SIZE, time.time())
    # Backwards: what is there comes last.
    assert [epoch(store, range(40)[::-1]) for _ in range(2)] == hits


@pytest.mark.parametrize("seed", range(3))
def test_what_is_found_now_and_then_stays(tmp_path: Path, seed: int) -> None:
    """Of shuffled media, however many of the others find no room meanwhile."""
    chance, entries, asked = random.Random(seed), 60, 300
    left_by_another(tmp_path / "cache", entries, asked, 0.8 * DAY)
    store = Store(tmp_path / "cache", "frames", entries * SIZE, time.time())
    assert asked - entries > 2 * eviction._IN_VAIN
    assert [epoch(store, chance.sample(range(asked), asked)) for _ in range(3)] == [entries] * 3
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
