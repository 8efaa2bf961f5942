"""One run at a time in a run's folder: a lock that names its holder and ends with the holder's process.

The lock is the kernel's, on ``run.lock`` (``fcntl``, which network file systems pass on between hosts): it ends with
the process, however that ended. Some file systems have no locks, or locks that other hosts do not see: therefore the
file names the holder, and its modification time advances while the holder lives (``filelock`` has neither).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from vlm_pg.errors import ConfigError
from vlm_pg.files import parse_json_line

LOCK = "run.lock"
_HELD_BY_ANOTHER = (errno.EACCES, errno.EAGAIN)
BEAT_SECONDS = 10.0
# Several beats: a holder may be stopped for a while, and network file systems show changes late.
WATCH_SECONDS = 60.0
# The kernel grants a process its own lock again, and drops it when any descriptor of the file is closed.
_held: set[str] = set()


class RunLock:
    """A lock that is held; ``take`` creates it."""

    def __init__(self, path: Path, descriptor: int):
        self._path, self._descriptor, self._key = path, descriptor, os.path.realpath(path)
        _held.add(self._key)
        self._released = threading.Event()
        threading.Thread(target=self._beat, name="run.lock", daemon=True).start()

    def _beat(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            with suppress(OSError):
                os.utime(self._descriptor)

    @classmethod
    def take(cls, folder: Path, announce: Callable[[str], None]) -> RunLock:
        """Lock an existing folder. A lock left behind by a process that ended is taken over, with a line.

        If the file names a process of another machine, its beats are watched for ``WATCH_SECONDS`` first.

        Raises:
            ConfigError: another run holds it, or the folder cannot be written.
        """
        path = folder / LOCK
        if os.path.realpath(path) in _held:
            raise _in_use(folder, _this_process())
        while True:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                raise ConfigError(
                    f"{path} cannot be written ({error.strerror}). A run needs a folder it can write in. Correct its "
                    "permissions, or choose another run.dir."
                ) from error
            try:
                left_behind = _lock(folder, descriptor, announce)
            except BaseException:
                os.close(descriptor)
                raise
            # Its holder may have removed the file between the two calls.
            if _same_file(path, descriptor):
                break
            os.close(descriptor)
        if left_behind:
            announce(f"{path}: {_named(left_behind)} ended without giving its lock back; it is taken over")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(_this_process(), indent=2).encode() + b"\n", 0)
        return cls(path, descriptor)

    def release(self) -> None:
        """Remove the file, if it still exists, and unlock. May be called twice."""
        if self._descriptor < 0:
            return
        self._released.set()
        if _same_file(self._path, self._descriptor):
            with suppress(OSError):
                self._path.unlink()
        with suppress(OSError):  # it may have been moved aside with its folder
            os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)
        self._descriptor = -1
        _held.discard(self._key)


def _lock(folder: Path, descriptor: int, announce: Callable[[str], None]) -> dict[str, Any]:
    """Lock the file; returns the holder that a dead process left in it, empty if none."""
    failure = None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        failure = error.errno
    holder = parse_json_line(os.pread(descriptor, 4096, 0)) or {}
    if failure in _HELD_BY_ANOTHER:
        raise _in_use(folder, holder)
    if not holder:
        return holder
    if holder.get("machine") == _machine():
        # Without locks in the file system, the file's content decides.
        lives = failure is not None and _is_alive(holder)
    else:
        announce(
            f"{folder / LOCK} was left by {_named(holder)} another machine or container: watching it for "
            f"{WATCH_SECONDS:.0f} s to see whether that run lives"
        )
        lives = _beats(folder / LOCK)
    if lives:
        raise _in_use(folder, holder)
    return holder


def _beats(path: Path) -> bool:
    """Whether the modification time advances; the file is opened each time, since network file systems refresh then."""

    def modified() -> int | None:
        with suppress(OSError), path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
        return None

    before, end = modified(), time.monotonic() + WATCH_SECONDS
    while time.monotonic() < end:
        time.sleep(min(1.0, WATCH_SECONDS))
        if modified() != before:
            return True
    return False


def _in_use(folder: Path, holder: dict[str, Any]) -> ConfigError:
    return ConfigError(
        f"run.dir '{folder}' is in use: {_named(holder)} trains in it. Two runs in one folder would go on from each "
        f"other's weights. Wait until it ends or stop it, or choose another run.dir. ({folder / LOCK} names it.)"
    )


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "machine": _machine(),
        "process": os.getpid(),
        "process_start": _process_start(os.getpid()),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def _named(holder: dict[str, Any]) -> str:
    process, host, started = (holder.get(key, "?") for key in ("process", "host", "started"))
    return f"process {process} on {host}, started {started},"


def _machine() -> str:
    """The scope of process ids: this boot of the kernel and this container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def _is_alive(holder: dict[str, Any]) -> bool:
    """Whether the process of this machine still runs."""
    process = holder.get("process")
    if type(process) is not int:
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return _process_start(process) == holder.get("process_start")


def _process_start(process: int) -> int | None:
    """Start time in ticks since boot, which tells processes of one id apart."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    return None


def _same_file(path: Path, descriptor: int) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    return False
