"""Misbehaviours of a server, generated. Each says how a request must end.

``again``: tried again when it happens once, and refused by name when it always happens. ``harmless``: the answer is
right all the same, always. ``refused``: at once, because another request would not help.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from tests.support.odd_server import END, TOKENIZER, Misbehave, Reply

START, IMAGE, VIDEO = TOKENIZER.convert_tokens_to_ids(["<|im_start|>", "<|image_pad|>", "<|video_pad|>"])
DEEP = b"[" * 100_000
BOMB_BYTES = 40 * 2**20


@dataclass(frozen=True)
class Misbehaviour:
    name: str
    change: Misbehave
    ends: Literal["again", "harmless", "refused"] = "again"
    # Whether the server says token ids.
    exact: bool = True

    def __str__(self) -> str:
        return f"{self.name}{'' if self.exact else ' (texts)'}"


def of_choice(edit: Callable[[dict[str, Any]], Any], index: int = 0) -> Misbehave:
    """Replace one choice by what ``edit`` makes of it."""

    def change(reply: Reply) -> None:
        choices = reply.value["choices"]
        choices[index % len(choices)] = edit(choices[index % len(choices)])

    return change


def with_entries(**entries: Any) -> Misbehave:
    return of_choice(lambda choice: choice | entries)


def without(*names: str) -> Misbehave:
    return of_choice(lambda choice: {name: value for name, value in choice.items() if name not in names})


def message(**entries: Any) -> Misbehave:
    return of_choice(lambda choice: choice | {"message": choice["message"] | entries})


def ids(edit: Callable[[list[int]], Any]) -> Misbehave:
    return of_choice(lambda choice: choice | {"token_ids": edit(list(choice["token_ids"]))})


def logprobs(edit: Callable[[list[Any]], list[Any]]) -> Misbehave:
    return of_choice(lambda choice: choice | {"logprobs": {"content": edit(choice["logprobs"]["content"])}})


def both_changed(edit: Callable[[list[int]], list[int]]) -> Misbehave:
    """Ids and the text they read, changed together: a server that did not stop."""

    def both(choice: dict[str, Any]) -> dict[str, Any]:
        changed = edit(list(choice["token_ids"]))
        text = TOKENIZER.decode(changed, skip_special_tokens=False)
        return choice | {"token_ids": changed, "message": {"role": "assistant", "content": text}, "logprobs": None}

    return of_choice(both)


def text(edit: Callable[[str], Any]) -> Misbehave:
    return of_choice(lambda choice: choice | {"message": {"content": edit(choice["message"]["content"])}})


def whole(value: Any) -> Misbehave:
    def change(reply: Reply) -> None:
        reply.value = value

    return change


def entry(name: str, value: Any) -> Misbehave:
    def change(reply: Reply) -> None:
        reply.value[name] = value

    return change


def body(make: Callable[[bytes], bytes], **headers: str) -> Misbehave:
    def change(reply: Reply) -> None:
        reply.body = make(reply.bytes())
        reply.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    return change


def wire(**values: Any) -> Misbehave:
    def change(reply: Reply) -> None:
        for name, value in values.items():
            setattr(reply, name, value)

    return change


WRONG_TYPES: dict[str, Any] = {
    "null": None, "true": True, "a number": 7, "a fraction": 1.5, "a text": "x", "a list": [1], "an object": {"a": 1}
}  # fmt: skip


def of_messages() -> Iterator[Misbehaviour]:
    for what, value in WRONG_TYPES.items():
        yield Misbehaviour(f"message {what}", with_entries(message=value))
        if what != "a text":
            yield Misbehaviour(f"content {what}", message(content=value))
            yield Misbehaviour(f"content {what}", message(content=value), exact=False)
            yield Misbehaviour(f"choice {what}", of_choice(lambda choice, value=value: value))
        else:
            yield Misbehaviour("content another text", message(content="another text"))
    for exact in (True, False):
        yield Misbehaviour("no message", without("message"), exact=exact)
        legacy = of_choice(lambda choice: {"text": choice["message"]["content"], "finish_reason": "stop"})
        yield Misbehaviour("legacy text", legacy, exact=exact)
        delta = of_choice(lambda choice: {"delta": choice["message"], "finish_reason": "stop"})
        yield Misbehaviour("delta", delta, exact=exact)
        yield Misbehaviour("empty text beside a message", with_entries(text=""), "harmless", exact=exact)
        yield Misbehaviour("role model", message(role="model"), exact=exact)
        yield Misbehaviour("text beside a message", with_entries(text="another text"), exact=exact)
        yield Misbehaviour("delta beside a message", with_entries(delta={"content": "more"}), exact=exact)
        yield Misbehaviour("no content", with_entries(message={"role": "assistant"}), exact=exact)
        yield Misbehaviour("role user", message(role="user"), exact=exact)
        for name in ("reasoning_content", "tool_calls", "refusal"):
            yield Misbehaviour(f"{name} cut out", message(**{name: "some"}), exact=exact)
    no_role = of_choice(lambda choice: choice | {"message": {"content": choice["message"]["content"]}})
    yield Misbehaviour("no role", no_role, "harmless")
    yield Misbehaviour("unknown fields", with_entries(audio=None, foo={"bar": [1]}), "harmless")


def of_token_ids() -> Iterator[Misbehaviour]:
    for what, value in WRONG_TYPES.items():
        if what not in ("null", "a list"):
            yield Misbehaviour(f"token_ids {what}", with_entries(token_ids=value))
    wrong = {
        "booleans": True, "texts": "5", "fractions": 3.5, "whole fractions": 3.0, "null": None, "lists": [3],
        "negative": -1, "beyond the vocabulary": 10**6, "huge": 10**30,
    }  # fmt: skip
    for what, value in wrong.items():
        yield Misbehaviour(f"ids {what}", ids(lambda given, value=value: [value, *given[1:]]))
    yield Misbehaviour("ids empty beside text", ids(lambda given: []))
    yield Misbehaviour("ids without a stop token", ids(lambda given: given[:-1]))
    yield Misbehaviour("ids of another answer", ids(lambda given: [*TOKENIZER("other words")["input_ids"], END]))
    yield Misbehaviour("ids cut", ids(lambda given: given[len(given) // 2 + 1 :]))
    yield Misbehaviour("ids twice", ids(lambda given: given + given))
    yield Misbehaviour("goes on behind the end", both_changed(lambda given: [*given, 70, 71, END]))
    yield Misbehaviour("goes on with a turn", both_changed(lambda given: [*given[:-1], START, 70, END]))
    yield Misbehaviour("a second end", both_changed(lambda given: [*given, END]))
    yield Misbehaviour("an image token", both_changed(lambda given: [IMAGE, *given]))
    yield Misbehaviour("a video token", both_changed(lambda given: [*given[:-1], VIDEO, END]))


def of_texts() -> Iterator[Misbehaviour]:
    spelled = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|im_start|>user", "<|im_end|> and more")
    for words in spelled:
        yield Misbehaviour(
            f"text spells {words}", text(lambda given, words=words: f"{given} {words} then"), exact=False
        )
    yield Misbehaviour("text with its end", text(lambda given: given + "<|im_end|>"), "harmless", exact=False)
    yield Misbehaviour("two ends", text(lambda given: given + "<|im_end|><|im_end|>"), exact=False)
    yield Misbehaviour("empty but cut off", of_choice(
        lambda choice: choice | {"message": {"content": ""}, "finish_reason": "length"}), exact=False)  # fmt: skip


def of_endings() -> Iterator[Misbehaviour]:
    for reason in ("content_filter", "tool_calls", "error", "abort", "", "STOP", "eos"):
        yield Misbehaviour(f"finish_reason {reason!r}", with_entries(finish_reason=reason))
    for what, value in WRONG_TYPES.items():
        if what != "a text":
            yield Misbehaviour(f"finish_reason {what}", with_entries(finish_reason=value))
    yield Misbehaviour("no finish_reason", without("finish_reason"))
    for what, value in WRONG_TYPES.items():
        ends: Literal["again", "harmless"] = "harmless" if what in ("null", "a number") else "again"
        yield Misbehaviour(f"index {what}", with_entries(index=value), ends)
    yield Misbehaviour("index negative", with_entries(index=-1))
    yield Misbehaviour("the same choice twice", entry_of_first_twice())
    broken = {"a list": [1], "a text": "x", "content a text": {"content": "x"}, "entries numbers": {"content": [1]},
              "no number": {"content": [{"logprob": "x"}]}, "missing number": {"content": [{"token": "x"}]},
              "positive": {"content": [{"logprob": 3.0}]}, "true": {"content": [{"logprob": True}]}}  # fmt: skip
    for what, value in broken.items():
        yield Misbehaviour(f"logprobs {what}", with_entries(logprobs=value))
    fine = {
        "null": None,
        "content null": {"content": None},
        "empty": {"content": []},
        "older": {"tokens": ["a"], "token_logprobs": [-1.0]},
    }
    for what, value in fine.items():
        yield Misbehaviour(f"logprobs {what}", with_entries(logprobs=value), "harmless")
    unknown: dict[str, dict[str, Any]] = {
        "null number": {"logprob": None},
        "NaN": {"logprob": float("nan")},
        "least float": {"logprob": -3.4028234663852886e38},
        "unknown": {"logprob": -9999.0},
        "null token": {"logprob": -1.0, "token": None},
    }
    for what, value in unknown.items():
        yield Misbehaviour(f"logprobs {what}", logprobs(lambda given, value=value: [value] * len(given)), "harmless")
    yield Misbehaviour("logprobs without the end's", logprobs(lambda given: given[:-1]), "harmless")
    yield Misbehaviour("logprobs too few", logprobs(lambda given: given[:-2] or [*given, *given]))
    yield Misbehaviour("logprobs too many", logprobs(lambda given: [*given, given[0]]))


def entry_of_first_twice() -> Misbehave:
    def change(reply: Reply) -> None:
        first = reply.value["choices"][0]
        reply.value["choices"] = [first | {"index": 0} for _ in reply.value["choices"]] or [first]
        if len(reply.value["choices"]) == 1:
            reply.value["choices"].append(first)

    return change


def of_answers() -> Iterator[Misbehaviour]:
    for what, value in WRONG_TYPES.items():
        if what != "an object":
            yield Misbehaviour(f"answer {what}", whole(value))
        yield Misbehaviour(f"choices {what}", entry("choices", value))
        if what not in ("null", "an object"):
            yield Misbehaviour(f"usage {what}", entry("usage", value))
        if what not in ("null", "a list"):
            yield Misbehaviour(f"prompt_token_ids {what}", entry("prompt_token_ids", value))
    yield Misbehaviour("no choices", whole({"id": "x"}))
    yield Misbehaviour("choices empty", entry("choices", []))
    yield Misbehaviour("an error with status 200", whole({"error": {"message": "out of memory", "code": 500}}))
    yield Misbehaviour("too many choices", lambda reply: reply.value["choices"].extend(reply.value["choices"]))
    yield Misbehaviour("usage null", entry("usage", None), "harmless")
    for name in ("prompt_tokens", "completion_tokens"):
        for what in ("true", "a fraction", "a text", "a list", "an object"):
            yield Misbehaviour(f"{name} {what}", entry("usage", {name: WRONG_TYPES[what]}))
    yield Misbehaviour("another prompt by length", entry("usage", {"prompt_tokens": 3}), "refused")
    yield Misbehaviour("another prompt by ids", entry("prompt_token_ids", [1, 2, 3]), "refused")
    yield Misbehaviour("prompt ids true", entry("prompt_token_ids", [True]))


def of_bodies() -> Iterator[Misbehaviour]:
    yield Misbehaviour("empty body", body(lambda data: b""))
    yield Misbehaviour("half a body", body(lambda data: data[: len(data) // 2]))
    yield Misbehaviour("HTML", body(lambda data: b"<html>busy</html>", Content_Type="text/html"))
    yield Misbehaviour("no text", body(lambda data: b"\xff\xfe\xfd\x00"))
    yield Misbehaviour("nested deeply", body(lambda data: DEEP))
    yield Misbehaviour("two objects", body(lambda data: data + data))
    yield Misbehaviour("NaN", body(lambda data: b'{"choices": NaN}'))
    yield Misbehaviour("a number of 9,999 digits", body(lambda data: b'{"choices": 1' + b"0" * 9999 + b"}"))
    yield Misbehaviour(
        "an unknown charset", body(lambda data: data, Content_Type="application/json; charset=nope"), "harmless"
    )
    yield Misbehaviour("a stream of events", body(lambda data: b"data: " + data + b"\n\ndata: [DONE]\n\n"))
    yield Misbehaviour("gzip", body(gzip.compress, Content_Encoding="gzip"), "harmless")
    yield Misbehaviour("deflate", body(zlib.compress, Content_Encoding="deflate"), "harmless")
    yield Misbehaviour(
        "gzip twice", body(lambda data: gzip.compress(gzip.compress(data)), Content_Encoding="gzip, gzip")
    )
    thousand = ", ".join(["gzip"] * 1000)
    yield Misbehaviour("gzip a thousand times, it says", body(gzip.compress, Content_Encoding=thousand))
    yield Misbehaviour("gzip that is none", body(lambda data: data, Content_Encoding="gzip"))
    yield Misbehaviour("gzip cut", body(lambda data: gzip.compress(data)[:-9], Content_Encoding="gzip"))
    yield Misbehaviour("gzip damaged", body(damaged_gzip, Content_Encoding="gzip"))
    yield Misbehaviour("an unknown packing", body(lambda data: data, Content_Encoding="br"))
    yield Misbehaviour("a gzip bomb", body(lambda data: bomb(), Content_Encoding="gzip"))
    yield Misbehaviour("a long body", body(lambda data: b" " * (2 * 2**20) + data))


def bomb() -> bytes:
    return gzip.compress(bytes(BOMB_BYTES))


def damaged_gzip(data: bytes) -> bytes:
    packed = bytearray(gzip.compress(data))
    packed[len(packed) // 2] ^= 0xFF
    return bytes(packed)


def of_wires() -> Iterator[Misbehaviour]:
    for status in (500, 502, 503, 504, 429, 599):
        yield Misbehaviour(f"status {status}", wire(status=status))
        yield Misbehaviour(f"status {status} with Retry-After", wire(status=status, headers={"Retry-After": "0"}))
    for odd in ("soon", "-5", "1e9", "", "Wed, 21 Oct 2015 07:28:00 GMT", "٣"):
        headers = {"Retry-After": odd.encode().decode("latin-1")}
        yield Misbehaviour(f"Retry-After {odd!r}", wire(status=429, headers=headers))
    for status in (400, 401, 403, 404, 405, 413, 422, 204, 301, 307):
        yield Misbehaviour(f"status {status}", wire(status=status), "refused")
    yield Misbehaviour("a redirect to nowhere", wire(status=302, headers={"Location": "http://[::1"}), "refused")
    # Names of codecs that Python knows, and that make no text of bytes.
    for charset in ("rot13", "zlib", "hex", "idna", "undefined", "nope"):
        headers = {"Content-Type": f"application/json; charset={charset}"}
        failing = wire(status=500, body=b"\xff busy", headers=headers)
        yield Misbehaviour(f"status 500 with charset={charset}", failing)
        refusing = wire(status=400, body=b"\xff no", headers=headers)
        yield Misbehaviour(f"status 400 with charset={charset}", refusing, "refused")
    yield Misbehaviour("closed without a word", wire(silent=True))
    yield Misbehaviour("closed within the body", wire(cut=20))
    yield Misbehaviour("closed before the body", wire(cut=0))
    yield Misbehaviour("a length that is too large", wire(headers={"Content-Length": "99999"}, cut=10**6))
    yield Misbehaviour("no length", wire(headers={"Content-Length": "x"}))
    yield Misbehaviour("a drip", wire(drip_seconds=5.0))
    yield Misbehaviour("too late", wire(wait_seconds=3600.0))


def of_surrogates() -> Iterator[Misbehaviour]:
    """JSON can escape half of a pair, and readers take bytes that encode one."""
    for exact in (True, False):
        half = text(lambda given: given + "\ud800")
        yield Misbehaviour("lone surrogate in a text", half, exact=exact)
    yield Misbehaviour("lone surrogate in a finish_reason", with_entries(finish_reason="stop\udfff"), exact=False)
    in_bytes = body(lambda data: data.replace(b'"content": "', b'"content": "\xed\xa0\x80'))
    yield Misbehaviour("lone surrogate in bytes", in_bytes, exact=False)


def all_misbehaviours() -> list[Misbehaviour]:
    parts = (of_messages, of_token_ids, of_texts, of_endings, of_answers, of_bodies, of_wires, of_surrogates)
    return [item for part in parts for item in part()]


def model_pages() -> dict[str, Any]:
    """What ``/models`` may hold in place of a list of models."""
    pages: dict[str, Any] = dict(WRONG_TYPES)
    pages |= {f"data {what}": {"data": value} for what, value in WRONG_TYPES.items()}
    pages |= {f"entry {what}": {"data": [value]} for what, value in WRONG_TYPES.items()}
    pages |= {f"id {what}": {"data": [{"id": value}]} for what, value in WRONG_TYPES.items() if what != "a text"}
    return pages | {
        "id a lone surrogate": {"data": [{"id": "m\ud800"}]},
        "owner a list": {"data": [{"id": "m", "owned_by": ["vllm"]}]},
        "deep": json.loads("[" * 500 + "]" * 500),
    }
