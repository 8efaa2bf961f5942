"""No key is shown, however a server writes it, and hiding it takes no time to speak of."""

from __future__ import annotations

import json
from html import escape
from urllib.parse import quote

import pytest

from tests.support.odd_server import OddServer, Reply
from tests.unit.rollout import test_server_misbehaviours as table
from vlm_pg.errors import ServerError
from vlm_pg.http.keys import without_key
from vlm_pg.rollout.server.dialects import ServerInfo
from vlm_pg.rollout.server.generator import UNUSABLE, query_server

KEY = "p\"a's\\s/w&or<d 1"


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


def test_a_run_of_backslashes_in_a_key_is_shared_out_in_one_way() -> None:
    """Between two letters, any of 32 could be the key's own: 32**11 ways to share them out, and none fits."""
    written = ("\\" * 32).join("abcdefghijk!")
    assert without_key(f"x {written} y", "\\".join("abcdefghijkl")) == "x [key] y"


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


def test_a_response_that_repeats_the_key_is_asked_for_again(
    servers: list[OddServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be written into rollouts.jsonl; a short key is no secret, and may be a word of the answer."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    engine = table.begin(servers, False, retries=1)
    server, prompts = servers[0], table.questions()[0][:1]

    def repeats(reply: Reply) -> None:
        reply.value["choices"][0]["message"]["content"] = f"the key is {KEY}"

    server.next_reply = lambda number: repeats
    said = table.recorded_or_raised(engine, prompts)
    assert "a response repeats the API key of the request" in said and "or<d" not in said
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    assert len(engine.generate(prompts, 2)[0]) == 3


def test_a_model_named_by_the_key_is_asked_for_and_not_shown(
    servers: list[OddServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    engine = table.begin(servers, True)
    servers[0].models = {"data": [{"id": f"m-{KEY}", "owned_by": "vllm"}]}
    info = query_server(engine.settings, lambda: False, print)
    assert info.models == (f"m-{KEY}",) and info.shown(info.check_model(None)) == "m-[key]"
    assert "or<d" not in repr(ServerInfo(info.kind, key=info.key))
    with pytest.raises(ServerError, match=r"It lists: m-\[key\]\. Set"):
        info.check_model("other")
