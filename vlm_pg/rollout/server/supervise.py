"""Processes of ``vlm-pg serve``: servers that are started together, watched, and stopped whatever ends this process.

Every server, and the command that is run beside them, leads a process group: Ctrl-C in a terminal reaches this process
alone, which stops the command first and the servers after it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple, Self
from urllib.parse import urlsplit

from vlm_pg.errors import ConfigError, ServerError, printable
from vlm_pg.processes import has_ended, how_it_ended, kill_group
from vlm_pg.rollout.server.launch import ServerCommand

POLL_SECONDS, PROGRESS_SECONDS, HEALTH_SECONDS = 0.2, 10.0, 5.0
# From SIGTERM to SIGKILL.
STOP_SECONDS = 30.0
LOG_LINES, LINE_CHARACTERS, LOG_BYTES = 15, 200, 16384
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# Set for the command.
SERVING = "VLM_PG_SERVING"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def serve(
    commands: Sequence[ServerCommand],
    folder: Path,
    start_seconds: float,
    beside: Sequence[str],
    environment: Mapping[str, str],
    log: Callable[[str], None],
) -> int:
    """Start the servers and run ``beside`` once all are healthy, or wait for a signal; the exit code.

    Args:
        commands: of the servers.
        folder: of their logs.
        start_seconds: time limit until they are healthy.
        beside: a command and its arguments, may be empty. SIGINT is passed on to it, SIGTERM too, and SIGHUP and
            SIGUSR1 as SIGTERM, which launchers of ranks handle and training treats alike.
        environment: of ``beside``, beyond this process's.
        log: prints one line.

    Raises:
        ConfigError: a command or port that cannot be used.
        ServerError: a server ended, or was not healthy in time.
    """
    received = Signals()
    with Servers(commands, folder, received, log) as servers:
        servers.start()
        servers.wait_until_healthy(start_seconds)
        if number := received.take():
            return 128 + number
        log(f"all servers are healthy: {', '.join(command.url for command in commands)}")
        if beside:
            return _run_beside(beside, environment, servers, received)
        # SIGUSR1 announces a time limit, until which training may go on.
        while (number := received.take()) in (None, signal.SIGUSR1):
            servers.check()
            time.sleep(POLL_SECONDS)
        return 0 if number == signal.SIGTERM else 128 + number


def _run_beside(beside: Sequence[str], environment: Mapping[str, str], servers: Servers, received: Signals) -> int:
    try:
        process = subprocess.Popen(
            beside,
            env={**os.environ, **environment, SERVING: "1"},
            stdin=subprocess.DEVNULL,
            process_group=0,
            preexec_fn=_end_with_parent,
        )
    except OSError as error:
        raise ConfigError(f"{beside[0]} cannot be run: {error}. Give a command after --.") from error
    failure: ServerError | None = None
    try:
        while not has_ended(process.pid):
            while number := received.take():
                process.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
            # Schedulers signal all processes of a job: a server that ends after that is no failure.
            if failure is None and not received.any:
                try:
                    servers.check()
                except ServerError as error:
                    failure = error
                    process.terminate()
            time.sleep(POLL_SECONDS)
    except BaseException:
        _end_group(process)
        raise
    code = process.wait()
    if failure is None and code and not received.any:
        servers.check()  # what it failed of
    if failure is not None:
        raise failure
    return code if code >= 0 else 128 - code


class Signals:
    """Signals that end the job, in order of arrival; those that this process was started to ignore stay ignored."""

    def __init__(self) -> None:
        self._waiting: list[int] = []
        self.any = False
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    def take(self) -> int | None:
        """The next one."""
        return self._waiting.pop(0) if self._waiting else None

    def clear(self) -> None:
        self._waiting.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._waiting.append(number)
        self.any = True


class Server(NamedTuple):
    """A running server; ``begin``: where its output begins in the log."""

    command: ServerCommand
    process: subprocess.Popen[bytes]
    log: Path
    begin: int

    def lines(self) -> list[str]:
        """The end of its output."""
        with self.log.open("rb") as file:
            file.seek(max(self.begin, self.log.stat().st_size - LOG_BYTES))
            return file.read().decode(errors="replace").splitlines()

    def last_lines(self) -> str:
        lines = (f"  {printable(line, LINE_CHARACTERS)}" for line in self.lines()[-LOG_LINES:])
        return f"Last lines of {self.log}:\n" + "\n".join(lines)


class Servers:
    """Servers that run together; a context manager that stops them."""

    def __init__(self, commands: Sequence[ServerCommand], folder: Path, received: Signals, log: Callable[[str], None]):
        self._commands, self._folder, self._received, self._log = commands, folder, received, log
        self._running: list[Server] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """SIGTERM to all, and SIGKILL to their groups after STOP_SECONDS, or at a further signal."""
        self._received.clear()
        processes = [server.process for server in self._running]
        for process in processes:
            if not has_ended(process.pid):
                process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        while not all(has_ended(process.pid) for process in processes):
            if time.monotonic() > deadline or self._received.take():
                break
            time.sleep(POLL_SECONDS)
        for process in processes:
            _end_group(process)
        if processes:
            self._log(f"stopped {len(processes)} server(s)")

    def start(self) -> None:
        """Raises ConfigError: the executable is not found, or a port cannot be bound."""
        for command in self._commands:
            _check_executable(command.command[0])
            _check_port(command)
        self._folder.mkdir(parents=True, exist_ok=True)
        for command in self._commands:
            path = self._folder / f"server-{command.bind[1]}.log"
            with path.open("ab") as file:
                file.write(f"\n{command}\n".encode())
                file.flush()
                begin = file.tell()
                process = subprocess.Popen(
                    command.command,
                    env={**os.environ, **command.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                    preexec_fn=_as_server,
                )
            self._running.append(Server(command, process, path, begin))
        self._log(f"started {len(self._running)} server(s); their logs are in {self._folder}")

    def wait_until_healthy(self, limit_seconds: float) -> None:
        """Or until a signal arrives. Raises ServerError: one ended, or the time is over."""
        since, logged_seconds, waiting = time.monotonic(), 0.0, self._running
        while waiting and not self._received.any:
            self.check()
            waiting = [server for server in waiting if not _is_healthy(server.command)]
            seconds = time.monotonic() - since
            if waiting and seconds > limit_seconds:
                raise ServerError(
                    f"The server at {waiting[0].command.url} was not healthy after {limit_seconds:g} s. Raise "
                    f"rollout.server.launch.start_seconds if it was still loading. {waiting[0].last_lines()}"
                )
            if waiting and seconds - logged_seconds > PROGRESS_SECONDS:
                logged_seconds, lines = seconds, waiting[0].lines()
                last = f"; {waiting[0].log.name}: {printable(lines[-1], LINE_CHARACTERS)}" if lines else ""
                healthy = len(self._running) - len(waiting)
                self._log(f"{healthy} of {len(self._running)} servers healthy after {seconds:.0f} s{last}")
            time.sleep(POLL_SECONDS)

    def check(self) -> None:
        """Raises ServerError: a server has ended."""
        for server in self._running:
            if has_ended(server.process.pid):
                _end_group(server.process)
                raise ServerError(
                    f"The server at {server.command.url} has ended ({how_it_ended(server.process.returncode)}). "
                    f"Correct what its log reports and start again (training: run.resume=auto). {server.last_lines()}"
                )


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a process and its group; its id is not free for others before it is waited for."""
    if process.returncode is None:
        kill_group(process.pid)
        process.wait()


def _is_healthy(command: ServerCommand) -> bool:
    host = urlsplit(command.url).hostname
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{host}:{command.bind[1]}/health", timeout=HEALTH_SECONDS) as response:
            return bool(response.status == 200)
    except (OSError, HTTPException):
        return False


def _check_executable(executable: str) -> None:
    if shutil.which(executable) is None:
        raise ConfigError(
            f"rollout.server.launch.executable is {executable!r}, which is no command here. It must be vLLM's `vllm`; "
            "install vLLM in an environment of its own, since it pins its own torch, and give the path "
            "(rollout.server.launch.executable=/path/to/bin/vllm)."
        )


def _check_port(command: ServerCommand) -> None:
    host, port = command.bind
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise ConfigError(
            f"A server is to be started at {command.url}, and {host}:{port} cannot be bound ({error.strerror or error})"
            ". It must be an address of this machine and a free port. Stop what listens there, or set another port in "
            "rollout.server.url."
        ) from error


def _end_with_parent() -> None:
    """In a child before exec: SIGTERM when this process is killed."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _as_server() -> None:
    """In a child before exec. A scheduler's SIGUSR1 to all processes of a job must not end servers before training."""
    _end_with_parent()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
