"""A cache that is too small holds a part of what is asked for in turns, and that part is found every time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cache_entries import BYTES, entry, epoch, held, key, size_of
from vlm_pg.cache import eviction
from vlm_pg.cache.eviction import Outcome, entry_files
from vlm_pg.cache.store import Store

ENTRIES = 40

ORDERS: dict[str, Callable[[int], list[int]]] = {
    "the same": lambda _: list(range(ENTRIES)),
    "another each epoch": lambda seed: random.Random(seed).sample(range(ENTRIES), ENTRIES),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
def test_a_part_of_the_size_gives_that_part_of_the_hits(tmp_path: Path, order: str, share: float) -> None:
    """Throwing out what was not used for longest gives none in an order that stays the same."""
    limit = int(share * ENTRIES * size_of(entry(0)))
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
    kept = {stored.key for stored in entry_files(folder)}
    assert stores["features"].write(key(1000), entry(0, limit)) is Outcome.FULL
    assert {stored.key for stored in entry_files(folder)} == kept


def test_one_that_is_not_kept_says_so(tmp_path: Path) -> None:
    limit = 2 * size_of(entry(0))
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
    folder, limit = tmp_path / "cache", 10 * size_of(entry(0))
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
    store = Store(tmp_path / "cache", "frames", 10 * size_of(entry(0)))
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
    store = Store(tmp_path / "cache", "frames", 10 * size_of(entry(0)))
    epoch(store, list(range(ENTRIES)))
    assert store.write(key(100), entry(100)) is Outcome.FULL
    assert eviction.prune(tmp_path / "cache", 0) is not None
    assert [store.write(key(number), entry(number)) for number in range(11)] == [Outcome.STORED] * 10 + [Outcome.FULL]


ODD = [
    b"",
    b"-5",
    b"9" * 40,
    b"many",
    b"\xb2" * 32,
    b"\0" * 4096,
    b"[" * 9000,
    b'{"used": -1}',
    b'{"used": true}',
    b'{"used": 1e3000}',
    b'{"used": 1' + b"0" * 3000 + b"}",
    b'{"used": 100, "runs": {"1": {"in_vain": -3}}}',
    b'{"used": 100000000, "runs": {"' + b"x" * 4000 + b'": {}}}',
]


@pytest.mark.parametrize("content", ODD)
def test_an_account_that_is_odd_is_made_anew(tmp_path: Path, content: bytes) -> None:
    folder, limit = tmp_path / "cache", 10 * size_of(entry(0))
    epoch(Store(folder, "frames", limit), list(range(5)))
    (folder / eviction.USAGE_FILE).write_bytes(content)
    store = Store(folder, "frames", limit)
    epoch(store, list(range(ENTRIES)))
    assert held(folder, "frames") == 10 and store.uses.hits == 5


def test_an_account_that_leads_elsewhere_is_not_written(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    store = Store(folder, "frames", 10**6)
    (tmp_path / "mine").write_text("mine")
    (folder / eviction.USAGE_FILE).symlink_to(tmp_path / "mine")
    with pytest.raises(OSError):
        store.write(key(0), entry(0))
    assert (tmp_path / "mine").read_text() == "mine"
