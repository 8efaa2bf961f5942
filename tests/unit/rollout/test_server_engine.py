"""The server engine against a small server of our own that answers, fails, lies and dies on demand."""

from __future__ import annotations

import asyncio
import gzip
import re
import threading
import time
import tracemalloc
from contextlib import nullcontext
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx2
import numpy as np
import pytest
import torch

from tests.support.groups import tiny_policy
from tests.support.misbehaviours import bomb, wire, with_entries
from tests.support.odd_server import OddServer, Reply
from tests.support.server_engines import fault_or_error, is_about, policy, questions, reported, server_engine
from tests.support.tiny import tiny_model, tiny_processor
from vlm_pg.distributed import SINGLE_RANK
from vlm_pg.errors import ConfigError, SampleError, ServerError
from vlm_pg.http.client import BoundedBody, UnreadableResponse, retry_after_seconds
from vlm_pg.models.loading import make_policy
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.observe.console import Console
from vlm_pg.observe.timeline import Timeline
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.prompts.settings import PromptSettings
from vlm_pg.rollout.sampling import rollout_key
from vlm_pg.rollout.server import client
from vlm_pg.rollout.server.contract import LoadedModel
from vlm_pg.rollout.server.dialects import Kind
from vlm_pg.rollout.server.divergence import Divergence, DivergenceCheck, divergence
from vlm_pg.rollout.server.engine import DIVERGENCE, MEDIA_HITS, PREFIX_HITS, RETRIED, ServerEngine
from vlm_pg.rollout.server.generator import MOST_IN_A_ROW, UNUSABLE
from vlm_pg.rollout.server.messages import ChatMessages
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.threads import CoreWatch
from vlm_pg.training.stop import StopRequest
from vlm_pg.training.trainer import Progress, StepLogs, Trainer
from vlm_pg.types import DecodedMedia, MediaRef, Prompt, ResponseGroup, Sample

TINY = Path(__file__).parents[3] / "assets" / "tiny-qwen2_5-vl"
GENERATIONS = 3


def one(number: int = 0) -> tuple[Prompt, ...]:
    return questions()[0][number : number + 1]


def owned_by(server: OddServer, owner: str) -> None:
    server.models = {"data": [{"id": "tiny", "owned_by": owner}]}


def video_questions(rule: str, frames: int) -> tuple[Policy, list[Prompt], ChatMessages]:
    counted = tiny_policy(positions=rule)
    side = counted.pixel_factor
    shown = np.random.default_rng(0).integers(0, 256, (frames, 3, side, side), dtype=np.uint8)
    medium = DecodedMedia("video", shown, tuple(i / 2 for i in range(frames)), 2.0, "test")
    builder = PromptBuilder(counted.processor, PromptSettings(), counted.positions)
    samples = {n: Sample(n, f"Q {n}?", (MediaRef("video", "v"),), (), "1", "numerical", "t", "t") for n in ("x", "y")}
    prompts = [builder.build(sample, (medium,)) for sample in samples.values()]
    return counted, prompts, ChatMessages(counted, samples)


@pytest.mark.parametrize(("rule", "frames", "warned"), [("transformers", 8, 1), ("transformers", 2, 0), ("qwen", 8, 0)])
def test_a_server_that_counts_positions_otherwise_is_named_once(
    server: OddServer, rule: str, frames: int, warned: int
) -> None:
    """vLLM counts by Qwen's rule: it matters to a run by transformers' where a video's time passes its space."""
    counted, prompts, messages = video_questions(rule, frames)
    lines: list[str] = []
    settings = server_engine(server, rollout={"max_new_tokens": 20}, weights="keep").settings
    engine = ServerEngine(LoadedModel(counted), settings, 7, lambda: False, messages, Path("unused"), lines.append)
    for step in range(2):
        engine.generate(prompts, step)
    found = [line for line in lines if "counts rotary positions by the rule qwen, this run by transformers" in line]
    assert len(found) == warned
    assert all("sample 'x' is sampled at other positions" in li and "Set model.positions=qwen" in li for li in found)


