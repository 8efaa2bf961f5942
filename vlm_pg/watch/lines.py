"""Connections that carry one JSON object a line, and end when the process at the other end does.

The kernel closes a connection when its process dies, whatever that was doing, and leaves it open while the process
lives, however busy it is. Of a host that vanished nothing comes: the kernel asks it now and then.
"""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

MAX_LINE_BYTES = 1 << 16
# Idle for 10 s it is asked every 5 s; after four questions without an answer the connection has ended. The last one (in
# milliseconds) says the same of data that is not acknowledged.
VANISHED = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}

_open: weakref.WeakSet[Line] = weakref.WeakSet()


class Line:
    """One end of a connection. ``say`` may be called from any thread, ``hear`` from one."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in VANISHED.items():
            if hasattr(socket, name):  # macOS has not all
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._connection, self._lock = connection, threading.Lock()
        self._unsent, self._unread, self._over = b"", b"", False
        _open.add(self)

    def fileno(self) -> int:
        return self._connection.fileno()

    def say(self, message: Mapping[str, Any], within_seconds: float = 0.0) -> None:
        """Send an object; nothing is said of one that cannot be sent, because whoever ``hear``s learns of the end.

        Args:
            within_seconds: how long it may wait for room. What is left then goes with the next object.
        """
        end_seconds = time.monotonic() + within_seconds
        with self._lock:
            self._unsent += json.dumps(message).encode() + b"\n"
            while self._unsent:
                try:
                    self._unsent = self._unsent[self._connection.send(self._unsent) :]
                except BlockingIOError:
                    left_seconds = end_seconds - time.monotonic()
                    if left_seconds <= 0 or not self._is_ready(select.POLLOUT, left_seconds):
                        return
                except OSError:
                    return

    def hear(self) -> list[dict[str, Any]]:
        """The objects that have come; none if there are none yet.

        Raises:
            EOFError: the other end has gone, or says what is no JSON object.
        """
        while not self._over and len(self._unread) <= MAX_LINE_BYTES:
            try:
                data = self._connection.recv(MAX_LINE_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._over = not data
            self._unread += data
        *lines, self._unread = self._unread.split(b"\n")
        if (self._over and not lines) or len(self._unread) > MAX_LINE_BYTES:
            raise EOFError
        try:
            return [_object(line) for line in lines]
        except EOFError:
            self._over, self._unread = True, b""
            raise

    def wait(self, seconds: float | None = None) -> list[dict[str, Any]]:
        """The objects that come next, at least one.

        Raises:
            EOFError: as ``hear``, and where nothing comes in time.
        """
        end_seconds = None if seconds is None else time.monotonic() + seconds
        while self._is_ready(select.POLLIN, None if end_seconds is None else end_seconds - time.monotonic()):
            heard = self.hear()
            if heard:
                return heard
        raise EOFError

    def hang_up(self) -> None:
        """End the connection, for those in this process, too, who wait for what it says."""
        with suppress(OSError):  # the other end did it before
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        _open.discard(self)
        self._connection.close()

    def _is_ready(self, what: int, seconds: float | None) -> bool:
        poll = select.poll()
        poll.register(self._connection, what)
        return bool(poll.poll(None if seconds is None else max(0.0, seconds) * 1000))


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise EOFError
    return value


def listen(everywhere: bool, backlog: int = 128) -> socket.socket:
    """A listening socket on a free port.

    Args:
        everywhere: for other hosts; else for processes of this one alone.
        backlog: how many may knock at once.
    """
    if not everywhere:
        return socket.create_server(("127.0.0.1", 0), backlog=backlog)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


def _close_in_child() -> None:
    """A forked child that lives on would keep its parent's connections from ending."""
    for line in list(_open):
        line.close()


os.register_at_fork(after_in_child=_close_in_child)
