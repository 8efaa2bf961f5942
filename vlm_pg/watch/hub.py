"""Connections between ranks, the messages on them, and rank 0's hub, which detects a lost rank and notifies all.

A connection carries one JSON object per line. The kernel closes it when a process dies and keeps it open while the
process lives, however busy it is. A host that vanishes is detected by TCP keepalive.
"""

from __future__ import annotations

import hmac
import json
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from vlm_pg.errors import printable

MAX_LINE_BYTES = 1 << 16
# After 10 s idle a probe every 5 s; four without a reply end the connection. The last one (in milliseconds) does so
# for data that is not acknowledged.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
ERROR_CHARACTERS = 300
# From the first sign of a loss to its announcement: what arrives meanwhile may be its cause.
SETTLE_SECONDS = 0.5
# Within which a new connection must identify itself.
HELLO_SECONDS = 10.0
# Unidentified connections beyond the number of ranks; further ones are closed.
MAX_STRANGERS = 16
LEAVE_SECONDS = 5.0

_open: weakref.WeakSet[Connection] = weakref.WeakSet()


class Connection:
    """One end of a connection. ``send`` may be called from any thread, ``receive`` from one."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):  # macOS has not all
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._connection, self._lock = connection, threading.Lock()
        self._unsent, self._unread, self._has_ended = b"", b"", False
        _open.add(self)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: Mapping[str, Any], within_seconds: float = 0.0) -> None:
        """Send an object. A failure is silent: ``receive`` reports the end of the connection.

        Args:
            within_seconds: how long to wait for room in the socket's buffer; the rest goes with the next object.
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

    def receive(self) -> list[dict[str, Any]]:
        """The objects that have arrived, if any. Raises EOFError: the other end is gone, or sent no JSON object."""
        while not self._has_ended and len(self._unread) <= MAX_LINE_BYTES:
            try:
                data = self._connection.recv(MAX_LINE_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._has_ended = not data
            self._unread += data
        *lines, self._unread = self._unread.split(b"\n")
        if (self._has_ended and not lines) or len(self._unread) > MAX_LINE_BYTES:
            raise EOFError
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            messages = [None]
        if not all(isinstance(message, dict) for message in messages):
            self._has_ended, self._unread = True, b""
            raise EOFError
        return messages

    def wait(self, seconds: float | None = None) -> list[dict[str, Any]]:
        """The next objects, at least one. Raises EOFError: as ``receive``, and at the time-out."""
        end_seconds = None if seconds is None else time.monotonic() + seconds
        while self._is_ready(select.POLLIN, None if end_seconds is None else end_seconds - time.monotonic()):
            if messages := self.receive():
                return messages
        raise EOFError

    def shut_down(self) -> None:
        """End the connection, also for threads of this process that wait on it."""
        with suppress(OSError):  # the other end was faster
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        _open.discard(self)
        self._connection.close()

    def _is_ready(self, event: int, seconds: float | None) -> bool:
        poll = select.poll()
        poll.register(self._connection, event)
        return bool(poll.poll(None if seconds is None else max(0.0, seconds) * 1000))


def listen(everywhere: bool, backlog: int = 128) -> socket.socket:
    """A listening socket on a free port; ``everywhere``: for other hosts too."""
    if not everywhere:
        return socket.create_server(("127.0.0.1", 0), backlog=backlog)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


def _close_in_child() -> None:
    """A forked child that lives on would keep its parent's connections open."""
    for connection in list(_open):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)


@dataclass(frozen=True)
class RankStatus:
    """The last status a rank has sent.

    ``phase``: the current one, "" between two. ``last_phase``: the one that ended last. ``step``: the last completed
    one; None while that is unknown.
    """

    rank: int
    host: str
    process: int
    phase: str = ""
    last_phase: str = ""
    step: int | None = None

    @property
    def name(self) -> str:
        return f"rank {self.rank} (host {self.host}, process {self.process})"

    @property
    def position(self) -> str:
        """As "in phase "rollout", after step 120"."""
        last = f'after phase "{self.last_phase}"' if self.last_phase else "before its first phase"
        position = f'in phase "{self.phase}"' if self.phase else last
        if self.step is None:
            return position
        return f"{position}, {f'after step {self.step}' if self.step else 'before the first step was completed'}"

    def updated(self, position: Mapping[str, Any]) -> Self:
        """With a position as ``position_json`` gives."""
        return replace(self, **{name: position[name] for name in ("phase", "last_phase", "step") if name in position})

    def position_json(self) -> dict[str, Any]:
        return {"phase": self.phase, "last_phase": self.last_phase, "step": self.step}


