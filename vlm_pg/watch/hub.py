"""Rank 0's end of the connections of all ranks: who comes, where each one is, who is lost; and all are told."""

from __future__ import annotations

import hmac
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from vlm_pg.watch.lines import Line
from vlm_pg.watch.standing import Failure, Loss, Standing, worst

# From the first sign of a loss to the word about it: what else comes meanwhile may be what is behind it.
SETTLE_SECONDS = 0.5
# In which a connection must say whose it is.
HELLO_SECONDS = 10.0
# Beside as many as there are ranks; whoever else knocks is turned away.
MAX_STRANGERS = 16
LEAVE_SECONDS = 5.0


class Hub:
    """Listens in a thread of its own until all have left, or one is lost.

    Args:
        server: a listening socket, closed by this.
        token: what a rank must say first.
        own: of rank 0 itself.
        world_size: ranks, this one included.
        on_loss: called once, when all have been told.
    """

    def __init__(
        self, server: socket.socket, token: str, own: Standing, world_size: int, on_loss: Callable[[Loss], None]
    ):
        self._server, self._token, self._world_size, self._on_loss = server, token, world_size, on_loss
        self.standing = own
        self._lines: dict[int, Line] = {}
        self._standings: dict[int, Standing] = {}
        # Connections that have not said yet whose they are, and until when they may.
        self._strangers: dict[Line, float] = {}
        self._losses: list[Loss] = []
        self._left: set[int] = set()
        self._settled_seconds, self._is_decided = 0.0, False
        self._changed = threading.Condition()
        self._leaving = False
        # A byte wakes the thread.
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, name="rank watch", daemon=True)
        server.setblocking(False)
        self._thread.start()

    def wait_for_all(self, seconds: float) -> list[int]:
        """Until every rank has come, or one is lost; those that have not come in time."""
        others = range(1, self._world_size)
        with self._changed:
            self._changed.wait_for(lambda: len(self._standings) == len(others) or self._losses, seconds)
            return [] if self._losses else [rank for rank in others if rank not in self._standings]

    def say(self, message: Mapping[str, Any], within_seconds: float = 0.0) -> None:
        """To all other ranks."""
        for line in list(self._lines.values()):
            line.say(message, within_seconds)

    def failed(self, loss: Loss) -> None:
        """Rank 0 itself has; the others are told at once, for it may end as soon as this returns."""
        with self._changed:
            self._losses = [loss]
        self._decide(loss)

    @property
    def suspects(self) -> bool:
        """Whether a rank is lost, as far as is known here."""
        return bool(self._losses)

    def leave(self) -> None:
        """All is done: tell the others, and wait a little until they have left too."""
        self._leaving = True
        self.say({"leaving": True}, LEAVE_SECONDS)
        self._wake.send(b".")
        self._thread.join(LEAVE_SECONDS)

    def _listen(self) -> None:
        ends_seconds = None
        while True:
            if self._leaving:
                ends_seconds = ends_seconds or time.monotonic() + LEAVE_SECONDS
                if not self._lines or time.monotonic() > ends_seconds:
                    break
            self._turn()
            if self._losses and not self._leaving and time.monotonic() >= self._settled_seconds:
                self._decide(worst(self._losses))
                return  # the process ends, and the connections with it
        self._server.close()
        for line in [*self._lines.values(), *self._strangers]:
            line.close()

    def _decide(self, loss: Loss) -> None:
        with self._changed:
            if self._is_decided:
                return
            self._is_decided = True
        self.say({"lost": loss.said()}, SETTLE_SECONDS)
        self._on_loss(loss)

    def _turn(self) -> None:
        """Take what has come; wait for that for at most a while."""
        poll = select.poll()
        ends: dict[int, Any] = {}
        waited_for: list[Any] = [self._server, self._woken, *self._lines.values(), *self._strangers]
        for end in waited_for:
            poll.register(end, select.POLLIN)
            ends[end.fileno()] = end
        ready = [ends[descriptor] for descriptor, _ in poll.poll(SETTLE_SECONDS * 1000 / 2)]
        if self._woken in ready:
            self._woken.recv(4096)
        for line, until_seconds in list(self._strangers.items()):
            if line in ready:
                self._meet(line)
            elif time.monotonic() > until_seconds:
                self._forget(line)
        for rank, line in list(self._lines.items()):
            if line in ready:
                self._take(rank, line)
        if self._server in ready:
            self._accept()

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:  # whoever it was has gone again
            return
        if len(self._strangers) >= self._world_size + MAX_STRANGERS:
            connection.close()
            return
        self._strangers[Line(connection)] = time.monotonic() + HELLO_SECONDS

    def _meet(self, line: Line) -> None:
        """A connection says whose it is; one that cannot is closed."""
        try:
            heard = line.hear()
            if not heard:
                return
            hello, *further = heard
            known = hmac.compare_digest(str(hello["token"]).encode(), self._token.encode())
            standing = Standing(int(hello["rank"]), str(hello["host"]), int(hello["process"]))
        except (EOFError, KeyError, TypeError, ValueError):
            self._forget(line)
            return
        if not known or standing.rank in self._lines or not 0 < standing.rank < self._world_size:
            self._forget(line)
            return
        del self._strangers[line]
        line.say({"welcome": {"host": self.standing.host, "process": self.standing.process}})
        with self._changed:
            self._lines[standing.rank], self._standings[standing.rank] = line, standing
            self._changed.notify_all()
        for message in further:
            self._note(standing.rank, message)

    def _forget(self, line: Line) -> None:
        del self._strangers[line]
        line.close()

    def _take(self, rank: int, line: Line) -> None:
        try:
            for message in line.hear():
                self._note(rank, message)
        except (EOFError, AttributeError, KeyError, TypeError, ValueError):  # gone, or speaks another language
            del self._lines[rank]
            line.close()
            if rank not in self._left:
                with self._changed:
                    self._lose(Loss(self._standings[rank]))

    def _note(self, rank: int, message: Mapping[str, Any]) -> None:
        if "at" in message:
            self._standings[rank] = self._standings[rank].at(message["at"])
        if "leaving" in message:
            self._left.add(rank)
        if "failed" in message:
            said = message["failed"]
            self._standings[rank] = self._standings[rank].at(said["at"])
            with self._changed:
                self._lose(Loss(self._standings[rank], Failure(**said["with"])))
            self._left.add(rank)  # its end follows, and says nothing more

    def _lose(self, loss: Loss) -> None:
        if not self._losses:
            self._settled_seconds = time.monotonic() + SETTLE_SECONDS
        self._losses.append(loss)
        self._changed.notify_all()