@pytest.mark.parametrize(("owner", "head_dim", "warned"), [("vllm", 16, 1), ("vllm", 32, 0), ("someone", 16, 0)])
def test_heads_that_vllm_cannot_compute_on_a_cpu_are_logged_before_the_run(
    server: OddServer, owner: str, head_dim: int, warned: int
) -> None:
    owned_by(server, owner)
    model = tiny_model("qwen2", head_dim=head_dim)
    asking = make_policy(model, tiny_processor("qwen2"), ModelSettings(path="tiny"))
    lines: list[str] = []
    settings = server_engine(server, weights="keep").settings
    ServerEngine(
        LoadedModel(asking), settings, 7, lambda: False, ChatMessages(asking, {}), Path("unused"), lines.append
    )
    found = [line for line in lines if "has a head size of 16; on a CPU vLLM supports 32, 64, 80, 96, 112, " in line]
    assert len(found) == warned and not server.bodies


def test_one_request_brings_a_group_with_the_servers_log_probabilities(server: OddServer) -> None:
    prompts, _, texts = questions()
    groups = server_engine(server).generate(prompts[:2], 3)
    assert [body["n"] for body in server.bodies] == [GENERATIONS] * 2
    assert {body["seed"] for body in server.bodies} == {rollout_key(7, 3, name, 0) % 2**53 for name in ("q0", "q1")}
    assert all(body["model"] == "tiny" and body["top_k"] == -1 for body in server.bodies)
    for prompt, group in zip(prompts, groups, strict=False):
        assert len(group) == GENERATIONS
        for rollout in group:
            assert (texts[prompt.sample_id], tuple(rollout.token_ids.tolist())) in server.log
            assert torch.equal(rollout.rollout_logprobs, torch.full((len(rollout.token_ids),), -5.9))
            assert rollout.sampling_logprobs is None and rollout.entropies is None
            assert rollout.finish_reason == "stop"


@pytest.mark.parametrize("rollout", [{}, {"top_k": 5}, {"top_p": 0.9}, {"temperature": 0.7}], ids=str)
def test_the_policy_scores_what_the_server_does_not_report(server: OddServer, rollout: dict[str, Any]) -> None:
    """One response of three has no log-probabilities. Behind a filter, or at another temperature, theirs may be of
    another distribution: then all are the policy's."""
    lines: list[str] = []
    engine, reports = server_engine(server, lines, rollout=rollout), not rollout
    server.next_reply = lambda number: with_entries(logprobs=None)
    if "temperature" in rollout:  # of the two readings, that of the logits themselves is nearer
        engine._check._is_scaled = False
    (group,) = engine.generate(one(), 1)
    ids = tuple(rollout.token_ids for rollout in group)
    with torch.no_grad():
        (scored,) = policy().logprobs([ResponseGroup(one()[0], ids)], temperature=rollout.get("temperature", 1.0))
    own = [
        torch.allclose(found.rollout_logprobs, values, atol=1e-5) for found, values in zip(group, scored, strict=True)
    ]
    assert own == [True, not reports, not reports]
    assert any("the loss takes the trainer's" in line for line in lines) is not reports


def test_weights_that_are_kept_must_be_known_by_their_log_probabilities(server: OddServer) -> None:
    """Of every token: an answer without them is requested again, and where the reading is unknown the run ends."""
    lines: list[str] = []
    engine = server_engine(server, lines, weights="keep")
    assert any("samples from the weights it was started with" in line for line in lines)
    server.next_reply = lambda number: with_entries(logprobs=None)
    assert "has no log-probability of" in fault_or_error(engine, one())
    server.next_reply = lambda number: None
    with pytest.raises(ServerError, match=r"rollout\.temperature=1 before filters.*set rollout\.temperature=1"):
        server_engine(server, weights="keep", rollout={"top_k": 5}).generate(one(), 1)


def test_a_server_without_n_is_sent_a_request_for_each_rollout(server: OddServer) -> None:
    def single(reply: Reply) -> None:
        del reply.value["choices"][1:]

    server.next_reply = lambda number: single
    lines: list[str] = []
    engine = server_engine(server, lines)
    assert [len(group) for group in engine.generate(one(), 1)] == [GENERATIONS]
    assert ["n" in body for body in server.bodies] == [True, False, False]
    assert len({body["seed"] for body in server.bodies}) == GENERATIONS
    engine.generate(one(), 2)
    assert not any("n" in body for body in server.bodies[GENERATIONS:])
    assert len(server.bodies) == 2 * GENERATIONS and sum("1 of 3 choices" in line for line in lines) == 1


