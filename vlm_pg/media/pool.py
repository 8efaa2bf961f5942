"""The decoding processes of a run, served by a thread while the caller computes."""

from __future__ import annotations

import io
import pickle
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from typing import Any

from vlm_pg.cache import notes
from vlm_pg.errors import SampleError
from vlm_pg.killable.pool import Pool, Task
from vlm_pg.killable.template import Template
from vlm_pg.media import worker

POLL_SECONDS = 0.2


class _Call(Task):
    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], label: str, deadline_seconds: float):
        self._call, self._label, self._deadline_seconds = (function, args), label, deadline_seconds
        self.future: Future[Any] = Future()

    def message(self) -> bytes:
        return pickle.dumps(self._call)

    def answered(self, answer: bytes) -> None:
        content = io.BytesIO(answer)
        kind, value = pickle.load(content)
        if kind == "warnings":  # before its answer
            for note in value:
                notes.warn_once(note)
            kind, value = pickle.load(content)
        if kind == "done":
            self.settle(value)
        elif kind == "bad_sample":
            self.settle(error=SampleError(*value))
        else:
            self.settle(error=RuntimeError(f"a bug surfaced while decoding {self._label}:\n{value}"))

    def lost(self, how: str, output: str) -> None:
        if how:
            output = " / ".join(output.split("\n")).strip(" /")
            message = (
                f"the decoder crashed on {self._label}: {how}{': ' + output if output else ''}. Files that crash a "
                "decoder cannot be used. Re-encode the file, try media.decoder=pyav, or remove the sample."
            )
        else:
            message = (
                f"decoding {self._label} took longer than {self._deadline_seconds:g} s and was given up. Files must "
                "decode within media.deadline_seconds. Raise it, re-encode the file, or remove the sample."
            )
        self.settle(error=SampleError("decoder_crashed" if how else "decode_timeout", message))

    def settle(self, value: Any = None, error: BaseException | None = None) -> None:
        """Resolve the future, unless the caller cancelled it."""
        if self.future.set_running_or_notify_cancel():
            if error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(value)


class WorkerPool(AbstractContextManager["WorkerPool"]):
    """Runs calls in worker processes, which start with the first call or with ``start``.

    Args:
        deadline_seconds: a call that takes longer is given up: its worker is killed and replaced.
        modules: imported before the first call.
        memory_bytes: memory a worker may take beyond that; 0 for no limit.
        gpu: whether workers see this process's GPUs.

    Exceptions of a future are a SampleError ``decode_timeout`` or ``decoder_crashed``, the SampleError the function
    raised, or a RuntimeError with the traceback of a bug.
    """

    def __init__(
        self,
        workers: int,
        deadline_seconds: float,
        modules: Sequence[str] = (),
        memory_bytes: int = 0,
        gpu: bool = False,
    ):
        self._num_workers, self._deadline_seconds = workers, deadline_seconds
        self._modules, self._memory_bytes, self._gpu = modules, memory_bytes, gpu
        self._lock = threading.Lock()
        self._closing = False
        self._failure: BaseException | None = None
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._is_ready = threading.Event()
        self._pool: Pool | None = None

    def start(self) -> None:
        """Start the processes in the background, unless they run."""
        with self._lock:
            if self._pool is None and not self._closing:
                deadline, main = self._deadline_seconds, "vlm_pg.media.worker:main"
                template = Template(self._modules, main, (deadline, self._memory_bytes), deadline, self._gpu)
                pool = Pool(template, deadline, "decoding workers", worker.outcome_of)
                thread = threading.Thread(target=self._serve, args=(pool,), name="vlm_pg-media-pool", daemon=True)
                try:
                    pool.grow(self._num_workers)
                    thread.start()
                except BaseException:  # a later call may be luckier
                    pool.end_all()
                    raise
                self._template, self._pool, self._thread = template, pool, thread

    @property
    def is_started(self) -> bool:
        """Whether processes have been started."""
        return self._pool is not None

    @property
    def is_starting(self) -> bool:
        """Whether processes have been started and none is ready yet."""
        return self.is_started and not self._is_ready.is_set()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are ready or busy."""
        return [] if self._pool is None else self._pool.pids

    def wait_until_ready(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Wait for the first worker of a started pool, or for the failure that ``submit`` will raise.

        Raises:
            InterruptedError: after ``should_stop``, which is polled.
        """
        while not self._is_ready.wait(POLL_SECONDS):
            if should_stop():
                raise InterruptedError("stopped while the decoding workers were starting")

    def submit(self, function: Callable[..., Any], *args: Any, label: str = "") -> Future[Any]:
        """Queue ``function(*args)``; the function must be importable by name. ``label`` names it in messages."""
        call = _Call(function, args, label or getattr(function, "__name__", "call"), self._deadline_seconds)
        self.start()
        with self._lock:
            if self._failure is not None:
                raise RuntimeError("the decoding workers have failed; see the cause above") from self._failure
            if self._closing:
                raise RuntimeError("the pool of decoding workers is closed; nothing can be submitted to it")
            assert self._pool is not None
            self._pool.waiting.append(call)
        self._wake()
        return call.future

    def close(self) -> None:
        """Kill all workers, busy or not, and fail pending calls. May be called twice."""
        with self._lock:
            self._closing = True
        self._wake()
        if self.is_started:
            self._thread.join()
        self._wake_read.close()
        self._wake_write.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _wake(self) -> None:
        with suppress(OSError):  # full: already being woken; closed: the thread has ended
            self._wake_write.send(b"x")

    def _serve(self, pool: Pool) -> None:
        """The pool's thread. Whatever stops it fails all pending calls, so that no caller waits for ever."""
        cause: BaseException = RuntimeError("the pool of decoding workers was closed before this file was decoded")
        try:
            while not self._closing:
                if pool.poll(also=[self._wake_read]):
                    self._wake_read.recv(4096)
                if pool.has_been_ready:
                    self._is_ready.set()
        except BaseException as error:  # handed to every waiting caller below
            cause = error
        with self._lock:
            self._failure = None if self._closing else cause
        left = pool.end_all()
        self._is_ready.set()
        for call in left:
            assert isinstance(call, _Call)
            call.settle(error=cause)
