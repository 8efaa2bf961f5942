"""What a server may take: time, memory, patience, and questions that it has no answer for."""

from __future__ import annotations

import asyncio
import gzip
import time
import tracemalloc
from email.utils import formatdate
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.misbehaviours import bomb
from tests.support.odd_server import OddServer, Reply
from tests.support.reports import reported
from tests.unit.rollout import test_server_misbehaviours as table
from vlm_pg.errors import ServerError
from vlm_pg.http.client import BoundedBody, UnreadableResponse, retry_after_seconds
from vlm_pg.rollout.server import client
from vlm_pg.rollout.server.engine import ASKED_AGAIN, ServerEngine
from vlm_pg.rollout.server.generator import MOST_IN_A_ROW, UNUSABLE


class Chunks(httpx2.AsyncByteStream):
    def __init__(self, data: bytes, size: int = 2**16):
        self.pieces = [data[place : place + size] for place in range(0, len(data), size)]

    async def __aiter__(self) -> Any:
        for piece in self.pieces:
            yield piece


async def read(data: bytes, encodings: str, limit: int) -> int:
    return sum(
        [len(piece) async for piece in BoundedBody(Chunks(data), encodings, limit, "rollout.server.max_answer_mb")]
    )


def test_a_bomb_is_never_decompressed_as_a_whole() -> None:
    packed = bomb()
    tracemalloc.start()
    with pytest.raises(UnreadableResponse, match=r"more than 1 MiB \(rollout\.server\.max_answer_mb\)"):
        asyncio.run(read(packed, "gzip", 2**20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 2**20
    assert asyncio.run(read(gzip.compress(b"x" * 10**6), "gzip", 2**20)) == 10**6


@pytest.mark.parametrize("charset", ["rot13", "zlib", "undefined"])
def test_a_schema_of_no_charset_of_text_is_read(servers: list[OddServer], charset: str) -> None:
    engine = table.begin(servers, True)
    page = Reply({"paths": {}}, {}, headers={"Content-Type": f"application/json; charset={charset}"})
    servers[0].schema = page
    messages = table.questions()[1]
    again = ServerEngine(table.policy(), engine.settings, 7, lambda: False, messages, Path("unused"), print)
    assert again.server.kind == "vllm"


def test_a_drip_ends_with_the_time_for_one_answer(servers: list[OddServer]) -> None:
    """Every byte comes in time, the whole never would."""
    engine = table.begin(servers, True, retries=0, timeout_seconds=0.5)

    def drip(reply: Reply) -> None:
        reply.drip_seconds = 0.2

    servers[0].next_reply = lambda number: drip
    with pytest.raises(ServerError, match=r"ReadTimeout.*timeout_seconds \(0\.5 now\)"):
        engine.generate(table.questions()[0][:1], 1)


def test_a_server_is_left_alone_as_long_as_it_asks(servers: list[OddServer], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    engine = table.begin(servers, True, told, retries=2, wait_seconds=0.0)
    paused: list[float] = []
    sleep = client.asyncio.sleep

    async def recorded(seconds: float) -> None:
        paused.append(seconds)
        await sleep(0)

    monkeypatch.setattr(client.asyncio, "sleep", recorded)

    def busy(reply: Reply) -> None:
        reply.status, reply.headers = 429, {"Retry-After": "7"}

    servers[0].next_reply = lambda number: busy if number < 2 else None
    engine.generate(table.questions()[0][:1], 1)
    assert [seconds for seconds in paused if seconds >= 1] == [7.0, 7.0]
    (line,) = [line for line in told if "pause" in line]
    assert f"the server at {servers[0].url} asks for a pause (status 429, Retry-After): waiting 7 s" in line
    monkeypatch.setattr("vlm_pg.http.client.LONGEST_PAUSE_SECONDS", 3.0)
    paused.clear()
    servers[0].requests = 0
    engine.generate(table.questions()[0][:1], 2)
    assert [seconds for seconds in paused if seconds >= 1] == [3.0, 3.0]
    assert sum("pause" in line for line in told) == 1


def test_a_short_pause_is_not_told_of(servers: list[OddServer], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    engine = table.begin(servers, True, told)
    monkeypatch.setattr("vlm_pg.http.client.LONGEST_PAUSE_SECONDS", 0.01)

    def busy(reply: Reply) -> None:
        reply.status, reply.headers = 429, {"Retry-After": "7"}

    servers[0].next_reply = lambda number: busy if number == 0 else None
    engine.generate(table.questions()[0][:1], 1)
    assert not any("pause" in line for line in told)


def test_what_retry_after_says() -> None:
    def seconds(value: str) -> float:
        return retry_after_seconds(httpx2.Response(429, headers={"Retry-After": value}))

    assert seconds("12") == 12.0 and seconds(" 3 ") == 3.0
    assert 50 < seconds(formatdate(time.time() + 60, usegmt=True)) < 61
    for odd in ("", "soon", "-5", "1e9", "nan", "Wed, 21 Oct 2015 07:28:00 GMT"):
        assert seconds(odd) == 0.0


def test_a_question_without_a_fit_answer_is_left_out_and_recorded(servers: list[OddServer]) -> None:
    engine = table.begin(servers, True, retries=1)
    server, prompts = servers[0], table.questions()[0][:3]

    def unfit(reply: Reply) -> None:
        if "Question 1?" in reply.asked["messages"][-1]["content"][-1]["text"]:
            reply.value["choices"][-1] |= {"token_ids": [True]}

    server.next_reply = lambda number: unfit
    groups = engine.generate(prompts, 1)
    assert [len(group) for group in groups] == [3, 0, 3]
    (fault,) = engine.take_faults()
    assert (fault.sample_id, fault.reason, fault.where) == ("q1", UNUSABLE, server.url)
    assert f"Server {server.url}: Sample 'q1': a choice does not fit: token_ids.0" in fault.message
    assert engine.take_faults() == [] and reported(engine)[ASKED_AGAIN] >= 1


def unfit_for(*names: str) -> Any:
    """Answers to these questions, by number, do not fit."""

    def change(reply: Reply) -> None:
        words = reply.asked["messages"][-1]["content"][-1]["text"]
        if any(f"Question {name}?" in words for name in names):
            reply.value["choices"][0] |= {"token_ids": []}

    return lambda number: change


def test_one_question_without_a_fit_answer_ends_no_run(servers: list[OddServer]) -> None:
    """Also where it is the only one of its step: a resumed run would ask it under the same seeds again."""
    engine = table.begin(servers, True, retries=0)
    prompts = table.questions()[0]
    servers[0].next_reply = unfit_for("0")
    assert engine.generate(prompts[:1], 1) == [()]
    assert [fault.sample_id for fault in engine.take_faults()] == ["q0"]
    assert engine.generate([], 1) == [] and engine.take_faults() == []


def test_many_questions_in_a_row_without_a_fit_answer_end_the_run(servers: list[OddServer]) -> None:
    """Counted over calls; one usable answer between, and the count begins anew."""
    engine = table.begin(servers, True, retries=0)
    prompts = table.questions()[0]
    servers[0].next_reply = unfit_for("0")
    for step in range(MOST_IN_A_ROW - 1):
        engine.generate(prompts[:1], step)
    engine.generate(prompts[1:2], 1)
    for step in range(MOST_IN_A_ROW - 1):
        engine.generate(prompts[:1], step)
    assert len(engine.take_faults()) == 2 * (MOST_IN_A_ROW - 1)
    with pytest.raises(ServerError) as caught:
        engine.generate(prompts[:1], 99)
    for part in (servers[0].url, f"to {MOST_IN_A_ROW} questions in a row", "asked up to 1 times", "run.resume=auto",
                 "The last error: ", "token_ids is empty beside the text"):  # fmt: skip
        assert part in str(caught.value)


def test_questions_of_one_call_count_in_their_order(servers: list[OddServer]) -> None:
    engine = table.begin(servers, True, retries=0)
    prompts = table.questions()[0][: 2 * MOST_IN_A_ROW - 1]
    names = [str(place) for place in range(len(prompts))]
    servers[0].next_reply = unfit_for(*names[: MOST_IN_A_ROW - 1], *names[MOST_IN_A_ROW:])
    groups = engine.generate(prompts, 1)
    assert [place for place, group in enumerate(groups) if group] == [MOST_IN_A_ROW - 1]
    assert len(engine.take_faults()) == 2 * (MOST_IN_A_ROW - 1)
    with pytest.raises(ServerError, match="questions in a row"):
        engine.generate(prompts[:1], 2)


def test_a_server_that_cannot_answer_is_asked_again_with_other_seeds(servers: list[OddServer]) -> None:
    engine = table.begin(servers, True, retries=3)
    asked: list[dict[str, Any]] = []

    def unfit(reply: Reply) -> None:
        asked.append(reply.asked)
        reply.value["choices"][0] |= {"token_ids": []}

    servers[0].next_reply = lambda number: unfit
    assert engine.generate(table.questions()[0][:1], 1) == [()]
    (fault,) = engine.take_faults()
    assert "token_ids is empty beside the text" in fault.message
    assert asked[0]["n"] == 3 and "n" not in asked[1]
    assert len({body["seed"] for body in asked}) == len(asked) == 4