MEMORY = {"error": {"message": "out of  memory"}}


@pytest.mark.parametrize(
    ("change", "requests", "message"),
    [
        (wire(status=503, value=MEMORY), 2, r"failed 2 times .* status 503: .*out of memory"),
        (wire(status=422, value=MEMORY), 1, r"refused POST .* status 422: .*out of memory"),
        (with_entries(finish_reason="abort"), 2, r"failed 2 times at POST /chat/completions.*abort"),
        (wire(wait_seconds=1.0), 2, r"ReadTimeout.*rollout\.server\.timeout_seconds \(0\.2 now\)"),
        # Every byte comes in time, the whole never would.
        (wire(drip_seconds=0.1), 2, r"ReadTimeout.*rollout\.server\.timeout_seconds \(0\.2 now\)"),
        (wire(value={"text": "hello"}), 2, "gave {'text': 'hello'} for 3 choices"),
    ],
)
def test_an_error_has_the_servers_words(server: OddServer, change: Any, requests: int, message: str) -> None:
    engine = server_engine(server, timeout_seconds=0.2 if "Timeout" in message else 600.0)
    server.next_reply = lambda number: change
    assert re.search(message, fault_or_error(engine, one()))
    assert len(server.bodies) == requests


def test_an_absence_costs_no_retry(server: OddServer) -> None:
    engine = server_engine(server, retries=0, wait_seconds=30.0)

    def leave(reply: Reply) -> None:
        reply.status, server.away_gets = 503, 2

    server.next_reply = lambda number: leave if number == 0 else None
    assert len(engine.generate(one(), 1)[0]) == GENERATIONS
    assert len(server.bodies) == 2 and server.away_gets == 0


