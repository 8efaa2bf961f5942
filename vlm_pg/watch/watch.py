"""Detection of lost ranks: each rank has a connection to rank 0, which the kernel closes when a process dies.

A rank sends its identity, its phases with the last completed step, the exception that ends it, or that it leaves after
a complete run. Rank 0 sends all ranks its own phases and the first loss; its own end shows on every connection. There
is no heartbeat, so a busy rank is never taken for dead.

After a loss a rank has a few seconds to end with an exception of its own or to finish a file; then its process ends,
even if its main thread is stuck in a collective.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vlm_pg.distributed import RankLayout, SharedNote, is_about_other_ranks
from vlm_pg.errors import EXIT_RANK_LOST, ConfigError, RankLost, VlmPgError
from vlm_pg.watch.hub import LEAVE_SECONDS, SETTLE_SECONDS, Connection, Failure, Hub, Loss, RankStatus, listen

CONNECT_SECONDS = 60.0
# From the announcement of a loss to the end of the process.
GRACE_SECONDS = 5.0
# For a failed rank to close its trackers, workers and logs.
CLOSE_SECONDS = 30.0
# For a rank whose collective failed to learn whether another rank caused that.
DOUBT_SECONDS = 4 * SETTLE_SECONDS
FLUSH_SECONDS = 1.0

# Consecutive runs of this process; equal on all ranks.
_runs = 0


class RankWatch:
    """A context manager, connected inside the block; it observes ``Phases``. A single process needs no watch.

    Args:
        ranks: joined (``distributed.join_ranks``).
        completed_step: the last completed step of this rank, None while that is unknown.

    Raises:
        ConfigError: ranks cannot connect to rank 0.
    """

    def __init__(self, ranks: RankLayout, completed_step: Callable[[], int | None] = lambda: None):
        self._ranks, self.completed_step = ranks, completed_step
        self._own = RankStatus(ranks.rank, socket.gethostname(), os.getpid())
        self._phases: list[str] = []
        self._hub: Hub | None = None
        self._connection: Connection | None = None
        self._rank0 = RankStatus(0, "?", 0)
        # A propagating exception, and its phase, which has ended when ``fail`` is called.
        self._raised: BaseException | None = None
        self._raised_in = ""
        self._lock = threading.Lock()
        self._failure: Failure | None = None
        self._loss: Loss | None = None
        self._has_loss = threading.Event()
        self._leaving = False
        if ranks.world_size == 1:
            return
        global _runs
        _runs += 1
        self._connect(f"watch/{_runs}")

    def begun(self, name: str) -> None:
        self._phases.append(name)
        self._raised = None
        self._send_status()

    def ended(self, name: str) -> None:
        error = sys.exception()
        if error is not None and error is not self._raised:
            self._raised, self._raised_in = error, self._own.phase
        self._phases.pop()
        self._own = replace(self._own, last_phase=name)
        self._send_status()

    def fail(self, error: BaseException) -> None:
        """Notify all ranks that this one ends with ``error``, which the caller may raise afterwards.

        This process then has ``CLOSE_SECONDS``.

        Raises:
            RankLost: the error is the effect of another rank's end, which has been printed.
        """
        if self._ranks.world_size == 1 or self._failure is not None or isinstance(error, RankLost):
            return
        failure = Failure.of(error, is_about_other_ranks(error))
        if failure.about_others or (self._hub is not None and self._hub.losses):
            self._has_loss.wait(DOUBT_SECONDS)
        with self._lock:
            loss = self._loss
            if loss is not None and failure.about_others:
                self._ending.within(GRACE_SECONDS, EXIT_RANK_LOST)
                self._ending.print_once(loss.sentence)
                raise RankLost(loss.sentence) from error
            self._failure = failure
            interrupted, is_message = isinstance(error, KeyboardInterrupt), isinstance(error, VlmPgError)
            self._ending.within(CLOSE_SECONDS, 130 if interrupted else 2 if is_message else 1)
        if loss is not None:
            self._print_unless_alike(loss, failure)
            return
        if error is self._raised:
            self._own = replace(self._own, phase=self._raised_in)
        if self._hub is not None:
            self._hub.fail(Loss(self._own, failure))
        if self._connection is not None:
            self._connection.send({"failed": {"at": self._own.position_json(), "with": asdict(failure)}}, LEAVE_SECONDS)

    def _print_unless_alike(self, loss: Loss, failure: Failure) -> None:
        """An error that all ranks have is printed by each of them itself."""
        if loss.failure is None or (loss.failure.kind, loss.failure.text) != (failure.kind, failure.text):
            self._ending.print_once(loss.sentence)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(error)
            return
        self._leaving = True
        if self._hub is not None:
            self._hub.leave()
        if self._connection is not None:
            self._connection.send({"leaving": True}, LEAVE_SECONDS)
            self._connection.shut_down()
            self._receiver.join()
            self._connection.close()

    def _connect(self, name: str) -> None:
        own_network = network()
        try:
            SharedNote(f"{name}/network/{self._ranks.rank}").write(own_network)
        except ConnectionError as error:
            raise _silent(0) from error
        meeting = SharedNote(f"{name}/meeting")
        if self._ranks.is_rank0:
            self._accept_all(name, own_network, meeting)
            return
        # Longer than rank 0 waits for the others, so that rank 0 names the missing ones.
        port, token, where = self._read(meeting, 0, 2 * CONNECT_SECONDS).split()
        self._ending = Ending(f"{name}/{token}")
        self._connect_to("127.0.0.1" if where == "near" else os.environ["MASTER_ADDR"], int(port), token)

    def _accept_all(self, name: str, own_network: str, meeting: SharedNote) -> None:
        """On rank 0: listen, and wait for all others."""
        end_seconds = time.monotonic() + CONNECT_SECONDS
        networks = {
            self._read(SharedNote(f"{name}/network/{rank}"), rank, max(1.0, end_seconds - time.monotonic()))
            for rank in range(1, self._ranks.world_size)
        }
        is_near = networks == {own_network}
        server = listen(everywhere=not is_near, backlog=max(128, self._ranks.world_size))
        token = secrets.token_hex(16)
        self._ending = Ending(f"{name}/{token}")
        self._hub = Hub(server, token, self._own, self._ranks.world_size, self._on_loss)
        port = server.getsockname()[1]
        meeting.write(f"{port} {token} {'near' if is_near else 'far'}")
        missing = self._hub.wait_for_all(CONNECT_SECONDS)
        if missing:
            raise ConfigError(
                f"rank(s) {', '.join(map(str, missing))} did not connect to rank 0 (host {self._own.host}, TCP port "
                f"{port}) within {CONNECT_SECONDS:.0f} s. Processes of a run connect to each other on ports that the "
                "system chooses. Let the hosts of this run do so."
            )

    def _read(self, note: SharedNote, writer: int, within_seconds: float) -> str:
        try:
            return note.read(within_seconds)
        except TimeoutError as error:
            raise _silent(writer) from error

    def _connect_to(self, host: str, port: int, token: str) -> None:
        try:
            self._connection = Connection(socket.create_connection((host, port), CONNECT_SECONDS))
            hello = {"token": token, "rank": self._own.rank, "host": self._own.host, "process": self._own.process}
            self._connection.send(hello, CONNECT_SECONDS)
            welcome, *further = self._connection.wait(CONNECT_SECONDS)
            self._rank0 = RankStatus(0, **welcome["welcome"])
        except (OSError, EOFError, KeyError, TypeError) as error:
            raise ConfigError(
                f"rank {self._own.rank} (host {self._own.host}) cannot connect to rank 0 at {host}, TCP port {port} "
                f"({error or 'no answer'}). Processes of a run connect to each other on ports that the system chooses, "
                "at the address that MASTER_ADDR names. Let the hosts of this run do so."
            ) from error
        self._receiver = threading.Thread(
            target=self._receive, args=(self._connection, further), name="rank watch", daemon=True
        )
        self._receiver.start()

    def _send_status(self) -> None:
        phase = "/".join(self._phases)
        self._own = replace(self._own, phase=phase, step=self.completed_step())
        if self._hub is not None:
            self._hub.status = self._own
            self._hub.broadcast({"at": self._own.position_json()})
        if self._connection is not None:
            self._connection.send({"at": self._own.position_json()})

    def _receive(self, connection: Connection, messages: list[dict[str, Any]]) -> None:
        """Handle rank 0's messages until it leaves or is lost."""
        try:
            while True:
                for message in messages or connection.wait():
                    if "at" in message:
                        self._rank0 = self._rank0.updated(message["at"])
                    if "leaving" in message:
                        return
                    if "lost" in message:
                        return self._on_loss(Loss.from_json(message["lost"]))
                messages = []
        except EOFError:
            self._on_loss(Loss(self._rank0))

    def _on_loss(self, loss: Loss) -> None:
        with self._lock:
            if loss.status.rank == self._ranks.rank or self._leaving:
                return
            self._loss = loss
            if self._failure is None:
                self._ending.within(GRACE_SECONDS, EXIT_RANK_LOST, loss.sentence)
            else:
                self._print_unless_alike(loss, self._failure)
            self._has_loss.set()


