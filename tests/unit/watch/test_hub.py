"""Rank 0 accepts ranks with the token, finds the root cause of a loss, and notifies all."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from vlm_pg.watch import hub as module
from vlm_pg.watch.hub import Connection, Failure, Hub, Loss, RankStatus, listen, root_cause

TOKEN, RANKS = "secret", 4


class Meeting:
    """A hub of four ranks and what it learns."""

    def __init__(self) -> None:
        self.lost: list[Loss] = []
        self.is_lost = threading.Event()
        server = listen(everywhere=False)
        self.address = server.getsockname()
        self.hub = Hub(server, TOKEN, RankStatus(0, "first", 10), RANKS, self._learn)

    def _learn(self, loss: Loss) -> None:
        self.lost.append(loss)
        self.is_lost.set()

    def call(self, **hello: Any) -> Connection:
        line = Connection(socket.create_connection(self.address))
        line.send(hello)
        return line

    def rank(self, number: int) -> Connection:
        line = self.call(token=TOKEN, rank=number, host=f"host-{number}", process=10 + number)
        assert line.wait(30) == [{"welcome": {"host": "first", "process": 10}}]
        return line

    def all(self) -> list[Connection]:
        lines = [self.rank(number) for number in range(1, RANKS)]
        assert self.hub.wait_for_all(30) == []
        return lines


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    meeting = Meeting()
    yield meeting
    meeting.hub.leave()
    assert not meeting.hub._thread.is_alive()


def is_rejected(line: Connection) -> bool:
    try:
        line.wait(30)
    except EOFError:
        return True
    return False


def test_strangers_are_rejected_and_missing_ranks_named(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELLO_SECONDS", 0.2)
    one = meeting.rank(1)
    silent = Connection(socket.create_connection(meeting.address))
    right = {"token": TOKEN, "rank": 2, "host": "h", "process": 1}
    for hello in (
        right | {"token": "guess"},
        right | {"token": None},
        right | {"rank": 1},  # it is here already
        right | {"rank": 0},
        right | {"rank": RANKS},
        right | {"process": "x"},
        {"rank": 2},
    ):
        assert is_rejected(meeting.call(**hello)), hello
    assert is_rejected(silent)
    assert meeting.hub.wait_for_all(0.01) == [2, 3] and not meeting.lost
    one.send({"leaving": True})
    one.close()


def test_the_number_of_strangers_is_bounded(meeting: Meeting) -> None:
    crowd = [Connection(socket.create_connection(meeting.address)) for _ in range(RANKS + module.MAX_STRANGERS)]
    assert is_rejected(Connection(socket.create_connection(meeting.address)))
    for line in crowd:
        line.close()
    for line in meeting.all():  # as soon as there is room
        line.send({"leaving": True})
        line.close()


def test_a_lost_rank_is_named_with_its_phase_to_all(meeting: Meeting) -> None:
    one, two, three = meeting.all()
    two.send({"at": {"phase": "rollout", "last_phase": "vision", "step": 7}})
    two.close()
    assert meeting.is_lost.wait(30)
    loss = Loss(RankStatus(2, "host-2", 12, "rollout", "vision", 7))
    assert meeting.lost == [loss]
    for line in (one, three):
        assert [Loss.from_json(message["lost"]) for message in line.wait(30)] == [loss]
        line.close()


def test_a_rank_that_leaves_is_not_lost(meeting: Meeting) -> None:
    lines = meeting.all()
    for line in lines[1:]:
        line.send({"leaving": True})
        line.close()
    lines[0].send({"at": {"step": 3}})
    lines[0].send({"leaving": True})
    lines[0].close()
    meeting.hub.leave()
    assert not meeting.lost


def test_the_root_cause_of_failures_is_reported(meeting: Meeting) -> None:
    """Rank 3's collective broke first, because rank 1 ended: what rank 1 says comes later."""
    one, _, three = meeting.all()
    position = {"phase": "train", "last_phase": "rewards", "step": 1}
    own = Failure("ValueError", "no")
    three.send({"failed": {"at": position, "with": asdict(Failure("RuntimeError", "gloo", about_others=True))}})
    one.send({"failed": {"at": position, "with": asdict(own)}})
    assert meeting.is_lost.wait(30)
    assert meeting.lost == [Loss(RankStatus(1, "host-1", 11, "train", "rewards", 1), own)]


def test_rank_0s_own_failure_is_reported_at_once(meeting: Meeting) -> None:
    lines = meeting.all()
    loss = Loss(RankStatus(0, "first", 10, "setup"), Failure("ConfigError", "wrong"))
    meeting.hub.fail(loss)
    for line in lines:
        assert [Loss.from_json(message["lost"]) for message in line.wait(30)] == [loss]
    lines[0].close()  # a consequence
    assert meeting.lost == [loss]


@pytest.mark.parametrize("message", [{"at": 3}, {"failed": {}}, {"failed": {"at": {}, "with": {"a": 1}}}, []])
def test_a_rank_with_invalid_messages_is_lost(meeting: Meeting, message: Any) -> None:
    lines = meeting.all()  # held, or they would end
    lines[0].send(message)
    assert meeting.is_lost.wait(30) and meeting.lost[0].status.rank == 1


def test_the_first_that_is_no_consequence_is_the_root_cause() -> None:
    first, second, third, fourth = (RankStatus(rank, "h", rank) for rank in (1, 2, 3, 4))
    echo = Loss(first, Failure("RuntimeError", "gloo", about_others=True))
    gone, gone_too = Loss(second), Loss(third)
    failed = Loss(fourth, Failure("ValueError", "no"))
    assert root_cause([echo, gone, failed]) == gone and root_cause([echo, failed, gone]) == failed
    assert root_cause([echo]) == echo
    assert root_cause([echo, gone_too, gone]) == Loss(third, None, (2,))


def test_the_sentence_has_rank_phase_cause_and_advice() -> None:
    status = RankStatus(3, "node-07", 4711)
    assert Loss(status).sentence == (
        "rank 3 (host node-07, process 4711) has gone before its first phase: it was killed, or its host or the "
        "connection to it is lost. Every rank ends; go on with run.resume=auto."
    )
    there = status.updated({"phase": "rollout", "last_phase": "vision", "step": 120})
    assert 'has gone in phase "rollout", after step 120, with it rank(s) 4, 5: it' in Loss(there, None, (4, 5)).sentence
    error = Failure.of(MemoryError("CUDA out of memory.\nmore"), about_others=False)
    assert 'failed in phase "rollout", after step 120: MemoryError: CUDA out of memory.' in Loss(there, error).sentence
    between = there.updated({"phase": "", "step": 0})
    assert 'after phase "vision", before the first step was completed' in Loss(between).sentence
    assert Loss.from_json(asdict(Loss(there, error, (1,)))) == Loss(there, error, (1,))

    loss = Loss(RankStatus(1, "node-1", 7), Failure("CheckpointError", "no room. Make some."))
    assert ": CheckpointError: no room. Make some. Every rank ends; once" in loss.sentence
