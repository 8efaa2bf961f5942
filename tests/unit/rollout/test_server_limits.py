"""What a server may take: time, memory, patience; what it may not show: the key. And whose weights it has."""

from __future__ import annotations

import gzip
import json
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from email.utils import formatdate
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
import torch

from tests.support.misbehaviours import bomb
from tests.support.odd_server import OddServer, Reply
from tests.unit.rollout import test_server_misbehaviours as table
from vlm_pg.rollout.server import client
from vlm_pg.rollout.server.bodies import BoundedBody, UnreadableAnswer
from vlm_pg.rollout.server.client import retry_after
from vlm_pg.rollout.server.divergence import Divergence, divergence
from vlm_pg.rollout.server.engine import UNUSABLE, ServerEngine
from vlm_pg.rollout.server.errors import ServerError
from vlm_pg.rollout.server.redact import without_key
from vlm_pg.types import ResponseGroup

KEY = "p\"a's\\s/w&or<d 1"


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def servers() -> Iterator[list[OddServer]]:
    made: list[OddServer] = []
    yield made
    for server in made:
        server.stop()


class Chunks(httpx2.AsyncByteStream):
    def __init__(self, data: bytes, size: int = 2**16):
        self.pieces = [data[place : place + size] for place in range(0, len(data), size)]

    async def __aiter__(self) -> Any:
        for piece in self.pieces:
            yield piece


async def read(data: bytes, encodings: str, limit: int) -> int:
    return sum([len(piece) async for piece in BoundedBody(Chunks(data), encodings, limit)])


