"""One run at a time in a run's folder: a lock that says who holds it and ends with its holder.

The lock is the kernel's, on ``run.lock`` (``fcntl``, which network file systems pass on between hosts): it is gone with
the process, however that ended. What the file says is for people, and for file systems that have no locks.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from vlm_pg.errors import ConfigError

LOCK = "run.lock"
_HELD_BY_ANOTHER = (errno.EACCES, errno.EAGAIN)
# The kernel gives a process its lock a second time, and takes it away when any descriptor of the file is closed.
_held: set[str] = set()


class RunLock:
    """A lock that is held; ``take`` makes it."""

    def __init__(self, path: Path, descriptor: int):
        self._path, self._descriptor = path, descriptor
        self._key = _key(path)
        _held.add(self._key)

    @classmethod
    def take(cls, folder: Path, announce: Callable[[str], None]) -> RunLock:
        """Lock an existing folder. A lock that a process left behind when it ended is taken over, with a line.

        Raises:
            ConfigError: another run holds it, or the folder cannot be written.
        """
        path = folder / LOCK
        if _key(path) in _held:
            raise _in_use(folder, _who())
        while True:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                raise ConfigError(
                    f"{path} cannot be written ({error.strerror}). A run needs a folder it can write in. Correct its "
                    "permissions, or choose another run.dir."
                ) from error
            try:
                left_behind = _lock(folder, descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            # Its holder may have removed the file between the two calls.
            if _same_file(path, descriptor):
                break
            os.close(descriptor)
        if left_behind:
            announce(f"{path}: {_named(left_behind)} ended without giving its lock back; it is taken over")
        text = json.dumps(_who(), indent=2).encode() + b"\n"
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text, 0)
        return cls(path, descriptor)

    def release(self) -> None:
        """Remove the file, if it is still there, and let go. Twice is allowed."""
        if self._descriptor < 0:
            return
        if _same_file(self._path, self._descriptor):
            with suppress(OSError):
                self._path.unlink()
        with suppress(OSError):  # it may have been moved aside with its folder
            os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)
        self._descriptor = -1
        _held.discard(self._key)


def _lock(folder: Path, descriptor: int) -> dict[str, Any]:
    """Lock the file; what a holder that is gone has left in it, empty if nothing."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        who = _read(descriptor)
        if error.errno in _HELD_BY_ANOTHER:
            raise _in_use(folder, who) from None
        # A file system without locks: what the file says decides.
        if who and _may_live(who):
            raise _in_use(folder, who) from None
        return who
    return _read(descriptor)


def _in_use(folder: Path, who: dict[str, Any]) -> ConfigError:
    return ConfigError(
        f"run.dir '{folder}' is in use: {_named(who)} trains in it. Two runs in one folder would go on from each "
        f"other's weights. Wait until it ends or stop it, or choose another run.dir. ({folder / LOCK} says who it is; "
        "where a file system has no locks, remove that file once that process is gone.)"
    )


def _who() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "process_start": _process_start(os.getpid()),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def _named(who: dict[str, Any]) -> str:
    return f"process {who.get('process', '?')} on {who.get('host', '?')}, started {who.get('started', '?')},"


def _read(descriptor: int) -> dict[str, Any]:
    try:
        value = json.loads(os.pread(descriptor, 4096, 0))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _may_live(who: dict[str, Any]) -> bool:
    """Whether the process may still be there: on another host nobody can tell."""
    process = who.get("process")
    if who.get("host") != socket.gethostname() or type(process) is not int:
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return _process_start(process) == who.get("process_start")


def _process_start(process: int) -> int | None:
    """When the kernel started it, in ticks since it was booted: a number is given to many processes in turn."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False


def _key(path: Path) -> str:
    return os.path.realpath(path)
