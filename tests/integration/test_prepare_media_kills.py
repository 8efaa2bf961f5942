"""Preparing killed while it looks at media, and started again: the bytes of a run that was left alone."""

from __future__ import annotations

import json
import random
import signal
import sqlite3
import time
from pathlib import Path

import pytest

from tests.support.prepared_media import command, write_set
from tests.support.processes import ModuleProcess, started_until

pytestmark = pytest.mark.matrix

CLIPS = 48
MEDIA = CLIPS + CLIPS // 8


def start(folder: Path, out: Path, workers: int = 2) -> ModuleProcess:
    return ModuleProcess("vlm_pg.cli", *command(folder, out, workers))


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file() and path.name != ".lock"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kills")
    write_set(path, CLIPS)
    return path


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, bytes]:
    """What a run alone, with one process, writes."""
    done = start(folder, folder / "whole", workers=1).finish()
    assert done.returncode == 0, done.stdout + done.stderr
    expected = contents(folder / "whole")
    report = json.loads(expected["report.json"])
    assert report["refused"]["corrupt_media"] >= CLIPS // 20 and report["repeated"]["same"] >= CLIPS // 20
    assert report["left_out"]["also in the evaluation file"] >= 1
    return expected


def looked_at(out: Path) -> int:
    """Of how many media a run knows by now what they are."""
    for book in (out / ".parts").glob("media-*.sqlite"):
        try:
            database = sqlite3.connect(f"file:{book}?mode=ro", uri=True)
            try:
                return int(database.execute("SELECT count(outcome) FROM media").fetchone()[0])
            finally:
                database.close()
        except sqlite3.Error:  # it is being made, or written at this moment
            return 0
    return 0


def caught(folder: Path, out: Path, media: int) -> ModuleProcess:
    """A run that has checked so many media."""
    return started_until(lambda: looked_at(out) >= media, lambda: start(folder, out), out)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_the_number_of_processes_changes_no_byte(folder: Path, whole: dict[str, bytes], workers: int) -> None:
    done = start(folder, folder / f"workers-{workers}", workers).finish()
    assert done.returncode == 0, done.stdout + done.stderr
    assert contents(folder / f"workers-{workers}") == whole


@pytest.mark.parametrize("moments", [50, 3])
def test_killed_and_resumed_it_writes_the_same_bytes(folder: Path, whole: dict[str, bytes], moments: int) -> None:
    chance = random.Random(moments)
    ended = known = 0
    for number in range(moments):
        out = folder / f"killed-{moments}-{number}"
        for _ in range(chance.choice((1, 2)) if moments > 3 else 1):
            process = caught(folder, out, chance.randrange(MEDIA + 1))
            time.sleep(chance.uniform(0, 0.05))
            process.signal(signal.SIGKILL)
            ended += process.finish().returncode == -signal.SIGKILL
            known += looked_at(out)
        done = start(folder, out).finish()
        assert done.returncode == 0, done.stdout + done.stderr
        assert contents(out) == whole and not (out / ".parts").exists()
    print(f"{ended} kills in {moments} runs, {known} media known by then")
    assert ended and known
