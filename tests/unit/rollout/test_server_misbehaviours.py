"""Whatever a server sends, it ends as an answer that it sampled, another try, a fault or an error that names it; and no
key is shown, however a server writes it.

The table is generated (``tests/support/misbehaviours.py``); the usual tests hold every tenth of its entries.
"""

from __future__ import annotations

import json
import random
from typing import Any
from urllib.parse import quote

import pytest

from tests.support.misbehaviours import Misbehaviour, all_misbehaviours, model_pages, text, wire
from tests.support.odd_server import Misbehave, OddServer, Reply
from tests.support.server_engines import fault_or_error, is_about, questions, reported, server_engine
from vlm_pg.errors import ServerError
from vlm_pg.http.keys import without_key
from vlm_pg.rollout.server.dialects import ServerInfo
from vlm_pg.rollout.server.engine import RETRIED
from vlm_pg.rollout.server.generator import UNUSABLE, query_server
from vlm_pg.types import Prompt, Rollout

TABLE = all_misbehaviours()
# Each of these has its own way through the client; the others are alike in tens.
SINGLE = ("charset=", "gzip a thousand", "logprobs ", "empty text beside", "lone surrogate")
SAMPLE = [item for number, item in enumerate(TABLE) if number % 10 == 3 or item.name.startswith(SINGLE[1:])]
SAMPLE += [item for item in TABLE if SINGLE[0] in item.name and item not in SAMPLE]
# They would go on for an hour: only a limit of time ends them.
ENDLESS = ("a drip", "too late")


def assert_sampled(server: OddServer, prompts: tuple[Prompt, ...], groups: list[tuple[Rollout, ...]]) -> int:
    """Every response is, token by token, one the server sampled for that question; how many there are."""
    texts = questions()[2]
    rollouts = [(prompt, rollout) for prompt, group in zip(prompts, groups, strict=True) for rollout in group]
    for prompt, rollout in rollouts:
        assert (texts[prompt.sample_id], tuple(rollout.token_ids.tolist())) in server.log
        assert len(rollout.rollout_logprobs) == len(rollout.token_ids)
    return len(rollouts)


def set_words(server: OddServer, exact: bool) -> None:
    """Token ids, or texts alone."""
    server.exact = exact
    server.models = {"data": [{"id": "tiny", "owned_by": "vllm" if exact else "someone"}]}


def once_and_always(server: OddServer, item: Misbehaviour) -> None:
    set_words(server, item.exact)
    engine = server_engine(server, retries=2, timeout_seconds=1.0 if item.name in ENDLESS else 60.0)
    prompts = questions()[0][:1]
    server.next_reply = lambda number: item.change if number == 0 else None
    if item.ends == "refused":
        with pytest.raises(ServerError, match=r"127\.0\.0\.1"):
            engine.generate(prompts, 1)
        assert server.requests == 1
        return
    assert assert_sampled(server, prompts, engine.generate(prompts, 1)) == 3
    assert item.ends == "again" or server.requests == 1
    server.next_reply = lambda number: item.change
    if item.ends == "harmless":
        assert assert_sampled(server, prompts, engine.generate(prompts, 2)) == 3
        return
    engine.take_faults()
    message = fault_or_error(engine, prompts)
    assert "127.0.0.1" in message and len(message) < 2000


def test_the_table_is_as_large_as_promised() -> None:
    names = list(map(str, TABLE))
    assert len(names) == len(set(names)) >= 100
    assert {item.ends for item in SAMPLE} == {"again", "harmless", "refused"}


@pytest.mark.parametrize(
    "item", [item if item in SAMPLE else pytest.param(item, marks=pytest.mark.matrix) for item in TABLE], ids=str
)
def test_a_misbehaviour_ends_well(server: OddServer, item: Misbehaviour) -> None:
    once_and_always(server, item)


PAGES = [
    pytest.param(page, id=name, marks=() if number % 5 == 0 or "surrogate" in name else pytest.mark.matrix)
    for number, (name, page) in enumerate(model_pages().items())
]


@pytest.mark.parametrize("page", PAGES)
def test_what_is_no_list_of_models_is_refused_by_name(server: OddServer, page: Any) -> None:
    server.models = page
    with pytest.raises(ServerError, match=r"127\.0\.0\.1"):
        server_engine(server)


ANSWERS = [200, pytest.param(10_000, marks=pytest.mark.matrix)]


