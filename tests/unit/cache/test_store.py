"""A store of entries: whole or not there, found by key, checked when read, shared by processes, under its limit."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.cache_entries import size_of
from vlm_pg.cache import store as module
from vlm_pg.cache.eviction import entry_files, prune
from vlm_pg.cache.store import MARK, Entry, Store, key_of, verify
from vlm_pg.errors import ConfigError


def entry(seed: int, size: int = 1000) -> Entry:
    values = np.random.default_rng(seed)
    tensors = {
        "frames": values.integers(0, 255, (size,), dtype=np.uint8),
        "more": values.standard_normal((3, 5)).astype(np.float32),
        "none": np.zeros((0, 4), dtype=np.int64),
    }
    return Entry(tensors, {"seconds": [0.0, 1.5, seed], "decoder": "pyav"})


def same(left: Entry | None, right: Entry) -> bool:
    return (
        left is not None
        and left.about == right.about
        and left.tensors.keys() == right.tensors.keys()
        and all(np.array_equal(left.tensors[name], value) for name, value in right.tensors.items())
        and all(left.tensors[name].dtype == value.dtype for name, value in right.tensors.items())
    )


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache", "frames")
    keys = [key_of({"content": "a", "fps": 2.0, "n": number}) for number in range(5)]
    assert len(set(keys)) == 5 and key_of({"n": 1, "m": 2}) == key_of({"m": 2, "n": 1})
    for number, key in enumerate(keys):
        assert store.read(key) is None and not store.has(key)
        store.write(key, entry(number))
    again = Store(tmp_path / "cache", "frames")
    assert all(same(again.read(key), entry(number)) for number, key in enumerate(keys))
    assert (again.uses.hits, again.uses.misses, store.uses.misses, store.uses.written) == (5, 0, 5, 5)
    assert Store(tmp_path / "cache", "features").read(keys[0]) is None, "kinds are apart"


@pytest.mark.parametrize("damages", [pytest.param(500, marks=pytest.mark.matrix), 50])
def test_damaged_entries_are_found_and_made_anew(tmp_path: Path, damages: int) -> None:
    """Bits, cuts, other entries' files, emptiness, links, folders: never is something else read than was written."""
    store, chance = Store(tmp_path / "cache", "frames"), random.Random(damages)
    other = key_of({"n": "other"})
    store.write(other, entry(-1 % 1000))
    found = 0
    for number in range(damages):
        key = key_of({"n": number})
        store.write(key, entry(number))
        path = store._path(key)
        whole = path.read_bytes()
        way = number % 7
        if way == 0:
            offset = chance.randrange(len(whole))
            path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1 << chance.randrange(8)]) + whole[offset + 1 :])
        elif way == 1:
            path.write_bytes(whole[: chance.randrange(len(whole))])
        elif way == 2:
            path.write_bytes(store._path(other).read_bytes())
        elif way == 3:
            path.write_bytes(whole + b"more")
        elif way == 4:
            offset = chance.randrange(8, 300)  # in the header
            path.write_bytes(whole[:offset] + chance.randbytes(4) + whole[offset + 4 :])
        elif way == 5:
            path.unlink()
            path.symlink_to(store._path(other))
        else:
            path.write_bytes(chance.randbytes(len(whole)))
        read = store.read(key)
        assert read is None or same(read, entry(number))
        if read is None:
            found += 1
            assert not path.exists()
            store.write(key, entry(number))
        assert same(store.read(key), entry(number))
    assert found >= 0.95 * damages and store.uses.damaged == found