@dataclass(frozen=True)
class Failure:
    """An exception that ends a rank. ``about_others``: it may be no more than the effect of another rank's end."""

    kind: str
    text: str
    about_others: bool = False

    @classmethod
    def of(cls, error: BaseException, about_others: bool) -> Self:
        lines = str(error).strip().splitlines()
        return cls(type(error).__name__, printable(lines[0] if lines else "", ERROR_CHARACTERS), about_others)

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.text else self.kind


@dataclass(frozen=True)
class Loss:
    """Why all ranks end: a rank died (no failure), or reported its failure. ``others``: ranks lost at the same time."""

    status: RankStatus
    failure: Failure | None = None
    others: tuple[int, ...] = ()

    @property
    def sentence(self) -> str:
        with_it = f", with it rank(s) {', '.join(map(str, self.others))}" if self.others else ""
        if self.failure is None:
            event = (
                f"has gone {self.status.position}{with_it}: it was killed, or its host or the connection to it is lost"
            )
            return f"{self.status.name} {event}. Every rank ends; go on with run.resume=auto."
        event = f"failed {self.status.position}: {self.failure}".removesuffix(".")
        return f"{self.status.name} {event}. Every rank ends; once that is put right, go on with run.resume=auto."

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """The inverse of ``asdict``."""
        failure = None if value["failure"] is None else Failure(**value["failure"])
        return cls(RankStatus(**value["status"]), failure, tuple(value["others"]))


def root_cause(losses: Sequence[Loss]) -> Loss:
    """The loss that caused the others, of losses in order of arrival."""
    first = next((loss for loss in losses if loss.failure is None or not loss.failure.about_others), losses[0])
    gone = sorted(loss.status.rank for loss in losses if loss.failure is None and loss is not first)
    return replace(first, others=tuple(gone) if first.failure is None else ())


