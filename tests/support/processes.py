"""Processes for tests that run a module as a user does: arguments, environment, what is printed, an exit status.

A fresh interpreter spends most of a short run on importing torch and transformers. These are forked from one that has
imported them (one per test process) and share nothing else with the test. What a start from nothing does is tested by
those tests that use ``subprocess`` themselves.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

ROOT = Path(__file__).parents[2]
ONE_THREAD_NO_GPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}


class ModuleProcess:
    """``python -m MODULE ARGUMENTS`` in the repository's root, on one thread, without GPUs and Hugging Face's Hub."""

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str] | None = None):
        self._printed = tempfile.TemporaryDirectory()
        self._command = [module, *arguments]
        values = dict(os.environ) | ONE_THREAD_NO_GPU | dict(environment or {})
        self._process = _context().Process(target=_run, args=(self._command, values, self._printed.name))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """Exit status, minus the signal's number if one ended it, None while it runs."""
        return self._process.exitcode

    @property
    def printed(self) -> str:
        """All that it has printed so far, and the warnings and errors after it."""
        return self._read("out") + self._read("err")

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        if self.returncode is None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()

    def finish(self, timeout_seconds: float = 600) -> subprocess.CompletedProcess[str]:
        """Wait for its end; killed and ``TimeoutExpired`` if that takes longer."""
        self._process.join(timeout_seconds)
        if self.returncode is None:
            self.kill()
            self._process.join()
            raise subprocess.TimeoutExpired(self._command, timeout_seconds, *map(self._read, ("out", "err")))
        return subprocess.CompletedProcess(self._command, self.returncode, *map(self._read, ("out", "err")))

    def _read(self, name: str) -> str:
        file = Path(self._printed.name) / name
        return file.read_text(errors="replace") if file.exists() else ""


@cache
def _context() -> ForkServerContext:
    """With the server running: it must import torch on one thread, or its children could not be forked safely."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.warm"])
    before = dict(os.environ)
    os.environ.update(ONE_THREAD_NO_GPU)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def _run(command: list[str], environment: dict[str, str], printed: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    for descriptor, name in ((1, "out"), (2, "err")):
        file = os.open(Path(printed) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    sys.argv = command
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended stays a zombie until its parent waits for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def started_until(reached: Callable[[], bool], start: Callable[[], ModuleProcess], written: Path) -> ModuleProcess:
    """A process that runs and has ``reached`` a state; one that ends before is started again without what it wrote."""
    for _ in range(20):
        process = start()
        while process.returncode is None:
            if reached():
                return process
            time.sleep(0.002)
        assert process.finish().returncode == 0
        shutil.rmtree(written)
    raise AssertionError("20 runs ended before they reached the state")


def start_ranks(
    module: str, *arguments: str, ranks: int = 2, own: Mapping[int, Sequence[str]] | None = None
) -> list[ModuleProcess]:
    """A module on several ranks with the environment that torchrun gives them. ``own``: further arguments of some."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = []
    for rank in range(ranks):
        variables = {name: str(value) for name, value in (shared | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        started.append(ModuleProcess(module, *arguments, *(own or {}).get(rank, ()), environment=variables))
    return started


def launch_ranks(module: str, *arguments: str, ranks: int = 2, timeout_seconds: float = 600) -> str:
    """As ``start_ranks``, to their end; what rank 0 printed.

    Once a rank fails the others, which would wait for it, are killed.
    """
    running = start_ranks(module, *arguments, ranks=ranks)
    deadline = time.monotonic() + timeout_seconds
    while any(process.returncode is None for process in running):
        if any(process.returncode for process in running) or time.monotonic() > deadline:
            for process in running:
                process.kill()
        time.sleep(0.02)
    done = [process.finish() for process in running]
    outputs = [
        f"rank {rank}: {one.returncode}\n{one.stdout[-3000:]}{one.stderr[-3000:]}" for rank, one in enumerate(done)
    ]
    assert not any(one.returncode for one in done), "\n".join(outputs)
    return done[0].stdout
