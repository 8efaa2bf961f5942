"""One run at a time in a folder; what a killed one leaves behind does not stop the next."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from vlm_pg.errors import ConfigError
from vlm_pg.observe.presence import FolderGone, Presence
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


@pytest.mark.parametrize(
    ("who", "refused"),
    [
        ({"host": "elsewhere", "process": 1, "started": "then"}, True),
        ({"host": socket.gethostname(), "process": 2**22 + 7, "started": "then"}, False),
        ({"host": socket.gethostname(), "process": os.getpid(), "process_start": -1}, False),
        ({}, False),
    ],
)
def test_where_a_file_system_has_no_locks_the_file_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: dict[str, Any], refused: bool
) -> None:
    def no_locks(*_: object) -> NoReturn:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    (tmp_path / LOCK).write_text(json.dumps(who))
    if refused:
        with pytest.raises(ConfigError, match=r"process 1 on elsewhere, started then.*remove that file"):
            RunLock.take(tmp_path, print)
        return
    RunLock.take(tmp_path, lambda line: None).release()


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
