"""Peak memory of a piece of work above the level before it, and child processes that end with their parent."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import resource
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from vlm_pg.bench.runner import CannotRun
from vlm_pg.processes import how_it_ended

T = TypeVar("T")

RESETTABLE = "VmHWM after a reset through /proc/self/clear_refs, minus VmRSS before, in a child process of its own"
NOT_RESETTABLE = (
    "ru_maxrss minus what was resident before, in a child process of its own; loading the model counts, so small "
    "peaks are hidden"
)
CUDA = "torch.cuda.max_memory_allocated minus memory_allocated before, in the timing process, during the warm-up"

# prctl option of Linux (sys/prctl.h).
_PR_SET_PDEATHSIG = 1
# mallopt parameters of glibc (malloc.h).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


@dataclass(frozen=True)
class Peak:
    """``num_bytes`` above the level before; ``method``: how it was measured."""

    num_bytes: int
    method: str


def give_freed_memory_back() -> None:
    """Make glibc return freed tensors at once: one arena, and a map of its own for every block above 128 KiB.

    Otherwise memory that was freed stays resident and is used again, and a peak depends on what ran before it. This
    costs time, so only processes that measure memory do it. Other C libraries are left as they are.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_MMAP_THRESHOLD, 128 * 1024)
        libc.mallopt(_M_TRIM_THRESHOLD, 128 * 1024)


def peak_above_baseline(run: Callable[[], T], on_gpu: bool = False) -> tuple[T, Peak]:
    """Run it and return its result and the peak of memory, the GPU's or the resident one, above the level before."""
    if on_gpu:
        import torch

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = run()
        return result, Peak(torch.cuda.max_memory_allocated() - before, CUDA)
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    resettable = _reset_peak()
    before = _status_bytes("VmRSS")
    result = run()
    after = _status_bytes("VmHWM") if resettable else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return result, Peak(max(0, after - before), RESETTABLE if resettable else NOT_RESETTABLE)


def in_child(run: Callable[[], T]) -> T:
    """Run it in a forked child and return its (picklable) result.

    Call it before this process has started threads: a fork copies only the calling one.

    Raises:
        CannotRun: by ``run``, or the child was killed by a signal (out of memory, mostly).
        RuntimeError: the child raised; the message is its traceback.
    """
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=_work_and_exit, args=(run, sender, os.getpid()))
    child.start()
    sender.close()
    try:
        answer = receiver.recv()
    except EOFError:
        child.join()
        name = how_it_ended(child.exitcode or 0).removeprefix("signal ")
        hint = " (what the kernel sends when memory runs out)" if name == "SIGKILL" else ""
        answer = CannotRun(f"memory run failed: killed by {name}{hint}")
    finally:
        child.kill()
        child.join()
    if isinstance(answer, Exception):
        raise answer
    return answer


def _work_and_exit(run: Callable[[], Any], sender: Connection, parent: int) -> None:
    end_with_parent(parent)
    with contextlib.suppress(OSError):
        # If memory runs out, this child goes first and the measurement lives on.
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        answer = run()
    except CannotRun as error:
        answer = error
    except Exception:
        answer = RuntimeError(traceback.format_exc())
    sender.send(answer)
    # Not sys.exit, which would run the parent's exit handlers.
    os._exit(0)


def end_with_parent(parent: int) -> None:
    """From now on the kernel kills this process when ``parent``, which started it, ends, also by SIGTERM or SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def _reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    # Some containers accept the write and do nothing.
    return _status_bytes("VmHWM") - _status_bytes("VmRSS") < 4 * 2**20


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
