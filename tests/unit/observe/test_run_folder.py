"""A new run gets an empty folder, nothing that was there is lost, and one run at a time trains in it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.unit.observe.builders import make_run
from vlm_pg.errors import ConfigError, VlmPgError
from vlm_pg.observe import run_lock
from vlm_pg.observe.run_folder import FolderGone, Presence, RunFolder
from vlm_pg.observe.run_lock import LOCK, RunLock

HOLD = """
import sys
from pathlib import Path
from vlm_pg.observe.run_lock import RunLock
RunLock.take(Path(sys.argv[1]), print)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_new_run_moves_an_earlier_one_aside_and_says_so(tmp_path: Path) -> None:
    earlier = make_run(tmp_path / "run")
    content = {path.name: path.read_bytes() for path in earlier.path.iterdir() if path.is_file()}
    lines: list[str] = []
    folder = RunFolder.create(tmp_path / "run", resume=False, announce=lines.append)
    (aside,) = (path for path in tmp_path.iterdir() if path.name.startswith("run.old-"))
    assert [path.name for path in folder.path.iterdir()] == ["checkpoints"]
    assert {path.name: path.read_bytes() for path in aside.iterdir() if path.is_file()} == content
    (line,) = lines
    assert str(aside) in line and "resume=auto" in line
    for _ in range(3):  # within one second
        make_run(tmp_path / "run", steps=1)
    assert len([path for path in tmp_path.iterdir() if path.name.startswith("run.old-")]) == 4


def test_resume_keeps_the_folder_and_clears_what_a_killed_write_left(tmp_path: Path) -> None:
    earlier = make_run(tmp_path / "run")
    before = earlier.metrics.read_bytes()
    (earlier.path / ".summary.json.abc.tmp").write_text("{")
    folder = RunFolder.create(tmp_path / "run", resume=True)
    assert folder.metrics.read_bytes() == before
    assert not list(folder.path.glob(".*.tmp"))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("resume", [True, False])
def test_a_folder_of_other_things_is_refused_untouched(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(
        ConfigError, match=r"(?s)thesis\.tex.*Only an empty folder or an earlier run.*Point run\.dir at"
    ):
        RunFolder.create(tmp_path, resume=resume)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_current_directory_and_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)
    for path in (Path("."), Path(".."), tmp_path):
        with pytest.raises(
            ConfigError, match=r"current directory or one above.*needs a folder of its own.*Point run\.dir"
        ):
            RunFolder.create(path, resume=False)
    (inner / "file").write_text("")
    with pytest.raises(ConfigError, match=r"is a file\. A run needs a folder\. Point run\.dir"):
        RunFolder.create(inner / "file", resume=False)


def test_summary_refuses_nan_and_names_its_key(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", resume=False)
    with pytest.raises(
        VlmPgError, match=r"'eval_after\.sets\.seen\.accuracy' is not a finite.*finite numbers and null.*write null"
    ):
        folder.write_summary({"eval_after": {"sets": {"seen": {"accuracy": float("nan")}}}})
    assert not folder.summary.exists()


def test_a_second_process_is_refused_with_the_holder(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        message = rf"process {holder.pid} on {socket.gethostname()}, started 20.* trains in it.*choose another run\.dir"
        with pytest.raises(ConfigError, match=message):
            RunLock.take(tmp_path, print)
    finally:
        holder.kill()
        holder.communicate()
    lines: list[str] = []
    lock = RunLock.take(tmp_path, lines.append)
    assert len(lines) == 1 and f"process {holder.pid} on" in lines[0] and "it is taken over" in lines[0]
    lock.release()
    assert not (tmp_path / LOCK).exists()


def test_a_process_does_not_lock_twice(tmp_path: Path) -> None:
    """The kernel would let it."""
    lock = RunLock.take(tmp_path, print)
    holder = json.loads((tmp_path / LOCK).read_text())
    assert holder["process"] == os.getpid() and holder["host"] == socket.gethostname() and holder["started"]
    with pytest.raises(ConfigError, match=f"process {os.getpid()} on"):
        RunLock.take(tmp_path, print)
    lock.release()
    lock.release()
    RunLock.take(tmp_path, print).release()


def test_a_lock_moved_with_its_folder_is_released(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    lock = RunLock.take(folder, print)
    folder.rename(tmp_path / "old")
    folder.mkdir()
    lock.release()
    lines: list[str] = []
    RunLock.take(folder, lines.append).release()
    RunLock.take(tmp_path / "old", lines.append).release()
    assert lines == []


HERE = run_lock._machine()


@pytest.mark.parametrize(
    ("holder", "refused"),
    [
        ({"machine": HERE, "process": os.getpid(), "process_start": run_lock._process_start(os.getpid())}, True),
        ({"machine": HERE, "process": 2**22 + 7}, False),
        ({"machine": HERE, "process": os.getpid(), "process_start": -1}, False),
        ({}, False),
    ],
)
def test_where_a_file_system_has_no_locks_the_file_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: dict[str, Any], refused: bool
) -> None:
    without_locks(monkeypatch)
    (tmp_path / LOCK).write_text(json.dumps(holder))
    if refused:
        with pytest.raises(ConfigError, match=rf"process {os.getpid()} on .* trains in it"):
            RunLock.take(tmp_path, print)
        return
    RunLock.take(tmp_path, lambda line: None).release()


def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> NoReturn:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)


@pytest.mark.parametrize("has_locks", [True, False], ids=["locks of this host alone", "no locks"])
@pytest.mark.parametrize("lives", [True, False])
def test_a_holder_on_another_machine_is_known_by_its_beat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_locks: bool, lives: bool
) -> None:
    if not has_locks:
        without_locks(monkeypatch)
    path = tmp_path / LOCK
    path.write_text(json.dumps({"host": "elsewhere", "process": 1, "started": "then", "machine": "m 1"}))
    monkeypatch.setattr(run_lock, "WATCH_SECONDS", 3600.0 if lives else 0.05)
    lines: list[str] = []

    def announce(line: str) -> None:
        lines.append(line)
        if lives and "watching" in line:
            threading.Timer(0.2, os.utime, (path, (1.0, 1.0))).start()

    if lives:
        with pytest.raises(ConfigError, match=r"process 1 on elsewhere, started then, trains in it"):
            RunLock.take(tmp_path, announce)
        assert json.loads(path.read_text())["host"] == "elsewhere"
        return
    RunLock.take(tmp_path, announce).release()
    assert "was left by process 1 on elsewhere" in lines[0] and "taken over" in lines[1] and not path.exists()


def test_a_holder_beats_until_it_releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.01)
    lock = RunLock.take(tmp_path, print)
    os.utime(tmp_path / LOCK, (1.0, 1.0))
    monkeypatch.setattr(run_lock, "WATCH_SECONDS", 3600.0)
    assert run_lock._beats(tmp_path / LOCK)
    lock.release()
    for thread in threading.enumerate():
        if thread.name == "run.lock":
            thread.join(60)
            assert not thread.is_alive()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    with pytest.raises(ConfigError, match=r"run\.lock cannot be written"):
        RunLock.take(tmp_path, print)


def test_a_folder_that_vanished_or_was_replaced_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    presence = Presence(folder)
    presence.check()
    assert presence.refuge() == folder
    folder.rename(tmp_path / "moved")
    with pytest.raises(FolderGone, match=r"is not there any more.*run\.resume=auto"):
        presence.check()
    assert presence.refuge() == folder
    folder.mkdir()
    with pytest.raises(FolderGone, match="is another folder now"):
        presence.check()
    assert presence.refuge().name.startswith("run.rescued-")
