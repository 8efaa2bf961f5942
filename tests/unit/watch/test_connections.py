"""A connection ends when the process at its other end does, whoever holds copies of it, and not before."""

from __future__ import annotations

import os
import signal
import socket
import threading
from typing import Any

import pytest

from vlm_pg.watch.hub import KEEPALIVE, MAX_LINE_BYTES, Connection, listen


def pair() -> tuple[Connection, Connection]:
    with listen(everywhere=False) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    return Connection(ours), Connection(theirs)


def received_to_the_end(line: Connection) -> list[dict[str, Any]]:
    received: list[dict[str, Any]] = []
    try:
        while True:
            received += line.wait(30)
    except EOFError:
        return received


def test_messages_arrive_in_order_and_then_the_end() -> None:
    ours, theirs = pair()
    assert theirs.receive() == []
    for number in range(3):
        ours.send({"number": number, "text": "a\nb"})
    ours.close()
    received = received_to_the_end(theirs)
    assert [one["number"] for one in received] == [0, 1, 2] and received[0]["text"] == "a\nb"
    theirs.send({"to": "closed"}, within_seconds=1)  # receive() reports the end
    theirs.close()


def test_what_does_not_fit_goes_with_the_next_message() -> None:
    ours, theirs = pair()
    long = {"text": "x" * (MAX_LINE_BYTES // 2)}
    for _ in range(400):
        ours.send(long)
    assert ours._unsent
    received: list[object] = []

    def read() -> None:
        while len(received) < 401:
            received.extend(theirs.wait(10))

    reader = threading.Thread(target=read)
    reader.start()
    ours.send({"text": "last"}, within_seconds=30)
    reader.join(60)
    assert len(received) == 401 and received[-1] == {"text": "last"} and received[:400] == [long] * 400
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    "data", [b"{}\nno json\n", b"[1]\n", b"\xff\n", b"x" * (MAX_LINE_BYTES + 1), b"[" * 60000 + b"\n"]
)
def test_what_is_no_object_on_a_line_is_the_end(data: bytes) -> None:
    ours, theirs = pair()
    ours._connection.setblocking(True)
    ours._connection.sendall(data)
    assert received_to_the_end(theirs) in ([], [{}])
    with pytest.raises(EOFError):
        theirs.receive()
    ours.close()
    theirs.close()


def test_a_time_out_is_the_end_and_shutting_down_wakes_waiting_threads() -> None:
    ours, theirs = pair()
    with pytest.raises(EOFError):
        ours.wait(0.01)
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(EOFError):
            theirs.wait()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    theirs.shut_down()
    assert ended.wait(30)
    theirs.shut_down()
    ours.close()
    theirs.close()


def test_a_forked_child_does_not_keep_its_parents_connection() -> None:
    """Of a user's own process pool, for example."""
    ours, theirs = pair()
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    ours.close()
    try:
        with pytest.raises(EOFError):
            theirs.wait(30)
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    theirs.close()


def test_a_host_that_vanished_is_noticed_by_the_kernel() -> None:
    """Only the options: what they do needs two hosts (``tests/integration/test_vanished_host.py``)."""
    for line in pair():
        connection = line._connection
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        options = {name: connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in KEEPALIVE}
        assert options == KEEPALIVE
        line.close()
    silence = KEEPALIVE["TCP_KEEPIDLE"] + KEEPALIVE["TCP_KEEPINTVL"] * KEEPALIVE["TCP_KEEPCNT"]
    assert silence <= 30 and KEEPALIVE["TCP_USER_TIMEOUT"] <= 30_000