def test_a_bomb_is_never_unpacked_as_a_whole() -> None:
    import asyncio

    packed = gzip.compress(bomb())
    tracemalloc.start()
    with pytest.raises(UnreadableAnswer, match=r"more than 1 MiB \(rollout\.server\.max_answer_mb\)"):
        asyncio.run(read(packed, "gzip, gzip", 2**20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 2**20
    assert asyncio.run(read(gzip.compress(b"x" * 10**6), "gzip", 2**20)) == 10**6


def test_a_drip_ends_with_the_time_for_one_answer(servers: list[OddServer]) -> None:
    """Every byte comes in time, the whole never would."""
    engine = table.begin(servers, True, retries=0, timeout_seconds=0.5)

    def drip(reply: Reply) -> None:
        reply.drip_seconds = 0.2

    servers[0].next_reply = lambda number: drip
    with pytest.raises(ServerError, match=r"ReadTimeout.*timeout_seconds \(0\.5 now\)"):
        engine.generate(table.questions()[0][:1], 1)


def test_a_server_is_left_alone_as_long_as_it_asks(servers: list[OddServer], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = table.begin(servers, True, retries=2, wait_seconds=0.0)
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
    monkeypatch.setattr(client, "LONGEST_PAUSE_SECONDS", 3.0)
    paused.clear()
    servers[0].requests = 0
    engine.generate(table.questions()[0][:1], 2)
    assert [seconds for seconds in paused if seconds >= 1] == [3.0, 3.0]


def test_what_retry_after_says() -> None:
    assert retry_after("12") == 12.0 and retry_after(" 3 ") == 3.0
    assert 50 < retry_after(formatdate(time.time() + 60, usegmt=True)) < 61
    for odd in ("", "soon", "-5", "1e9", "nan", "Wed, 21 Oct 2015 07:28:00 GMT"):
        assert retry_after(odd) == 0.0


SPELLINGS = (
    KEY,
    json.dumps(KEY)[1:-1],
    json.dumps(json.dumps(KEY))[3:-3],
    repr(KEY)[1:-1],
    repr(json.dumps(KEY)),
    escape(KEY),
    quote(KEY, safe=""),
    quote(quote(KEY, safe=""), safe=""),
    "".join(f"\\u{ord(c):04x}" for c in KEY),
    "".join(f"\\u{ord(c):04X}" for c in KEY),
    "".join(f"&#{ord(c)};" for c in KEY),
    "".join(f"&#x{ord(c):X};" for c in KEY),
    KEY.replace("/", "\\/"),
)


@pytest.mark.parametrize("spelling", SPELLINGS, ids=range(len(SPELLINGS)))
def test_a_key_is_hidden_however_it_is_written(spelling: str) -> None:
    hidden = without_key(f"key {spelling} is wrong", KEY)
    assert "[key]" in hidden and "w&or" not in hidden and "or<d" not in hidden and "is wrong" in hidden
    assert without_key("nothing of it", KEY) == "nothing of it" and without_key("a", None) == "a"


@pytest.mark.parametrize("length", range(8, len(KEY)))
def test_a_key_that_was_cut_is_hidden_too(length: int) -> None:
    hidden = without_key(f"x {KEY[:length]}", KEY)
    assert hidden.startswith("x [key]") and KEY[:8] not in hidden
    assert "/w&" not in hidden and without_key("x p\"a's", KEY) == "x p\"a's"


def test_a_key_with_quotes_is_in_no_error_and_no_record(
    servers: list[OddServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    engine = table.begin(servers, True, retries=0)
    server, prompts = servers[0], table.questions()[0][:2]
    for status in (200, 401, 500):

        def repeats(reply: Reply, status: int = status) -> None:
            reply.status, reply.value = status, {"error": f"Incorrect API key provided: {KEY}"}

        server.next_reply = lambda number, change=repeats: change
        with pytest.raises(ServerError) as caught:
            engine.generate(prompts, 1)
        assert "[key]" in str(caught.value) and "or<d" not in str(caught.value)

    def in_one(reply: Reply) -> None:
        reply.value["choices"][0]["finish_reason"] = f"bad key {KEY}"

    server.next_reply = lambda number: in_one if server.requests == first else None
    first = server.requests + 1
    engine.generate(prompts, 2)
    (fault,) = engine.take_faults()
    assert fault.reason == UNUSABLE and "[key]" in fault.message and "or<d" not in fault.message


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
    assert engine.take_faults() == [] and engine.take_asked_again() >= 1
    with pytest.raises(ServerError, match=r"q1.*None of the 1 question\(s\) asked has rollouts.*run\.resume=auto"):
        engine.generate(prompts[1:2], 2)


def test_a_server_that_cannot_answer_is_asked_again_with_other_seeds(servers: list[OddServer]) -> None:
    engine = table.begin(servers, True, retries=3)
    asked: list[dict[str, Any]] = []

    def unfit(reply: Reply) -> None:
        asked.append(reply.asked)
        reply.value["choices"][0] |= {"token_ids": []}

    servers[0].next_reply = lambda number: unfit
    with pytest.raises(ServerError, match="token_ids is empty beside the text"):
        engine.generate(table.questions()[0][:1], 1)
    assert asked[0]["n"] == 3 and "n" not in asked[1]
    assert len({body["seed"] for body in asked}) == len(asked) == 4


def test_divergence_is_the_kl_of_what_was_said() -> None:
    """By hand: d = 0.1 and -0.2."""
    found = divergence([(-1.0, -2.0), None], [torch.tensor([-0.9, -2.2, -7.0]), torch.tensor([-1.0])])
    expected = torch.tensor([0.1, -0.2], dtype=torch.float64)
    assert found.tokens == 2 and found.largest == pytest.approx(0.2, abs=1e-6)
    assert found.kl == pytest.approx(float((expected.exp() - 1 - expected).sum()), abs=1e-6)
    assert (found + found).mean == pytest.approx(found.mean) and Divergence().mean == 0.0
    assert divergence([(-1e9,)], [torch.tensor([-1.0])]).kl == pytest.approx(torch.tensor(20.0).exp().item(), rel=1e-6)


class TruthfulServer(OddServer):
    """Says the log-probabilities of a policy, ``off`` nats away from it and divided by ``temperature``."""

    off, temperature = 0.0, 1.0

    def reply(self, body: dict[str, Any]) -> Reply:
        reply = super().reply(body)
        texts = {text: name for name, text in table.questions()[2].items()}
        name = texts[body["messages"][-1]["content"][-1]["text"]]
        prompt = next(prompt for prompt in table.questions()[0] if prompt.sample_id == name)
        responses = tuple(torch.tensor(choice["token_ids"]) for choice in reply.value["choices"])
        with torch.no_grad():
            (scored,) = table.policy().logprobs([ResponseGroup(prompt, responses)], temperature=self.temperature)
        for choice, values in zip(reply.value["choices"], scored, strict=True):
            choice["logprobs"] = {"content": [{"logprob": min(0.0, v - self.off)} for v in values.tolist()]}
        return reply


def truthful(servers: list[OddServer], told: list[str], **settings: Any) -> tuple[TruthfulServer, ServerEngine]:
    server = TruthfulServer()
    servers.append(server)
    made = table.begin(servers, True, told, **settings)
    settled = made.settings.server.model_copy(update={"url": server.url, "max_divergence": 0.5})
    chosen = made.settings.model_copy(update={"server": settled})
    messages = table.questions()[1]
    return server, ServerEngine(table.policy(), chosen, 7, lambda: False, messages, Path("unused"), told.append)


def test_a_server_with_these_weights_is_not_warned_of(servers: list[OddServer]) -> None:
    told: list[str] = []
    _, engine = truthful(servers, told)
    engine.generate(table.questions()[0][:20], 1)
    found = engine.take_divergence()
    assert found.tokens > 100 and found.mean < 1e-6 and not any("other weights" in line for line in told)
    assert engine.take_divergence() == Divergence()


def test_a_server_with_other_weights_is_warned_of_once_and_stopped_beyond_the_bound(servers: list[OddServer]) -> None:
    told: list[str] = []
    server, engine = truthful(servers, told)
    server.off = 0.3
    for step in (1, 2):
        engine.generate(table.questions()[0][:20], step)
    (line,) = [line for line in told if "other weights" in line]
    assert f"the server at {server.url} samples from other weights than the trainer's" in line and "0.0499" in line
    server.off = 1.2
    with pytest.raises(ServerError, match=r"KL of 1\.12 nats a token.*max_divergence=0\.5\. Start it on the newest"):
        engine.generate(table.questions()[0][:20], 3)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scaled_and_unscaled_log_probabilities_are_both_understood(
    servers: list[OddServer], temperature: float
) -> None:
    told: list[str] = []
    server, engine = truthful(servers, told)
    engine.settings = engine.settings.model_copy(update={"temperature": 0.7})
    server.temperature = temperature
    engine.generate(table.questions()[0][:20], 1)
    found = engine.take_divergence()
    assert found.tokens > 100 and found.mean < 1e-6
    assert replace(found, tokens=0).mean == 0.0