def test_a_request_that_always_takes_the_server_down_is_given_up(
    server: OddServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server comes back each time, and is away for longer than allowed in all."""
    monkeypatch.setattr(client, "PROBE_EVERY_SECONDS", 0.1)
    engine = server_engine(server, retries=0, wait_seconds=0.5)

    def fall(reply: Reply) -> None:
        reply.status, server.away_gets = 503, 2 if len(server.bodies) < 20 else 0

    server.next_reply = lambda number: fall
    with pytest.raises(ServerError, match=r"not answered for 0\.5 s \(status 503\)"):
        engine.generate(one(), 1)
    assert len(server.bodies) > 1


def test_a_dead_server_stops_the_run_and_says_how_to_go_on(server: OddServer) -> None:
    lines: list[str] = []
    engine = server_engine(server, lines, wait_seconds=0.3)
    server.stop()
    with pytest.raises(ServerError, match=rf"{re.escape(server.url)}: It has not answered for 0\.3 s .*run\.resume=au"):
        engine.generate(questions()[0][:2], 1)
    assert sum("does not answer" in line and "waiting up to 0.3 s" in line for line in lines) == 1


def test_a_server_that_comes_back_is_waited_for(server: OddServer) -> None:
    class Lines(list[str]):
        def append(self, line: str) -> None:
            super().append(line)
            if "does not answer" in line:
                server.start()

    lines = Lines()
    engine = server_engine(server, lines, wait_seconds=30.0)
    server.stop()
    assert len(engine.generate(one(), 1)[0]) == GENERATIONS
    assert sum("answers again" in line for line in lines) == 1


@pytest.mark.parametrize("is_away", [False, True])
def test_a_stop_request_is_heard_while_waiting(server: OddServer, is_away: bool) -> None:
    stop = threading.Event()
    engine = server_engine(server, should_stop=stop.is_set, wait_seconds=1000.0)
    server.next_reply = lambda number: wire(wait_seconds=30.0)
    if is_away:
        server.stop()
    threading.Timer(0.2, stop.set).start()
    with pytest.raises(InterruptedError):
        engine.generate(one(), 1)


@pytest.mark.parametrize(
    ("models", "settings", "message"),
    [
        ("<html>hello</html>", {}, r"no JSON object.*hello.*base URL"),
        ({"object": "list"}, {}, "lists no model"),
        ({"data": []}, {}, "lists no model"),
        (None, {"url": ""}, r"status 404\. rollout\.server\.url must be the base URL"),
        (None, {"model": "large"}, r"'large', which the server does not serve\. It lists: tiny"),
    ],
)
def test_a_server_without_the_model_is_refused_at_once(
    server: OddServer, models: Any, settings: dict[str, Any], message: str
) -> None:
    server.models = server.models if models is None else models
    if "url" in settings:
        settings = {"url": server.url.removesuffix("/v1")}
    with pytest.raises(ServerError, match=message):
        server_engine(server, **settings)


def test_no_url_is_a_config_error() -> None:
    settings = RolloutSettings(engine="server")
    with pytest.raises(ConfigError, match=r"rollout\.server\.url is not set"):
        ServerEngine(LoadedModel(policy()), settings, 0, lambda: False, questions()[1], Path("unused"), print)


@pytest.mark.parametrize(
    ("owner", "at_once", "words"), [("a", 0, "abcdefghi"), ("vllm", 1, "abcdefghi"), ("a", 1, "a")]
)
def test_equal_choices_of_one_request_are_noticed(server: OddServer, owner: str, at_once: int, words: str) -> None:
    """An unknown server is sent single requests from then on; short answers may be equal."""
    server.exact = False
    owned_by(server, owner)

    def equal(reply: Reply) -> None:
        for choice in reply.value["choices"]:
            choice["message"]["content"] = " ".join(words)

    server.next_reply = lambda number: equal
    lines: list[str] = []
    engine = server_engine(server, lines)
    for step in (1, 2):
        engine.generate(one(), step)
    assert "n" in server.bodies[0] and ("n" in server.bodies[1]) == at_once
    assert len(server.bodies) == (2 if at_once else 1 + GENERATIONS)
    assert sum("are equal" in line for line in lines) == (0 if words == "a" else 1 if at_once else 2)


def test_settings_an_unknown_server_may_ignore_are_named(server: OddServer) -> None:
    owned_by(server, "someone")
    lines: list[str] = []
    server_engine(server, lines, rollout={"top_k": 5, "min_p": 0.1})
    assert "may ignore rollout.top_k, rollout.min_p" in lines[0]


def test_the_key_is_in_the_header_and_nowhere_else(server: OddServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", " secret-1\n")
    monkeypatch.setenv("MY_KEY", "secret-2")
    engine = server_engine(server)
    engine.generate(one(), 1)
    server_engine(server, api_key_variable="MY_KEY").generate(one(), 1)
    assert server.keys == ["Bearer secret-1", "Bearer secret-2"]
    value = {"error": "x" * (client.SHOWN_CHARACTERS - 30) + "Incorrect key secret-1, again: secret-1"}
    for status in (401, 500, 200):
        server.next_reply = lambda number, status=status: wire(status=status, value=value)
        message = fault_or_error(engine, one())
        assert "Incorrect" in message and "secr" not in message
    assert "secret" not in engine.settings.model_dump_json()


@pytest.mark.parametrize(
    ("name", "key", "message"),
    [
        ("OPENAI_API_KEY", "secret\nX-Other: 1", "holds no bearer token"),
        ("OPENAI_API_KEY", "secret–1", "holds no bearer token"),
        ("OPENAI_API_KEY", '"secret"', r"letters, digits and - \. _ ~ \+ / of ASCII, and = at the end"),
        ("OPENAI_API_KEY", "secret=1", "holds no bearer token"),
        ("MY_KEY", " ", "MY_KEY, which is empty or not set"),
    ],
)
def test_a_key_that_cannot_be_sent_is_refused_unseen(
    server: OddServer, monkeypatch: pytest.MonkeyPatch, name: str, key: str, message: str
) -> None:
    monkeypatch.setenv(name, key)
    with pytest.raises(ConfigError, match=message) as caught:
        server_engine(server, api_key_variable=name)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("error", [httpx2.InvalidURL("Bearer k"), httpx2.LocalProtocolError("Bearer k")])
def test_a_request_that_cannot_be_sent_is_not_repeated(
    server: OddServer, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    engine = server_engine(server, retries=9, wait_seconds=1000.0)
    urls: list[str] = []

    async def send(self: Any, request: httpx2.Request, **options: Any) -> None:
        urls.append(str(request.url))
        raise error

    monkeypatch.setattr(httpx2.AsyncClient, "send", send)
    with pytest.raises(ServerError, match="cannot be sent") as caught:
        engine.generate(one(), 1)
    assert len(urls) == 1 and "Bearer" not in str(caught.value) and caught.value.__cause__ is None


def test_a_turn_is_ruled_out_as_media_tokens_are(server: OddServer) -> None:
    """Answers with one are refused, and so would cost another request."""
    server_engine(server).generate(one(), 1)
    turn = policy().tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert server.bodies[0]["logit_bias"] == {str(token): -100 for token in (*policy().media_token_ids, turn)}


def test_bodies_are_made_when_a_slot_is_free(server: OddServer, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, messages, _ = questions()
    engine = server_engine(server, concurrency=1)
    made: list[tuple[int, bool]] = []

    def recorded(prompt: Prompt, kind: Kind) -> list[dict[str, Any]]:
        made.append((len(server.bodies), threading.current_thread() is threading.main_thread()))
        return messages(prompt, kind)

    recorded.fields = messages.fields  # type: ignore[attr-defined]
    monkeypatch.setattr(engine._generator, "messages", recorded)
    engine.generate(prompts[:2], 1)
    assert made == [(0, False), (1, False)]


def test_hits_of_vllms_caches_are_counted_by_step(server: OddServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words of vLLM 0.32, from its counters, which begin anew with the server."""
    lines = (
        "# TYPE vllm:prefix_cache_queries_total counter",
        'vllm:prefix_cache_queries_total{{engine="0",model_name="m"}} {}',
        'vllm:prefix_cache_hits_total{{engine="0",model_name="m"}} {}',
        'vllm:prefix_cache_queries_created{{engine="0",model_name="m"}} 1.7e+09',
        'vllm:external_prefix_cache_hits_total{{engine="0",model_name="m"}} 5.0',
    )
    engine, counts = server_engine(server), ["1200.0", "800.0"]

    def control(path: str, body: dict[str, Any]) -> Reply:
        text = "\n".join(lines).format(*counts) if path == "/metrics" else "{}"
        return Reply({}, body, 200 if path == "/metrics" else 404, body=text.encode())

    monkeypatch.setattr(server, "control", control)
    for queries, hits, share in (
        ("1200.0", "800.0", 2 / 3),
        ("1.6e+03", "1100.0", 3 / 4),
        ("100.0", "50.0", None),
        ("300.0", "150.0", 0.5),
    ):
        counts[:] = [queries, hits]
        assert reported(engine).get(PREFIX_HITS) == (None if share is None else pytest.approx(share))
    assert MEDIA_HITS not in reported(engine)


@pytest.mark.parametrize("error", [ServerError("gone"), SampleError("video_for_server", "another rate")])
def test_what_ends_a_run_in_its_rollouts_leaves_a_checkpoint(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Of the loop alone: without a model's weights and a run's folder."""
    trainer = object.__new__(Trainer)
    trainer.config = SimpleNamespace(training=SimpleNamespace(steps=3))  # type: ignore[assignment]
    trainer.policy = SimpleNamespace(device=torch.device("cpu"))  # type: ignore[assignment]
    trainer.console, trainer.stop, trainer.progress = Console(enabled=False), StopRequest(SINGLE_RANK), Progress(step=1)
    trainer.engine = SimpleNamespace(ranks=SINGLE_RANK)  # type: ignore[assignment]
    trainer.batches = Mock()
    trainer._cores, trainer._presence, trainer.timeline = CoreWatch(), None, Timeline(SINGLE_RANK, 0)
    saved: list[int] = []

    def fails(step: int) -> None:
        raise error

    monkeypatch.setattr(trainer, "_step", fails)
    monkeypatch.setattr(trainer, "save", lambda: saved.append(trainer.progress.step))
    with pytest.raises(type(error)):
        trainer.run(StepLogs())
    assert saved == [1]


def test_a_bomb_is_never_decompressed_as_a_whole() -> None:
    class Chunks(httpx2.AsyncByteStream):
        def __init__(self, data: bytes):
            self.pieces = [data[start : start + 2**16] for start in range(0, len(data), 2**16)]

        async def __aiter__(self) -> Any:
            for piece in self.pieces:
                yield piece

    async def read(data: bytes) -> int:
        body = BoundedBody(Chunks(data), "gzip", 2**20, "rollout.server.max_answer_mb")
        return sum([len(piece) async for piece in body])

    packed = bomb()
    tracemalloc.start()
    with pytest.raises(UnreadableResponse, match=r"more than 1 MiB \(rollout\.server\.max_answer_mb\)"):
        asyncio.run(read(packed))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 2**20
    assert asyncio.run(read(gzip.compress(b"x" * 10**6))) == 10**6


def test_a_schema_of_no_charset_of_text_is_read(server: OddServer) -> None:
    server.schema = Reply({"paths": {}}, {}, headers={"Content-Type": "application/json; charset=rot13"})
    assert server_engine(server).server.kind == "vllm"


@pytest.mark.parametrize(("longest", "paused"), [(1000.0, 7.0), (3.0, 3.0), (0.01, None)])
def test_a_server_is_left_alone_as_long_as_it_requests(
    server: OddServer, monkeypatch: pytest.MonkeyPatch, longest: float, paused: float | None
) -> None:
    """Logged once, if it is long."""
    lines: list[str] = []
    engine = server_engine(server, lines, retries=2)
    pauses: list[float] = []
    sleep = client.asyncio.sleep

    async def recorded(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(client.asyncio, "sleep", recorded)
    monkeypatch.setattr("vlm_pg.http.client.LONGEST_PAUSE_SECONDS", longest)
    server.next_reply = lambda number: wire(status=429, headers={"Retry-After": "7"}) if number < 2 else None
    engine.generate(one(), 1)
    assert [seconds for seconds in pauses if seconds >= 1] == ([] if paused is None else [paused] * 2)
    found = [line for line in lines if "pause" in line]
    assert len(found) == (longest > 5)
    expected = f"the server at {server.url} asks for a pause (status 429, Retry-After): waiting 7 s"
    assert all(expected in line for line in found)


def test_what_retry_after_says() -> None:
    def seconds(value: str) -> float:
        return retry_after_seconds(httpx2.Response(429, headers={"Retry-After": value}))

    assert seconds("12") == 12.0 and seconds(" 3 ") == 3.0
    assert 50 < seconds(formatdate(time.time() + 60, usegmt=True)) < 61
    for odd in ("", "soon", "-5", "1e9", "nan", "Wed, 21 Oct 2015 07:28:00 GMT"):
        assert seconds(odd) == 0.0


def unusable_for(*numbers: int) -> Any:
    """Answers to these questions do not fit."""

    def change(reply: Reply) -> None:
        if any(is_about(reply, number) for number in numbers):
            reply.value["choices"][0] |= {"token_ids": []}

    return lambda number: change


def test_a_question_without_a_usable_answer_is_left_out_and_recorded(server: OddServer) -> None:
    """Also where it is the only one of its step: a resumed run would repeat it under the same seeds."""
    engine = server_engine(server)
    server.next_reply = unusable_for(1)
    groups = engine.generate(questions()[0][:3], 1)
    assert [len(group) for group in groups] == [3, 0, 3]
    (fault,) = engine.take_faults()
    assert (fault.sample_id, fault.reason, fault.where) == ("q1", UNUSABLE, server.url)
    assert f"Server {server.url}: Sample 'q1': token_ids is empty beside the text" in fault.message
    assert engine.take_faults() == [] and reported(engine)[RETRIED] >= 1
    assert engine.generate(one(1), 1) == [()] and len(engine.take_faults()) == 1
    assert engine.generate([], 1) == [] and engine.take_faults() == []


def test_many_questions_in_a_row_without_a_usable_answer_end_the_run(server: OddServer) -> None:
    """Counted over calls; one usable answer between, and the count begins anew."""
    engine = server_engine(server, retries=0)
    server.next_reply = unusable_for(0)
    for step in range(MOST_IN_A_ROW - 1):
        engine.generate(one(), step)
    engine.generate(one(1), 1)
    for step in range(MOST_IN_A_ROW - 1):
        engine.generate(one(), step)
    assert len(engine.take_faults()) == 2 * (MOST_IN_A_ROW - 1)
    with pytest.raises(ServerError) as caught:
        engine.generate(one(), 99)
    parts = (server.url, f"to {MOST_IN_A_ROW} questions in a row", "sent up to 1 times", "run.resume=auto")
    for part in (*parts, "The last error: ", "token_ids is empty beside the text"):
        assert part in str(caught.value)


def test_questions_of_one_call_count_in_their_order(server: OddServer) -> None:
    engine = server_engine(server, retries=0)
    numbers = range(2 * MOST_IN_A_ROW - 1)
    server.next_reply = unusable_for(*(number for number in numbers if number != MOST_IN_A_ROW - 1))
    groups = engine.generate(questions()[0][: len(numbers)], 1)
    assert [number for number, group in enumerate(groups) if group] == [MOST_IN_A_ROW - 1]
    assert len(engine.take_faults()) == 2 * (MOST_IN_A_ROW - 1)
    with pytest.raises(ServerError, match="questions in a row"):
        engine.generate(one(), 2)


def test_an_unusable_answer_is_requested_again_under_other_seeds(server: OddServer) -> None:
    engine = server_engine(server, retries=3)
    server.next_reply = unusable_for(0)
    assert engine.generate(one(), 1) == [()]
    assert server.bodies[0]["n"] == 3 and "n" not in server.bodies[1]
    assert len({body["seed"] for body in server.bodies}) == len(server.bodies) == 4


def test_divergence_is_the_kl_of_the_reported_log_probabilities() -> None:
    """By hand: d = 0.1 and -0.2."""
    found = divergence([(-1.0, -2.0), None], [torch.tensor([-0.9, -2.2, -7.0]), torch.tensor([-1.0])])
    expected = torch.tensor([0.1, -0.2], dtype=torch.float64)
    assert found.tokens == 2 and found.largest == pytest.approx(0.2, abs=1e-6)
    assert found.kl == pytest.approx(float((expected.exp() - 1 - expected).sum()), abs=1e-6)
    assert (found + found).mean == pytest.approx(found.mean) and Divergence().mean == 0.0
    assert divergence([(-9e3,)], [torch.tensor([-1.0])]).kl == pytest.approx(torch.tensor(20.0).exp().item(), rel=1e-6)
    assert divergence([None, None], [torch.tensor([-1.0])] * 2) == Divergence()


class TruthfulServer(OddServer):
    """Says the log-probabilities of a policy, ``off`` nats away from it and divided by ``temperature``, or nothing."""

    off, temperature, says = 0.0, 1.0, True

    def reply(self, body: dict[str, Any]) -> Reply:
        reply = super().reply(body)
        text = body["messages"][-1]["content"][-1]["text"]
        prompt = next(prompt for prompt in questions()[0] if questions()[2][prompt.sample_id] == text)
        responses = tuple(torch.tensor(choice["token_ids"]) for choice in reply.value["choices"])
        with torch.no_grad():
            (scored,) = policy().logprobs([ResponseGroup(prompt, responses)], temperature=self.temperature)
        for choice, values in zip(reply.value["choices"], scored, strict=True):
            numbers = [min(0.0, value - self.off) if self.says else None for value in values.tolist()]
            choice["logprobs"] = {"content": [{"logprob": number} for number in numbers]}
        return reply


@pytest.fixture
def truthful(server: OddServer) -> Any:
    made = TruthfulServer()
    yield made
    made.stop()


def checked(server: OddServer, lines: list[str], **rollout: Any) -> ServerEngine:
    return server_engine(server, lines, rollout=rollout, max_divergence=0.5)


def generate(engine: ServerEngine, step: int, count: int = 10) -> None:
    groups = engine.generate(questions()[0][:count], step)
    assert count < 10 or sum(len(rollout.token_ids) for group in groups for rollout in group) > 100


@pytest.mark.parametrize(("temperature", "scaled"), [(1.0, 1.0), (0.7, 1.0), (0.7, 0.7)])
def test_a_server_with_these_weights_is_not_warned_of(
    truthful: TruthfulServer, temperature: float, scaled: float
) -> None:
    """Log-probabilities of the logits, or divided by the temperature."""
    lines: list[str] = []
    engine, truthful.temperature = checked(truthful, lines, temperature=temperature), scaled
    generate(engine, 1)
    assert reported(engine)[DIVERGENCE] < 1e-6 and not any("another policy" in line for line in lines)
    assert DIVERGENCE not in reported(engine)


def test_a_server_with_other_weights_is_warned_of_once_and_stopped_beyond_the_bound(truthful: TruthfulServer) -> None:
    """Two calls in a row; one of few tokens neither counts nor stands between."""
    lines: list[str] = []
    engine, truthful.off = checked(truthful, lines), 0.3
    for step in (1, 2):
        generate(engine, step)
    (line,) = [line for line in lines if "another policy" in line]
    assert f"the server at {truthful.url} samples from another policy than the trainer's" in line and "0.0499" in line
    for step, off in enumerate((1.2, 0.0, 1.2)):
        truthful.off = off
        generate(engine, step)
    generate(engine, 4, count=1)
    with pytest.raises(
        ServerError,
        match=r"KL of 1\.12 nats a token.*in 2 calls running.*max_divergence=0\.5; it has the run's weights, so look",
    ):
        generate(engine, 5)


def test_an_excess_is_checked_again_at_once(truthful: TruthfulServer) -> None:
    """At another temperature than 1 only some calls are compared, and else the second might never come."""
    engine, truthful.off = checked(truthful, [], temperature=0.7), 2.0
    generate(engine, 1)
    with pytest.raises(ServerError, match="in 2 calls running"):
        generate(engine, 2)


@pytest.mark.parametrize("setting", [{"repetition_penalty": 1.1}, {"min_new_tokens": 1}], ids=str)
def test_no_run_ends_for_what_its_own_settings_may_do_to_log_probabilities(
    truthful: TruthfulServer, setting: dict[str, Any]
) -> None:
    lines: list[str] = []
    engine, truthful.off = checked(truthful, lines, **setting), 1.2
    for step in range(3):
        generate(engine, step)
    (line,) = [line for line in lines if "other weights" in line]
    assert "may sample from other weights than the trainer's" in line
    assert f"or it reports log-probabilities behind rollout.{next(iter(setting))}, which this run sets" in line
    assert "KL of 1.12 nats a token" in line and "not stopped" in line
    assert reported(engine)[DIVERGENCE] > 1.0


@pytest.mark.parametrize("setting,scored_again", [({}, 2), ({"top_k": 5}, 1)], ids=str)
def test_scoring_again_serves_a_stop_alone(setting: dict[str, Any], scored_again: int) -> None:
    """At temperature 0.7; where the run is not stopped anyway, nothing has to be confirmed."""
    settings = RolloutSettings.model_validate({"temperature": 0.7, "mismatch_every": 0} | setting)
    check = DivergenceCheck("http://there/v1", "vllm", settings, lambda topic, line: None)
    ours, calls = torch.full((100,), -1.0), []

    def unscaled() -> list[torch.Tensor]:
        calls.append(1)
        return [ours]

    check.compare([(-3.0,) * 100], [ours], unscaled, 0.7, 1)
    with nullcontext() if setting else pytest.raises(ServerError, match="in 2 calls running"):
        check.compare([(-3.0,) * 100], [ours], unscaled, 0.7, 2)
    assert len(calls) == scored_again


def test_a_server_that_says_no_log_probabilities_is_named_once(truthful: TruthfulServer, server: OddServer) -> None:
    """Not one that is not asked for them."""
    lines: list[str] = []
    engine, truthful.says = checked(truthful, lines), False
    for step in range(2):
        generate(engine, step, count=2)
    (line,) = [line for line in lines if "log-probabilities" in line]
    assert f"the server at {truthful.url} (vllm) was asked for log-probabilities and gave none" in line
    assert DIVERGENCE not in reported(engine)
    lines.clear()
    owned_by(server, "someone")
    server.exact = False
    generate(server_engine(server, lines), 1, count=2)
    assert not any("log-probabilities" in line for line in lines)
