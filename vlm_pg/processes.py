"""Shared by all kinds of worker processes: they may be killed at any moment, and never outlive their parent."""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

PARENT_CHECK_MS = 1000
# Numeric libraries read these at start-up, torch too.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
# Environment of a process with one compute thread, with and without GPUs.
ONE_THREAD: Mapping[str, str] = dict.fromkeys(_THREADS, "1")
ONE_THREAD_NO_GPU: Mapping[str, str] = {"CUDA_VISIBLE_DEVICES": "", **ONE_THREAD}


def start_interpreter(
    function: str, arguments: Sequence[Any], stderr: IO[bytes], environment: Mapping[str, str], **options: Any
) -> subprocess.Popen[bytes]:
    """A fresh interpreter that calls ``function`` ("package.module:function") of JSON values.

    It never imports the user's main script. ``environment`` extends this process's, ``options`` are those of Popen.
    """
    module, _, name = function.partition(":")
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); "
        f"from {module} import {name}; {name}(*json.loads(sys.argv[2]))"
    )
    command = [sys.executable, "-P", "-c", code, str(Path(__file__).parents[1]), json.dumps(arguments)]
    return subprocess.Popen(command, stderr=stderr, env={**os.environ, **environment}, **options)


def resolve(name: str) -> Any:
    """The object that "package.module:name" names; only for names written in this package."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def outlive_signals() -> None:
    """Ignore signals that end a whole job (Ctrl-C, SIGTERM, SIGHUP): the parent finishes its step and ends its workers.

    SIGTERM still ends a program that the worker starts: it inherits SIG_IGN, but no handler.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda _number, _frame: None)
        signal.siginterrupt(number, False)  # C libraries' system calls go on


def end_with_parent(connection: Connection, parent_pid: int) -> None:
    """End this process as soon as the parent is gone; runs in a thread of the worker.

    The parent is gone when its end of ``connection`` hangs up, or when this process gets another parent. A worker that
    leads a process group kills the group.
    """
    poll = select.poll()
    poll.register(connection, 0)  # hang-up and error are always reported
    while not poll.poll(PARENT_CHECK_MS) and os.getppid() == parent_pid:
        pass
    if os.getpgrp() == os.getpid():
        kill_group(os.getpid())
    os._exit(0)


def kill_group(pid: int) -> None:
    """Kill the process group that ``pid`` leads, the leader included."""
    with suppress(ProcessLookupError, PermissionError):  # gone, or (macOS) only a zombie
        os.killpg(pid, signal.SIGKILL)


def has_ended(pid: int) -> bool:
    """Whether a child has ended; its id, and its group's, stays reserved until it is waited for."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # already waited for
        return True


def ended_by_alarm() -> str:
    """``how_it_ended`` of a process that its own alarm ended."""
    return how_it_ended(-signal.SIGALRM)


def how_it_ended(code: int) -> str:
    """A process's return code in words: "exit code 3", "signal SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
