"""One run at a time in a folder; what a killed one leaves behind does not stop the next."""

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

from vlm_pg.errors import ConfigError
from vlm_pg.observe import run_lock
from vlm_pg.observe.run_folder import FolderGone, Presence
from vlm_pg.observe.run_lock import LOCK, RunLock

HOLD = """
import sys
from pathlib import Path
from vlm_pg.observe.run_lock import RunLock
RunLock.take(Path(sys.argv[1]), print)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        said = rf"process {holder.pid} on {socket.gethostname()}, started 20.* trains in it.*choose another run\.dir"
        with pytest.raises(ConfigError, match=said):
            RunLock.take(tmp_path, print)
    finally:
        holder.kill()
        holder.communicate()
    told: list[str] = []
    lock = RunLock.take(tmp_path, told.append)
    assert len(told) == 1 and f"process {holder.pid} on" in told[0] and "it is taken over" in told[0]
    lock.release()
    assert not (tmp_path / LOCK).exists()


def test_a_process_does_not_lock_twice(tmp_path: Path) -> None:
    """The kernel would let it."""
    lock = RunLock.take(tmp_path, print)
    with pytest.raises(ConfigError, match=f"process {os.getpid()} on"):
        RunLock.take(tmp_path, print)
    lock.release()
    lock.release()
    RunLock.take(tmp_path, print).release()


def test_the_lock_says_who_holds_it(tmp_path: Path) -> None:
    lock = RunLock.take(tmp_path, print)
    said = json.loads((tmp_path / LOCK).read_text())
    assert said["process"] == os.getpid() and said["host"] == socket.gethostname() and said["started"]
    lock.release()


def test_a_lock_moved_with_its_folder_is_given_back(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    lock = RunLock.take(folder, print)
    folder.rename(tmp_path / "old")
    folder.mkdir()
    lock.release()
    told: list[str] = []
    RunLock.take(folder, told.append).release()
    RunLock.take(tmp_path / "old", told.append).release()
    assert told == []


HERE = run_lock._machine()


@pytest.mark.parametrize(
    ("who", "refused"),
    [
        ({"machine": HERE, "process": os.getpid(), "process_start": run_lock._process_start(os.getpid())}, True),
        ({"machine": HERE, "process": 2**22 + 7}, False),
        ({"machine": HERE, "process": os.getpid(), "process_start": -1}, False),
        ({}, False),
    ],
)
def test_where_a_file_system_has_no_locks_the_file_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: dict[str, Any], refused: bool
) -> None:
    without_locks(monkeypatch)
    (tmp_path / LOCK).write_text(json.dumps(who))
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
    told: list[str] = []

    def announce(line: str) -> None:
        told.append(line)
        if lives and "watching" in line:
            threading.Timer(0.2, os.utime, (path, (1.0, 1.0))).start()

    if lives:
        with pytest.raises(ConfigError, match=r"process 1 on elsewhere, started then, trains in it"):
            RunLock.take(tmp_path, announce)
        assert json.loads(path.read_text())["host"] == "elsewhere"
        return
    RunLock.take(tmp_path, announce).release()
    assert "was left by process 1 on elsewhere" in told[0] and "taken over" in told[1] and not path.exists()


def test_a_holder_beats_until_it_gives_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.01)
    lock = RunLock.take(tmp_path, print)
    os.utime(tmp_path / LOCK, (1.0, 1.0))
    monkeypatch.setattr(run_lock, "WATCH_SECONDS", 3600.0)
    assert run_lock._beats(tmp_path / LOCK)
    lock.release()
    assert not any(thread.name == "run.lock" for thread in after_beats())


def after_beats() -> list[threading.Thread]:
    """All threads, once those of locks have had time to see their end."""
    for thread in threading.enumerate():
        if thread.name == "run.lock":
            thread.join(60)
    return threading.enumerate()


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
