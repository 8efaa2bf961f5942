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
from vlm_pg.rollout.server.divergence import Divergence, divergence
from vlm_pg.rollout.server.engine import ServerEngine
from vlm_pg.rollout.server.errors import ServerError
from vlm_pg.rollout.server.faults import MOST_IN_A_ROW, UNUSABLE
from vlm_pg.rollout.server.outcomes import retry_after
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
    monkeypatch.setattr(client, "LONGEST_PAUSE_SECONDS", 3.0)
    paused.clear()
    servers[0].requests = 0
    engine.generate(table.questions()[0][:1], 2)
    assert [seconds for seconds in paused if seconds >= 1] == [3.0, 3.0]
    assert sum("pause" in line for line in told) == 1


def test_a_short_pause_is_not_told_of(servers: list[OddServer], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    engine = table.begin(servers, True, told)
    monkeypatch.setattr(client, "LONGEST_PAUSE_SECONDS", 0.01)

    def busy(reply: Reply) -> None:
        reply.status, reply.headers = 429, {"Retry-After": "7"}

    servers[0].next_reply = lambda number: busy if number == 0 else None
    engine.generate(table.questions()[0][:1], 1)
    assert not any("pause" in line for line in told)


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


@pytest.mark.parametrize("key", ['%25x"k', 'u0041"uuk', "a\\<b\\\\>c", 'two  spaces"', '&amp;"k'])
def test_a_key_that_looks_like_an_escape_is_hidden_however_it_is_written(key: str) -> None:
    html_in_json = json.dumps(key)[1:-1].replace("<", "\\u003c").replace(">", "\\u003e")
    written = (key, json.dumps(key)[1:-1], html_in_json, quote(key, safe=""), "".join(f"\\u{ord(c):04x}" for c in key))
    for spelling in written:
        assert without_key(f"key {spelling} is wrong", key) == "key [key] is wrong"


@pytest.mark.parametrize(
    "filling", ["\\", "\\\\u00", "&amp;", "&", "%25", "%", " ", "\\ ", "s", "sk-", "sk-abcdef-g", "\\s"]
)
@pytest.mark.parametrize(
    "key", ["sk-abcdef-ghijklmnop", "\\" * 12 + "a\\b\\c" + "\\" * 3, "s" * 40, "s   s   s\\ \\ \\k"]
)
def test_hiding_a_key_takes_no_more_than_one_look_at_each_character(filling: str, key: str) -> None:
    """The table of steps is small: quadratic or worse, these would take minutes to hours."""
    assert without_key(filling * (30_000 // len(filling)) + "! end", key).endswith("end")


@pytest.mark.parametrize("kept", [8, 20, 63])
def test_a_long_key_that_was_cut_is_hidden_without_trying_all_ways(kept: int) -> None:
    """Were two forms alike, each character would double what is tried: 2**63 here."""
    key = "sk-" + "abcdefghijklmnopqrstuvwxyz0123456789" * 2
    assert without_key(f"x {key[:kept]}! y {key[:kept]}", key) == "x [key] y [key]"


def test_a_key_behind_very_many_backslashes_is_hidden() -> None:
    written = "".join("\\" * 500 + character for character in KEY)
    assert without_key(f"x {written} y", KEY) == "x [key] y"


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
        said = table.recorded_or_raised(engine, prompts[:1])
        assert "[key]" in said and "or<d" not in said

    def in_one(reply: Reply) -> None:
        if "Question 1?" in reply.asked["messages"][-1]["content"][-1]["text"]:
            reply.value["choices"][0]["finish_reason"] = f"bad key {KEY}"

    server.next_reply = lambda number: in_one
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


def test_divergence_is_the_kl_of_what_was_said() -> None:
    """By hand: d = 0.1 and -0.2."""
    found = divergence([(-1.0, -2.0), None], [torch.tensor([-0.9, -2.2, -7.0]), torch.tensor([-1.0])])
    expected = torch.tensor([0.1, -0.2], dtype=torch.float64)
    assert found.tokens == 2 and found.largest == pytest.approx(0.2, abs=1e-6)
    assert found.kl == pytest.approx(float((expected.exp() - 1 - expected).sum()), abs=1e-6)
    assert (found + found).mean == pytest.approx(found.mean) and Divergence().mean == 0.0
    assert divergence([(-9e3,)], [torch.tensor([-1.0])]).kl == pytest.approx(torch.tensor(20.0).exp().item(), rel=1e-6)


def test_log_probabilities_that_stand_for_no_number_are_left_out() -> None:
    """vLLM writes -9999.0 there: a single one would carry the mean of 2,000 tokens beyond any bound."""
    ours = [torch.full((2001,), -1.0), torch.tensor([-1.0])]
    found = divergence([(*[-1.0] * 2000, -9999.0), (-9999.0,)], ours)
    assert (found.tokens, found.kl, found.largest) == (2000, 0.0, 0.0)
    assert divergence([None, (-9999.0,)], ours) == divergence([None, None], ours) == Divergence()


class TruthfulServer(OddServer):
    """Says the log-probabilities of a policy, ``off`` nats away from it and divided by ``temperature``, or nothing."""

    off, temperature, says = 0.0, 1.0, True

    def reply(self, body: dict[str, Any]) -> Reply:
        reply = super().reply(body)
        texts = {text: name for name, text in table.questions()[2].items()}
        name = texts[body["messages"][-1]["content"][-1]["text"]]
        prompt = next(prompt for prompt in table.questions()[0] if prompt.sample_id == name)
        responses = tuple(torch.tensor(choice["token_ids"]) for choice in reply.value["choices"])
        with torch.no_grad():
            (scored,) = table.policy().logprobs([ResponseGroup(prompt, responses)], temperature=self.temperature)
        for choice, values in zip(reply.value["choices"], scored, strict=True):
            if not self.says:
                choice["logprobs"] = {"content": [{"logprob": None} for _ in values]}
                continue
            choice["logprobs"] = {"content": [{"logprob": min(0.0, v - self.off)} for v in values.tolist()]}
        return reply


def truthful(
    servers: list[OddServer], told: list[str], rollout: dict[str, Any] | None = None
) -> tuple[TruthfulServer, ServerEngine]:
    server = TruthfulServer()
    servers.append(server)
    made = table.begin(servers, True, told)
    settled = made.settings.server.model_copy(update={"url": server.url, "max_divergence": 0.5})
    chosen = made.settings.model_copy(update={"server": settled} | (rollout or {}))
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
    engine.generate(table.questions()[0][:20], 3)
    with pytest.raises(
        ServerError, match=r"KL of 1\.12 nats a token.*in 2 calls running.*max_divergence=0\.5\. Start it on the newest"
    ):
        engine.generate(table.questions()[0][:20], 4)


def test_calls_beyond_the_bound_end_a_run_only_one_after_the_other(servers: list[OddServer]) -> None:
    """A call of few tokens is not judged: it neither counts nor stands between."""
    server, engine = truthful(servers, [])
    prompts = table.questions()[0]
    for step, off in enumerate((1.2, 0.0, 1.2)):
        server.off = off
        engine.generate(prompts[:20], step)
    engine.generate(prompts[:1], 4)
    with pytest.raises(ServerError, match="in 2 calls running"):
        engine.generate(prompts[:20], 5)


def test_what_lies_beyond_the_bound_is_looked_at_again_at_once(servers: list[OddServer]) -> None:
    """At another temperature than 1 only some calls are compared, and else the second might never come."""
    server, engine = truthful(servers, [])
    settled = engine.settings.model_copy(update={"temperature": 0.7})
    engine.settings, server.off = settled, 1.2
    engine.generate(table.questions()[0][:20], 1)
    with pytest.raises(ServerError, match="in 2 calls running"):
        engine.generate(table.questions()[0][:20], 2)


@pytest.mark.parametrize(
    "setting", [{"repetition_penalty": 1.1}, {"top_k": 5}, {"min_p": 0.1}, {"min_new_tokens": 1}], ids=str
)
def test_no_run_ends_for_what_its_own_settings_may_do_to_log_probabilities(
    servers: list[OddServer], setting: dict[str, Any]
) -> None:
    told: list[str] = []
    server, engine = truthful(servers, told, rollout=setting)
    server.off = 1.2
    for step in range(3):
        engine.generate(table.questions()[0][:20], step)
    (line,) = [line for line in told if "other weights" in line]
    assert "may sample from other weights than the trainer's" in line
    assert f"or it reports log-probabilities behind rollout.{next(iter(setting))}, which this run sets" in line
    assert "KL of 1.12 nats a token" in line and "not stopped" in line
    assert engine.take_divergence().mean > 1.0


def test_a_server_that_says_no_log_probabilities_is_named_once(servers: list[OddServer]) -> None:
    told: list[str] = []
    server, engine = truthful(servers, told)
    server.says = False
    for step in range(2):
        engine.generate(table.questions()[0][:2], step)
    (line,) = [line for line in told if "log-probabilities" in line]
    assert f"the server at {server.url} (vllm) was asked for log-probabilities and gave none" in line
    assert "not checked" in line and engine.take_divergence() == Divergence()


def test_a_server_that_is_not_asked_for_log_probabilities_is_not_blamed(servers: list[OddServer]) -> None:
    told: list[str] = []
    table.begin(servers, False, told).generate(table.questions()[0][:2], 1)
    assert not any("log-probabilities" in line for line in told)


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
