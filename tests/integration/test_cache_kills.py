"""``vlm-pg cache fill`` killed at random moments and started again: the entries of a fill that was left alone."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.processes import ModuleProcess, started_until
from tests.support.small_run import small_run
from tests.support.watch import descendants
from vlm_pg.cache.eviction import entry_files
from vlm_pg.cache.store import MARK

pytestmark = pytest.mark.matrix

# The frames and the visual features of the small run's clips, for training and evaluation.
ENTRIES, MOMENTS = 32, 50


def start(folder: Path, cache: Path, workers: int) -> ModuleProcess:
    options = [f"cache.folder={cache}", f"media.workers={workers}", "media.max_pixels=400000"]
    return ModuleProcess("vlm_pg.cli", "cache", "fill", str(folder / "run.yaml"), *options)


def filled(folder: Path, cache: Path, workers: int) -> str:
    done = start(folder, cache, workers).finish()
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def contents(cache: Path) -> dict[str, bytes]:
    """Every file of a cache; what a killed process was writing has a name that says so, and is no entry."""
    own = (".prune.lock", ".room")
    files = [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".tmp" and path.name not in own]
    assert {stored.path for stored in entry_files(cache)} == {path for path in files if path.name != MARK}
    return {str(path.relative_to(cache)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fills")
    small_run(path)
    return path


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, bytes]:
    """What a fill by one process writes."""
    said = filled(folder, folder / "whole", workers=1)
    assert "12 of 12 media are kept, 0 cannot be used" in said and "4 of 4 media are kept" in said
    expected = contents(folder / "whole")
    assert len(expected) == ENTRIES + 1 and sum(name.startswith("features") for name in expected) == 16
    return expected


@pytest.mark.parametrize("workers", [2, 4])
def test_the_number_of_workers_changes_no_byte(folder: Path, whole: dict[str, bytes], workers: int) -> None:
    filled(folder, folder / f"workers-{workers}", workers)
    assert contents(folder / f"workers-{workers}") == whole


def kill(process: ModuleProcess, with_workers: bool) -> bool:
    """Kill a fill, or all of its processes at once; whether that ended it. What is left ends by itself."""
    assert process._process.pid is not None
    pids = [process._process.pid, *descendants(process._process.pid)] if with_workers else [process._process.pid]
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return process.finish().returncode == -signal.SIGKILL


def caught(folder: Path, cache: Path, entries: int, workers: int) -> ModuleProcess:
    """A fill that has written so many entries."""
    return started_until(
        lambda: cache.is_dir() and sum(1 for _ in entry_files(cache)) >= entries,
        lambda: start(folder, cache, workers),
        cache,
    )


def test_killed_and_resumed_it_keeps_the_same_bytes(folder: Path, whole: dict[str, bytes]) -> None:
    chance, ended, left = random.Random(MOMENTS), 0, []
    for number in range(MOMENTS):
        cache, workers = folder / f"killed-{number}", chance.choice([1, 2, 4])
        process = caught(folder, cache, chance.randrange(ENTRIES), workers)
        time.sleep(chance.uniform(0, 0.02))
        ended += kill(process, with_workers=chance.random() < 0.5)
        left.append(sum(1 for _ in entry_files(cache)))
        entries = {stored.path: stored.path.stat().st_mtime_ns for stored in entry_files(cache)}
        assert {str(path.relative_to(cache)): path.read_bytes() for path in entries}.items() <= whole.items()
        filled(folder, cache, workers=chance.choice([1, 2, 4]))
        assert contents(cache) == whole
        assert {path: path.stat().st_mtime_ns for path in entries} == entries, "what was kept is not made again"
    print(f"{ended} kills in {MOMENTS} fills, which had kept {sorted(left)}")
    assert ended
