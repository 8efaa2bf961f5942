"""What a process must not do behind one's back: open files, connect, leave descriptors or processes behind."""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_IN_OPEN, _NONBLOCK = 0x20, 0o4000
_HEAD = struct.Struct("iIII")


class OpenedFiles:
    """Names of the files in a folder that any process opens, by the kernel's own account (inotify)."""

    def __init__(self, folder: Path):
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(_NONBLOCK)
        assert self._descriptor >= 0
        assert libc.inotify_add_watch(self._descriptor, os.fsencode(folder), _IN_OPEN) >= 0

    def names(self) -> set[str]:
        """Those opened since the last call; "" for the folder itself."""
        found: set[str] = set()
        while True:
            try:
                data = os.read(self._descriptor, 1 << 16)
            except BlockingIOError:
                return found
            offset = 0
            while offset < len(data):
                _, _, _, length = _HEAD.unpack_from(data, offset)
                offset += _HEAD.size
                found.add(os.fsdecode(data[offset : offset + length].rstrip(b"\0")))
                offset += length

    def close(self) -> None:
        os.close(self._descriptor)


class Doorbell:
    """A server on this machine that counts who connects."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.rings = 0
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.rings += 1
            connection.close()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


class Connections:
    """Addresses that this process connects to, by the interpreter's own account, while it is watched."""

    def __init__(self) -> None:
        self._addresses: list[tuple[str, int]] | None = None
        self._are_refused = False
        sys.addaudithook(self._note)  # which stays for ever

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._addresses is None or event != "socket.connect":
            return
        self._addresses.append((arguments[1][0], arguments[1][1]))
        if self._are_refused:
            raise ConnectionRefusedError("no connection is allowed in this test")

    @contextmanager
    def watched(self, are_refused: bool = False) -> Iterator[list[tuple[str, int]]]:
        """Addresses and ports, as they are connected to."""
        self._addresses, self._are_refused = [], are_refused
        try:
            yield self._addresses
        finally:
            self._addresses = None

    @contextmanager
    def refused(self) -> Iterator[list[tuple[str, int]]]:
        """The same; no connection is made."""
        with self.watched(are_refused=True) as addresses:
            yield addresses

    def close(self) -> None:
        """Watch no more."""
        self._addresses = None


def descriptors(pid: int | str = "self") -> list[str]:
    """What the process holds open."""
    folder = Path(f"/proc/{pid}/fd")
    names = []
    for entry in folder.iterdir():
        try:
            names.append(os.readlink(entry))
        except FileNotFoundError:  # the one that lists the folder
            continue
    return sorted(names)


def own_descriptors() -> list[str]:
    """What this process holds open, without what waits for the garbage collector since other tests."""
    gc.collect()
    return descriptors()


def settled_descriptors(most: int, seconds: float = 30) -> int:
    """How many this process holds open, once that is no more than ``most``: libraries' threads close files late."""
    deadline = time.monotonic() + seconds
    while (count := len(descriptors())) > most and time.monotonic() < deadline:
        time.sleep(0.01)
    return count


def cpu_seconds(pid: int) -> float:
    """Processor time a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int, name: str) -> int:
    """``VmHWM`` (peak resident) or ``VmData`` (private writable) of a process."""
    text = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(name)) * 1024


def descendants(pid: int) -> list[int]:
    """Children of a process, and theirs."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parents.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    found, waiting = [], [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found
