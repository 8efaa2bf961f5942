"""A cache that is too small holds a part of what is asked for in turns, and that part is found every time."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from vlm_pg.cache import room as module
from vlm_pg.cache.entry_file import Entry, serialized
from vlm_pg.cache.places import places
from vlm_pg.cache.store import Store, key_of

ENTRIES, BYTES = 40, 1000


def entry(number: int, size: int = BYTES) -> Entry:
    return Entry({"values": np.random.default_rng(number).integers(0, 255, size, dtype=np.uint8)}, {})


def key(number: int) -> str:
    return key_of({"n": number})


def size_of(one: Entry) -> int:
    content = serialized("frames", key(0), one)
    assert content is not None
    return len(content)


def held(folder: Path, kind: str) -> int:
    return sum(place.kind == kind for place in places(folder))


DAY = 24 * 3600.0


def age(folder: Path, seconds: float = 2 * DAY) -> None:
    """As after a while, in which nobody used it."""
    for place in places(folder):
        os.utime(place.path, (place.used - seconds, place.used - seconds))


def epoch(store: Store, order: list[int]) -> int:
    """Each is read, and made where it is not there; how many were there."""
    hits = store.uses.hits
    for number in order:
        if store.read(key(number)) is None:
            store.write(key(number), entry(number))
    return store.uses.hits - hits


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
    assert sum(place.size for place in places(tmp_path / "cache")) <= limit


@pytest.mark.parametrize("days, hits", [(0.0, [20, 20]), (0.9, [20, 20]), (1.1, [0, 20])])
def test_what_was_filled_before_a_run_is_there_in_its_first_epoch(tmp_path: Path, days: float, hits: list[int]) -> None:
    """Or was left by another run on the same media. Of what nobody used for longer others take the place."""
    limit = int(0.5 * ENTRIES * size_of(entry(0)))
    assert epoch(Store(tmp_path / "cache", "frames", limit), list(range(ENTRIES))) == 0
    age(tmp_path / "cache", days * DAY)
    store = Store(tmp_path / "cache", "frames", limit)
    # Backwards: what is there comes last.
    assert [epoch(store, list(range(ENTRIES))[::-1]) for _ in range(2)] == hits


def test_what_earlier_runs_used_makes_room(tmp_path: Path) -> None:
    """Of these what was not used for longest first; what this run has read stays, whenever it was made."""
    limit = int(0.5 * ENTRIES * size_of(entry(0)))
    epoch(Store(tmp_path / "cache", "frames", limit), list(range(ENTRIES // 2)))
    age(tmp_path / "cache")
    store = Store(tmp_path / "cache", "frames", limit)
    assert epoch(store, [3, 4]) == 2
    others = list(range(100, 100 + ENTRIES))
    assert [epoch(store, others) for _ in range(2)] == [0, ENTRIES // 2 - 2]
    assert epoch(store, [3, 4]) == 2


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
    assert sum(place.size for place in places(folder)) <= limit
    kept = {place.key for place in places(folder)}
    assert not stores["features"].write(key(1000), entry(0, limit))
    assert {place.key for place in places(folder)} == kept


def test_one_that_is_not_kept_says_so(tmp_path: Path) -> None:
    limit = 2 * size_of(entry(0))
    store = Store(tmp_path / "cache", "frames", limit)
    assert [store.write(key(number), entry(number)) for number in range(4)] == [True, True, False, False]
    assert not store.write(key(9), entry(9, 10 * BYTES)), "larger than the limit by itself"
    assert (held(tmp_path / "cache", "frames"), store.uses.written) == (2, 2)


def test_a_full_cache_is_looked_through_again_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for every entry: it may have a million."""
    looks: list[int] = []
    prune = module.prune
    monkeypatch.setattr(module, "prune", lambda *given: looks.append(1) or prune(*given))  # type: ignore[func-returns-value]
    folder = tmp_path / "cache"
    store = Store(folder, "frames", 10 * size_of(entry(0)))
    epoch(store, list(range(ENTRIES)))
    assert len(looks) == 2, "at the beginning, and when it was full"
    for place in places(folder):
        place.path.unlink()
    assert not store.write(key(0), entry(0))
    monkeypatch.setattr(module.time, "monotonic", lambda: 1e9)
    assert store.write(key(0), entry(0)) and len(looks) == 3


@pytest.mark.parametrize("content", [b"", b"-5", b"9" * 40, b"many", b"\xb2" * 32])
def test_an_account_that_is_odd_is_made_anew(tmp_path: Path, content: bytes) -> None:
    folder, limit = tmp_path / "cache", 10 * size_of(entry(0))
    epoch(Store(folder, "frames", limit), list(range(5)))
    (folder / module._ACCOUNT).write_bytes(content)
    store = Store(folder, "frames", limit)
    epoch(store, list(range(ENTRIES)))
    assert held(folder, "frames") == 10 and store.uses.hits == 5


def test_an_account_that_leads_elsewhere_is_not_written(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    store = Store(folder, "frames", 10**6)
    (tmp_path / "mine").write_text("mine")
    (folder / module._ACCOUNT).symlink_to(tmp_path / "mine")
    with pytest.raises(OSError):
        store.write(key(0), entry(0))
    assert (tmp_path / "mine").read_text() == "mine"


def _fill(folder: Path, limit: int, start: int) -> None:
    store = Store(folder, "frames", limit)
    for number in range(start, start + 200):
        store.write(key(number), entry(number))
    os._exit(0)


def test_many_processes_keep_to_one_limit(tmp_path: Path) -> None:
    """Each of them would fill it alone."""
    context, folder, limit = multiprocessing.get_context("fork"), tmp_path / "cache", 50 * size_of(entry(0))
    Store(folder, "frames", limit).write(key(0), entry(0))  # from here on it is known how much there is
    workers = [context.Process(target=_fill, args=(folder, limit, 1000 * number)) for number in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert 45 <= held(folder, "frames") <= 50 + len(workers)