def test_a_damaged_entry_that_cannot_be_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder may be shared and read-only."""
    store = Store(tmp_path / "cache", "frames")
    store.write(key_of({}), entry(0))
    path = store._path(key_of({}))
    path.write_bytes(path.read_bytes()[:-1])

    def refused(_: Path) -> None:
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refused)
    assert store.read(key_of({})) is None and store.uses.damaged == 1


def test_verify_names_and_removes_the_damaged(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache", "frames")
    for number in range(6):
        store.write(key_of({"n": number}), entry(number))
    bad = store._path(key_of({"n": 3}))
    bad.write_bytes(bad.read_bytes()[:-1])
    verified = {stored.key: well for stored, well in verify(tmp_path / "cache")}
    assert len(verified) == 6 and [key for key, well in verified.items() if not well] == [key_of({"n": 3})]
    assert len(list(entry_files(tmp_path / "cache"))) == 5


def test_the_limit_holds_and_what_was_used_last_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_USE_SECONDS", 0.0)
    size = size_of(entry(0))
    store = Store(tmp_path / "cache", "frames", max_bytes=10 * size)
    before = time.time() - 3 * 24 * 3600
    for number in range(10):
        store.write(key_of({"n": number}), entry(number))
        os.utime(store._path(key_of({"n": number})), (before + number, before + number))
    assert store.read(key_of({"n": 0})) is not None, "used again"
    for number in range(10, 14):
        store.write(key_of({"n": number}), entry(number))
    left = {stored.key for stored in entry_files(tmp_path / "cache")}
    assert sum(stored.size for stored in entry_files(tmp_path / "cache")) <= 10 * size
    assert key_of({"n": 0}) in left and key_of({"n": 13}) in left and key_of({"n": 1}) not in left
    pruned = prune(tmp_path / "cache", 0)
    assert pruned is not None and pruned.count == len(left) and not list(entry_files(tmp_path / "cache"))


def _write_and_be_killed(folder: Path, step: int, halved: bool) -> None:
    """Write an entry; killed before the operation on files of that number. ``halved``: with half a file written."""
    seen = 0

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.scandir") and str(folder) in str(arguments[0]):
            seen += 1
            if seen == step:
                if halved and event == "os.rename":
                    os.truncate(arguments[0], os.stat(arguments[0]).st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    Store(folder, "frames", max_bytes=1 << 20).write(key_of({"n": 0}), entry(0))
    os._exit(0)


def test_a_writer_killed_at_any_step_leaves_a_whole_entry_or_none(tmp_path: Path) -> None:
    context, whole = multiprocessing.get_context("fork"), tmp_path / "whole"
    Store(whole, "frames").write(key_of({"n": 0}), entry(0))
    [written] = entry_files(whole)
    there = set()
    for step in range(1, 30):
        folder = tmp_path / f"killed-{step}"
        writer = context.Process(target=_write_and_be_killed, args=(folder, step, step % 2 == 0))
        writer.start()
        writer.join()
        store = Store(folder, "frames", max_bytes=1 << 20)
        read = store.read(key_of({"n": 0}))
        assert read is None or same(read, entry(0))
        there.add(read is not None)
        store.write(key_of({"n": 0}), entry(0))
        [again] = entry_files(folder)
        assert again.key == written.key and again.path.read_bytes() == written.path.read_bytes()
        if writer.exitcode == 0:
            break
        assert writer.exitcode == -signal.SIGKILL
    assert writer.exitcode == 0 and step > 6 and there == {True, False}


def test_what_killed_writers_left_is_removed_in_time(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache", "frames")
    store.write(key_of({}), entry(0))
    old, new = (store._path(key_of({})).parent / f".x.safetensors.{name}.tmp" for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    prune(tmp_path / "cache", 1 << 30)
    assert not old.exists() and new.exists() and store.has(key_of({}))


def test_a_cache_that_another_process_makes_at_this_moment_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, listed = tmp_path / "cache", Path.iterdir

    def meanwhile(path: Path) -> Iterator[Path]:
        (folder / MARK).write_text('{"version": 1}')
        (folder / "frames").mkdir(exist_ok=True)
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", meanwhile)
    assert Store(folder, "frames").read(key_of({})) is None


def test_other_folders_and_versions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match="holds files and is no cache"):
        Store(tmp_path / "data", "frames")
    for number, content in enumerate((b'{"version": 2}', b"[]", b"", b'{"vers')):
        folder = tmp_path / f"cache{number}"
        folder.mkdir()
        (folder / MARK).write_bytes(content)
        with pytest.raises(ConfigError, match=r"is a cache of version (2|None)\. This program keeps version 1"):
            Store(folder, "frames")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be used: "):
        Store(tmp_path / "file", "frames")


def _work(folder: Path, seed: int, rounds: int, limit: int) -> None:
    store, chance = Store(folder, "frames", limit), random.Random(seed)
    for _ in range(rounds):
        number = chance.randrange(40)
        key = key_of({"n": number})
        read = store.read(key)
        if read is None:
            store.write(key, entry(number))
        elif not same(read, entry(number)):
            os._exit(3)
    os._exit(4 if store.uses.damaged else 0)


def test_several_processes_write_and_throw_out_at_once(tmp_path: Path) -> None:
    size = size_of(entry(0))
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_work, args=(tmp_path / "cache", seed, 150, 20 * size)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0, 0]
    assert all(well for _, well in verify(tmp_path / "cache"))