def _silent(rank: int) -> ConfigError:
    return ConfigError(
        f"rank {rank} has met the others and sends nothing any more. Start all of them again; its own output says why."
    )


def network() -> str:
    """Equal for two processes that reach each other by 127.0.0.1."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


class Ending:
    """Ends this process at a set time, whatever its main thread is doing; ``name`` identifies the run."""

    def __init__(self, name: str):
        self._name = name
        self._claim: Any = None
        self._changed = threading.Condition()
        self._line = ""
        self._at_seconds, self._code = 0.0, 0
        self._thread: threading.Thread | None = None

    def within(self, seconds: float, code: int, line: str = "") -> None:
        """End with this exit code in so many seconds, and print ``line`` then; replaces an earlier call."""
        with self._changed:
            self._at_seconds, self._code, self._line = time.monotonic() + seconds, code, line
            if self._thread is None:
                self._thread = threading.Thread(target=self._wait, name="rank ending", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def print_once(self, line: str) -> None:
        """Print the line, unless another process of this host has: it would only be repeated."""
        if self._claim is None and (claim := _claim(self._name)) is not None:
            self._claim = claim
            # Not through sys.stderr, whose lock may be held by a thread that hangs.
            os.write(2, f"vlm-pg: error: {line}\n".encode(errors="backslashreplace"))

    def _wait(self) -> None:
        with self._changed:
            while (left_seconds := self._at_seconds - time.monotonic()) > 0:
                self._changed.wait(left_seconds)
            if self._line:
                self.print_once(self._line)
        flushing = threading.Thread(target=lambda: [s.flush() for s in (sys.stdout, sys.stderr)], daemon=True)
        flushing.start()
        flushing.join(FLUSH_SECONDS)
        os._exit(self._code)


def _claim(name: str) -> Any:
    """Claim a name for this process until it ends; None if another process of the host holds it."""
    if sys.platform != "linux":  # elsewhere such names are files, which remain: every process prints
        return name
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0vlm_pg/{name}")
    except OSError:
        claim.close()
        return None
    return claim
