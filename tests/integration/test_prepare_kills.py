"""``vlm-pg prepare`` killed at random moments and started again: the bytes of a run that was left alone."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest

from tests.support.processes import ModuleProcess, is_alive, started_until

pytestmark = pytest.mark.matrix

ROWS, WORKERS = 4_000, 2
# Of 256 rows each, of both files.
PARTS = 17


def start(folder: Path, out: Path, workers: int = WORKERS) -> ModuleProcess:
    files = ["--train", str(folder / "train.jsonl"), "--eval", str(folder / "test.jsonl")]
    return ModuleProcess("vlm_pg.cli", "prepare", "gsm8k", *files, "--out", str(out), "--workers", str(workers))


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file() and path.name != ".lock"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions, every tenth without a gold answer, some of them in both files, and some twice."""
    path = tmp_path_factory.mktemp("kills")
    for name, numbers in (("train", range(ROWS)), ("test", range(0, ROWS, 40))):
        rows = [{"question": f"How much is {n % 3_900}?", "answer": f"#### {n}" if n % 10 else "none"} for n in numbers]
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, bytes]:
    """What a run alone, in one process, writes."""
    done = start(folder, folder / "whole", workers=1).finish()
    assert done.returncode == 0, done.stdout + done.stderr
    expected = contents(folder / "whole")
    assert json.loads(expected["report.json"])["refused"]["no_gold_answer"] > ROWS / 10
    return expected


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_the_number_of_processes_changes_no_byte(folder: Path, whole: dict[str, bytes], workers: int) -> None:
    out = folder / f"workers-{workers}"
    done = start(folder, out, workers).finish()
    assert done.returncode == 0, done.stdout + done.stderr
    assert contents(out) == whole


def parts_of(out: Path) -> dict[str, int]:
    """The parts that are there, and when each was written."""
    try:
        return {path.name: path.stat().st_mtime_ns for path in (out / ".parts").glob("*.jsonl")}
    except FileNotFoundError:  # they were used at this moment
        return {}


def caught(folder: Path, out: Path, parts: int) -> ModuleProcess:
    """A run that has written so many parts."""
    return started_until(
        lambda: (out / ".parts").is_dir() and len(parts_of(out)) >= parts, lambda: start(folder, out), out
    )


@pytest.mark.parametrize("moments", [50, 3])
def test_killed_and_resumed_it_writes_the_same_bytes(folder: Path, whole: dict[str, bytes], moments: int) -> None:
    chance = random.Random(moments)
    ended = 0
    for number in range(moments):
        out = folder / f"killed-{moments}-{number}"
        process = caught(folder, out, chance.randrange(PARTS + 1))
        time.sleep(chance.uniform(0, 0.1))
        process.signal(signal.SIGKILL)
        ended += process.finish().returncode == -signal.SIGKILL
        if chance.random() < 0.5:
            process = start(folder, out)
            time.sleep(chance.uniform(0, 1.5))
            process.signal(signal.SIGKILL)
            ended += process.finish().returncode == -signal.SIGKILL
        done = start(folder, out).finish()
        assert done.returncode == 0, done.stdout + done.stderr
        assert contents(out) == whole and not (out / ".parts").exists()
    print(f"{ended} kills in {moments} runs")
    assert ended


def test_killed_after_all_was_written_it_leaves_no_parts(folder: Path, whole: dict[str, bytes]) -> None:
    """Between the manifest and the end: the set is there, and so are the parts it was made of."""
    out = folder / "late"
    assert start(folder, out).finish().returncode == 0
    (out / ".parts/written").mkdir(parents=True)
    (out / ".parts/0000000.jsonl").write_text("{}\n")
    assert start(folder, out).finish().returncode == 0
    assert contents(out) == whole and not (out / ".parts").exists()


def test_what_was_judged_is_not_judged_again(folder: Path, whole: dict[str, bytes]) -> None:
    out = folder / "gone on"
    process = caught(folder, out, 4)
    process.signal(signal.SIGKILL)
    process.finish()
    judged = parts_of(out)
    process = start(folder, out)
    again: dict[str, int] = {}
    while process.returncode is None:
        again |= parts_of(out)
        time.sleep(0.01)
    assert process.finish().returncode == 0 and contents(out) == whole
    assert {name: again[name] for name in judged if name in again} == {n: t for n, t in judged.items() if n in again}
    assert len(judged) >= 4


def test_a_killed_run_leaves_no_process(folder: Path, whole: dict[str, bytes]) -> None:
    process = caught(folder, folder / "orphans", 1)
    process.signal(signal.SIGSTOP)
    ours = _processes_with(str(process._process.pid))
    process.signal(signal.SIGKILL)
    process.finish()
    deadline = time.monotonic() + 60
    while any(is_alive(pid) for pid in ours):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_second_run_on_the_folder_is_refused(folder: Path, whole: dict[str, bytes]) -> None:
    out = folder / "two"
    first = caught(folder, out, 0)
    first.signal(signal.SIGSTOP)
    second = start(folder, out).finish()
    assert second.returncode == 2
    assert "Another process is preparing" in second.stderr and "choose another --out" in second.stderr
    first.signal(signal.SIGCONT)
    assert first.finish().returncode == 0
    assert contents(out) == whole


def test_of_runs_that_start_together_one_at_a_time_prepares(folder: Path, whole: dict[str, bytes]) -> None:
    """Whichever comes first; the others are refused, or find it prepared."""
    out = folder / "together"
    done = [process.finish() for process in [start(folder, out) for _ in range(3)]]
    for one in done:
        assert one.returncode == 0 or "Another process is preparing" in one.stderr, one.stdout + one.stderr
    wrote = [one for one in done if "Wrote train" in one.stdout]
    assert len(wrote) == 1 and contents(out) == whole and not (out / ".parts").exists()


def _processes_with(parent: str) -> list[int]:
    """Children, and theirs."""
    found: list[int] = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[1] == parent:
            pid = status.parent.name
            found += [int(pid), *_processes_with(pid)]
    return found