@pytest.mark.parametrize("exact", [True, False], ids=["ids", "texts"])
@pytest.mark.parametrize("count", ANSWERS)
def test_what_is_trained_on_was_sampled(server: OddServer, count: int, exact: bool) -> None:
    """A tenth of all answers is wrong in some way of the table; what never fits is recorded."""
    set_words(server, exact)
    engine = server_engine(server, retries=4)
    rng = random.Random(3)
    slow = (*ENDLESS, "a gzip bomb", "a long body")
    wrong = [item.change for item in TABLE if item.ends == "again" and item.exact == exact and item.name not in slow]
    misbehaved = 0

    def next_reply(number: int) -> Misbehave | None:
        nonlocal misbehaved
        if rng.random() >= 0.1:
            return None
        misbehaved += 1
        return rng.choice(wrong)

    server.next_reply = next_reply
    prompts, trained, recorded, step = questions()[0], 0, 0, 0
    while server.sampled < count:
        step += 1
        trained += assert_sampled(server, prompts, engine.generate(prompts, step))
        recorded += len(engine.take_faults())
    assert misbehaved >= 0.07 * server.requests and reported(engine)[RETRIED] > 0
    assert trained == 3 * (step * len(prompts) - recorded) > 0.5 * count


KEY = "sk-a+b/c~d/w+or/d=="


SPELLINGS = (
    KEY,
    KEY.replace("/", "\\/"),
    json.dumps(json.dumps(KEY.replace("/", "\\/")))[3:-3],
    KEY.replace("+", "\\u002b").replace("=", "\\u003D"),
    json.dumps(KEY.replace("+", "\\u002B"))[1:-1],
    KEY.replace("/", "&#x2F;").replace("+", "&#43;").replace("=", "&#61;"),
    quote(KEY, safe=""),
    quote(KEY, safe="").lower(),
    quote(quote(KEY, safe=""), safe="").replace("~", "%257e"),
)


def test_a_key_is_hidden_however_it_is_written() -> None:
    for spelling in SPELLINGS:
        for words in (f"key {spelling} is wrong", f'key "{spelling}" is wrong'):
            assert without_key(words, KEY).replace('"', "") == "key [key] is wrong", words
    assert without_key("nothing of it", KEY) == "nothing of it" and without_key("a", None) == "a"
    assert without_key("EMPTY!", "EMPTY") == "[key]!"


def test_a_key_that_was_cut_is_hidden_too() -> None:
    for length in range(8, len(KEY)):
        assert without_key(f"x {KEY[:length]} y", KEY) == "x [key] y"
        assert without_key(f"x {quote(KEY[:length], safe='')}...", KEY) == "x [key]"
    assert without_key("x sk-a+b/", KEY) == "x sk-a+b/"


@pytest.mark.parametrize("filling", ["\\", "\\\\u00", "%25", "%", "&#", "+", "s", "sk-", "sk-abcdef-g", "\\+"])
def test_hiding_a_key_takes_no_more_than_one_look_at_each_character(filling: str) -> None:
    """Quadratic or worse, these would take minutes to hours."""
    for key in ("sk-abcdef-ghijklmnop", "s" * 40, "+" * 40, "/" * 20 + "k", "+s" * 20 + "="):
        assert without_key(filling * (30_000 // len(filling)) + "! end", key).endswith("end")


def test_a_key_is_in_no_error_and_no_record(server: OddServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    engine, prompts = server_engine(server, retries=0), questions()[0][:2]
    for status in (200, 401, 500):
        value = {"error": f"Incorrect API key provided: {KEY}"}
        server.next_reply = lambda number, status=status, value=value: wire(status=status, value=value)
        message = fault_or_error(engine, prompts[:1])
        assert "[key]" in message and "w+or" not in message

    def in_one(reply: Reply) -> None:
        if is_about(reply, 1):
            reply.value["choices"][0]["finish_reason"] = f"bad key {KEY}"

    server.next_reply = lambda number: in_one
    engine.generate(prompts, 2)
    (fault,) = engine.take_faults()
    assert fault.reason == UNUSABLE and "[key]" in fault.message and "w+or" not in fault.message


def test_a_response_that_repeats_the_key_is_requested_again(server: OddServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be written into rollouts.jsonl; a short key is no secret, and may be a word of the answer."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server.exact, server.models = False, {"data": [{"id": "tiny"}]}
    engine, prompts = server_engine(server), questions()[0][:1]
    server.next_reply = lambda number: text(lambda _: f"the key is {KEY}")
    message = fault_or_error(engine, prompts)
    assert "a response repeats the API key of the request" in message and "w+or" not in message
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    assert len(engine.generate(prompts, 2)[0]) == 3


def test_a_model_named_by_the_key_is_requested_and_not_shown(
    server: OddServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server.models = {"data": [{"id": f"m-{KEY}", "owned_by": "vllm"}]}
    info = query_server(server_engine(server).settings, lambda: False, print)
    assert info.models == (f"m-{KEY}",) and info.shown(info.check_model(None)) == "m-[key]"
    assert "w+or" not in repr(ServerInfo(info.kind, key=info.key))
    with pytest.raises(ServerError, match=r"It lists: m-\[key\]\. Set"):
        info.check_model("other")