class Hub:
    """Rank 0's ends of the connections; a thread serves them until all ranks have left, or one is lost.

    Args:
        server: a listening socket, which the hub closes.
        token: secret that identifies a rank.
        own: status of rank 0.
        world_size: ranks, this one included.
        on_loss: called once, after all ranks have been notified.
    """

    def __init__(
        self, server: socket.socket, token: str, own: RankStatus, world_size: int, on_loss: Callable[[Loss], None]
    ):
        self._server, self._token, self._world_size, self._on_loss = server, token, world_size, on_loss
        self.status = own
        self._connections: dict[int, Connection] = {}
        self._statuses: dict[int, RankStatus] = {}
        # Unidentified connections, each with its deadline.
        self._strangers: dict[Connection, float] = {}
        self.losses: list[Loss] = []
        self._left: set[int] = set()
        self._settled_seconds, self._is_announced = 0.0, False
        self._changed = threading.Condition()
        self._is_leaving = False
        # A byte wakes the thread.
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="rank watch", daemon=True)
        server.setblocking(False)
        self._thread.start()

    def wait_for_all(self, seconds: float) -> list[int]:
        """Wait until every rank has connected, or one is lost; the ranks missing at the time-out."""
        others = range(1, self._world_size)
        with self._changed:
            self._changed.wait_for(lambda: len(self._statuses) == len(others) or self.losses, seconds)
            return [] if self.losses else [rank for rank in others if rank not in self._statuses]

    def broadcast(self, message: Mapping[str, Any], within_seconds: float = 0.0) -> None:
        """Send to all other ranks."""
        for connection in list(self._connections.values()):
            connection.send(message, within_seconds)

    def fail(self, loss: Loss) -> None:
        """Rank 0 itself failed; the others are notified at once, since this process may end on return."""
        with self._changed:
            self.losses = [loss]
        self._announce(loss)

    def leave(self) -> None:
        """The run is complete: notify the others, and wait a little until they have left too."""
        self._is_leaving = True
        self.broadcast({"leaving": True}, LEAVE_SECONDS)
        self._wake.send(b".")
        self._thread.join(LEAVE_SECONDS)

    def _serve(self) -> None:
        end_seconds = None
        while True:
            if self._is_leaving:
                end_seconds = end_seconds or time.monotonic() + LEAVE_SECONDS
                if not self._connections or time.monotonic() > end_seconds:
                    break
            self._poll()
            if self.losses and not self._is_leaving and time.monotonic() >= self._settled_seconds:
                self._announce(root_cause(self.losses))
                return  # the process ends, and the connections with it
        self._server.close()
        for connection in [*self._connections.values(), *self._strangers]:
            connection.close()

    def _announce(self, loss: Loss) -> None:
        with self._changed:
            if self._is_announced:
                return
            self._is_announced = True
        self.broadcast({"lost": asdict(loss)}, SETTLE_SECONDS)
        self._on_loss(loss)

    def _poll(self) -> None:
        """Handle arrived messages and connections, after a bounded wait for them."""
        poll = select.poll()
        ends: dict[int, Any] = {}
        waited_for: list[Any] = [self._server, self._woken, *self._connections.values(), *self._strangers]
        for end in waited_for:
            poll.register(end, select.POLLIN)
            ends[end.fileno()] = end
        ready = [ends[descriptor] for descriptor, _ in poll.poll(SETTLE_SECONDS * 1000 / 2)]
        if self._woken in ready:
            self._woken.recv(4096)
        for stranger, deadline_seconds in list(self._strangers.items()):
            if stranger in ready:
                self._identify(stranger)
            elif time.monotonic() > deadline_seconds:
                self._reject(stranger)
        for rank, connection in list(self._connections.items()):
            if connection in ready:
                self._receive(rank, connection)
        if self._server in ready:
            with suppress(OSError):  # it has gone again
                accepted, _ = self._server.accept()
                if len(self._strangers) >= self._world_size + MAX_STRANGERS:
                    accepted.close()
                else:
                    self._strangers[Connection(accepted)] = time.monotonic() + HELLO_SECONDS

    def _identify(self, stranger: Connection) -> None:
        """Turn a stranger that sends the token into a rank's connection; close any other."""
        try:
            messages = stranger.receive()
            if not messages:
                return
            hello, *further = messages
            is_known = hmac.compare_digest(str(hello["token"]).encode(), self._token.encode())
            status = RankStatus(int(hello["rank"]), str(hello["host"]), int(hello["process"]))
        except (EOFError, KeyError, TypeError, ValueError):
            is_known = False
        if not is_known or status.rank in self._connections or not 0 < status.rank < self._world_size:
            self._reject(stranger)
            return
        del self._strangers[stranger]
        stranger.send({"welcome": {"host": self.status.host, "process": self.status.process}})
        with self._changed:
            self._connections[status.rank], self._statuses[status.rank] = stranger, status
            self._changed.notify_all()
        for message in further:
            self._handle(status.rank, message)

    def _reject(self, stranger: Connection) -> None:
        del self._strangers[stranger]
        stranger.close()

    def _receive(self, rank: int, connection: Connection) -> None:
        try:
            for message in connection.receive():
                self._handle(rank, message)
        except (EOFError, AttributeError, KeyError, TypeError, ValueError):  # gone, or an invalid message
            del self._connections[rank]
            connection.close()
            if rank not in self._left:
                self._add_loss(Loss(self._statuses[rank]))

    def _handle(self, rank: int, message: Mapping[str, Any]) -> None:
        if "at" in message:
            self._statuses[rank] = self._statuses[rank].updated(message["at"])
        if "leaving" in message:
            self._left.add(rank)
        if "failed" in message:
            failed = message["failed"]
            self._statuses[rank] = self._statuses[rank].updated(failed["at"])
            self._add_loss(Loss(self._statuses[rank], Failure(**failed["with"])))
            self._left.add(rank)  # its end follows and is no loss of its own

    def _add_loss(self, loss: Loss) -> None:
        with self._changed:
            if not self.losses:
                self._settled_seconds = time.monotonic() + SETTLE_SECONDS
            self.losses.append(loss)
            self._changed.notify_all()
