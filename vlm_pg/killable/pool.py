"""Processes that can be killed: one task each, lost ones replaced. Media are decoded and answers are checked in them.

What holds for every pool, whatever its workers do and however they start (``starting.py``, ``template.py``):

- A task that takes longer than the deadline costs its worker; so does one that ends its process. Both are told of as a
  loss of this task and of no other, with how the process ended and its last words. A worker is replaced at once.
- The deadline begins when a worker has begun the task. A worker that ended before that (it was killed while it was
  idle, or is just ending) has cost no task: another one gets it, once.
- No answer is taken for another's: each process has a connection of its own, closed when it is killed.
- C code that holds the interpreter's lock is stopped like any other: by the parent, or, should that be gone, by an
  alarm of the kernel (``worker.py``). A task that its own alarm ended took too long.
- Memory is limited by the kernel (``worker.limit_memory``). A worker may say that it is used up, and is replaced.
- Processes that do not start are a fault of the installation: an error, after three in one place, with what they said.
- All end with their parent, killed or not, and go on when a signal asks the whole job to end (``vlm_pg.processes``).
- They get and send bytes; what these mean is the owner's: pickles of frames, JSON of answers. A worker that stalls in
  the middle of a message is given up like any other.

There is no thread here: whoever owns a pool lets it ``turn``.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from vlm_pg.killable.starting import START_SECONDS, AllEnded, Starter, Task, Worker
from vlm_pg.killable.worker import ASKS, BEGUN, READY, USED_UP
from vlm_pg.processes import ended_by_alarm

MAX_FAILED_STARTS = 3
MAX_TRIES = 2


class Pool:
    """Workers of one kind and the tasks that wait for them.

    Args:
        starter: how workers start.
        deadline_seconds: a task that takes longer is given up.
        called: what the processes are in messages.
        answer_question: the answer to what a worker asks in the middle of its task.
    """

    def __init__(
        self,
        starter: Starter,
        deadline_seconds: float,
        called: str,
        answer_question: Callable[[bytes], bytes] | None = None,
    ):
        self._starter, self._deadline_seconds, self._called = starter, deadline_seconds, called
        self._answer_question = answer_question
        self._times_all_ended = 0
        self.waiting: deque[Task] = deque()
        self.workers: list[Worker] = []
        self.has_been_ready = False

    @property
    def pids(self) -> list[int]:
        """Process ids, as far as they are known."""
        return [worker.pid for worker in list(self.workers) if worker.pid is not None]

    @property
    def is_working(self) -> bool:
        """Whether a task waits or runs."""
        return bool(self.waiting) or any(worker.task is not None for worker in self.workers)

    def grow(self, count: int) -> None:
        """Let there be at least ``count`` workers."""
        while len(self.workers) < count:
            self.workers.append(self._starter.start())

    def turn(self, timeout_seconds: float | None = None, also: Sequence[Any] = ()) -> list[Any]:
        """Hand out tasks, take what comes, end who is late.

        Waits for that until the next deadline, for at most ``timeout_seconds``, and no longer than until one of
        ``also`` is readable.

        Returns:
            What of ``also`` is readable.

        Raises:
            RuntimeError: the processes do not start.
        """
        try:
            self._hand_out()
            readable = self._collect(timeout_seconds, also)
            self._end_overdue()
        except AllEnded:
            self._begin_again()
            return []
        return readable

    def end_all(self) -> list[Task]:
        """Kill all workers, busy or not; the tasks that are left."""
        left = [worker.task for worker in self.workers if worker.task is not None] + list(self.waiting)
        self.waiting.clear()
        self._starter.end_all(self.workers, at_once=not self.has_been_ready)
        for worker in self.workers:
            worker.stderr.close()
        self.workers, self._times_all_ended = [], 0
        return left

    def _hand_out(self) -> None:
        for worker in self.workers:
            if worker.is_busy:
                continue
            if not self.waiting:
                return
            if worker.connection.poll():  # it has ended while it was idle
                continue
            worker.task, worker.has_begun = self.waiting.popleft(), False
            worker.task.tries += 1
            worker.stderr.truncate(0)
            worker.end_by_seconds = time.monotonic() + self._deadline_seconds
            try:
                worker.connection.send_bytes(worker.task.message())
            except BlockingIOError:  # it does not read: half a message is of no use
                worker.end_by_seconds = 0.0
            except (BrokenPipeError, ConnectionResetError):  # it has just ended: seen as a hang-up next
                pass

    def _collect(self, timeout_seconds: float | None, also: Sequence[Any]) -> list[Any]:
        """Wait for messages, hang-ups, ``also`` or the next deadline, and take what has come."""
        ends = [worker.end_by_seconds - time.monotonic() for worker in self.workers if worker.is_busy]
        ends += [] if timeout_seconds is None else [timeout_seconds]
        watched = self._starter.watched()
        connections = [worker.connection for worker in self.workers]
        ready = wait([*watched, *also, *connections], max(0.0, min(ends)) if ends else None)
        if any(descriptor in ready for descriptor in watched):
            raise AllEnded
        for place, worker in enumerate(list(self.workers)):
            if worker.connection in ready:
                try:
                    self._take(place, worker, _received(worker))
                except BlockingIOError:  # in the middle of a message
                    self._lose(place, worker, hung_up=False)
                except EOFError:
                    self._lose(place, worker, hung_up=True)
        return [readable for readable in ready if readable in also]

    def _take(self, place: int, worker: Worker, kind: bytes) -> None:
        if kind == READY:
            worker.pid, worker.limited = json.loads(_received(worker))
            worker.is_ready = self.has_been_ready = True
        elif kind == BEGUN:
            worker.has_begun, worker.end_by_seconds = True, time.monotonic() + self._deadline_seconds
        elif kind == ASKS:
            assert self._answer_question is not None
            answer = self._answer_question(_received(worker))
            with suppress(BrokenPipeError, ConnectionResetError):  # it has just ended: seen as a hang-up next
                worker.connection.send_bytes(answer)
        else:
            answer, self._times_all_ended = _received(worker), 0
            assert worker.task is not None
            # Its own until it has been answered: whoever ends the pool finds it if that fails.
            worker.task.answered(answer)
            worker.task = None
            if kind == USED_UP:
                self._starter.end(worker, hung_up=False)
                self._replace(place, worker)

    def _end_overdue(self) -> None:
        for place, worker in enumerate(list(self.workers)):
            is_late = worker.is_busy and time.monotonic() >= worker.end_by_seconds
            # What has been said in time is heard, unless it takes nothing in.
            if is_late and (worker.end_by_seconds == 0.0 or not worker.connection.poll()):
                self._lose(place, worker, hung_up=False)

    def _lose(self, place: int, worker: Worker, hung_up: bool) -> None:
        """A worker that has ended, or is late, and what it was at."""
        how = self._starter.end(worker, hung_up)
        task, said = worker.task, worker.last_words(300)
        if not worker.is_ready:
            early = how or "it ended before it was ready"
            how = early if hung_up else f"it was not ready after {START_SECONDS:g} s"
            worker.failed_starts += 1
            self._refuse_if_hopeless(worker.failed_starts, how, worker.last_words(2000))
        self._replace(place, worker)
        if task is None:
            return
        if not worker.has_begun and task.tries < MAX_TRIES:
            self.waiting.appendleft(task)
        elif not hung_up or how == ended_by_alarm():  # the alarm comes first where this process was late itself
            task.lost("", said)
        else:
            task.lost(how, said)

    def _replace(self, place: int, worker: Worker) -> None:
        worker.stderr.close()
        self.workers[place] = self._starter.start()
        self.workers[place].failed_starts = 0 if worker.is_ready else worker.failed_starts

    def _begin_again(self) -> None:
        """All have ended at once: what they were at is nothing to blame, and is begun again."""
        self._times_all_ended += 1
        self._refuse_if_hopeless(self._times_all_ended, *self._starter.how_all_ended())
        for worker in self.workers:
            if worker.task is not None:
                worker.task.tries = 0
                self.waiting.appendleft(worker.task)
            worker.connection.close()
            worker.stderr.close()
        self._starter.begin_again()
        self.workers = [self._starter.start() for _ in self.workers]

    def _refuse_if_hopeless(self, tries: int, how: str, said: str) -> None:
        """A worker that cannot even start is a fault of the installation, not of a task."""
        if tries >= MAX_FAILED_STARTS:
            raise RuntimeError(f"{self._called} do not start ({tries} tries, last: {how}).\n{said}")


def _received(worker: Worker) -> bytes:
    """The worker's next message.

    Raises:
        EOFError: it has ended, also in the middle of the message.
        BlockingIOError: it stalls in the middle of the message.
    """
    try:
        return worker.connection.recv_bytes()
    except BlockingIOError:
        raise
    except OSError as error:
        raise EOFError from error
