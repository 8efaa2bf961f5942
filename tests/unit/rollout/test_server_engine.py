"""The server engine against a small server of our own that answers, fails, lies and dies on demand."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
import pytest
import torch

from tests.support.groups import tiny_policy
from tests.support.odd_server import OddServer, Reply
from tests.unit.rollout.test_server_misbehaviours import recorded_or_raised
from vlm_pg.distributed import SINGLE_RANK
from vlm_pg.errors import ConfigError, SampleError, ServerError
from vlm_pg.models.policy import Policy
from vlm_pg.observe.console import Console
from vlm_pg.observe.timeline import Timeline
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.prompts.settings import PromptSettings
from vlm_pg.rollout.sampling import rollout_key
from vlm_pg.rollout.server import client
from vlm_pg.rollout.server.dialects import Kind
from vlm_pg.rollout.server.engine import ServerEngine
from vlm_pg.rollout.server.messages import ChatMessages
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.threads import CoreWatch
from vlm_pg.training.stop import StopRequest
from vlm_pg.training.trainer import Progress, StepLogs, Trainer
from vlm_pg.types import DecodedMedia, MediaRef, Prompt, ResponseGroup, Sample

ROOT = Path(__file__).parents[3]
GENERATIONS = 4


class FakeServer(OddServer):
    """Answers "a0", "a1", ... in the order of choices. Attributes say how it behaves; ``asked`` holds the requests."""

    def __init__(self) -> None:
        self.honours_n = True
        self.texts: Callable[[int], str] = lambda index: f"a{index}"
        self.finish_reason = "stop"
        self.fail_first = 0
        self.status = 503
        self.delay_seconds = 0.0
        self.prompt_tokens: int | None = None
        self.asked: list[dict[str, Any]] = []
        super().__init__(exact=False)
        self.models: Any = {"object": "list", "data": [{"id": "tiny", "owned_by": "vllm"}]}

    def load_by_name(self) -> None:
        """Be ``transformers serve``."""
        self.schema = Reply({"paths": {"/load_model": {}, "/v1/chat/completions": {}}}, {})

    def reply(self, body: dict[str, Any]) -> Reply:
        status, value = self.answer(body)
        return Reply(value, body, status)

    def answer(self, body: dict[str, Any]) -> tuple[int, Any]:
        with self._lock:
            self.asked.append(body)
            if self.fail_first:
                self.fail_first -= 1
                return self.status, {"error": {"message": "out of  memory"}}
        time.sleep(self.delay_seconds)
        choices = [
            {
                "index": i,
                "finish_reason": self.finish_reason,
                "message": {"role": "assistant", "content": self.texts(i)},
            }
            for i in range(body.get("n", 1) if self.honours_n else 1)
        ]
        usage = {} if self.prompt_tokens is None else {"prompt_tokens": self.prompt_tokens}
        return 200, {"choices": choices, "usage": usage}


@pytest.fixture
def server(servers: list[OddServer], monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    monkeypatch.setattr(client, "PROBE_EVERY_SECONDS", 0.1)
    servers.append(FakeServer())
    return servers[0]  # type: ignore[return-value]


@lru_cache(maxsize=1)
def policy() -> Policy:
    return tiny_policy()


@lru_cache(maxsize=1)
def questions() -> tuple[tuple[Prompt, ...], ChatMessages]:
    builder = PromptBuilder(policy().processor, PromptSettings(), policy().positions)
    samples = {name: Sample(name, f"Question {name}?", (), (), "1", "numerical", "t", "t") for name in ("x", "y")}
    messages = ChatMessages(policy(), samples)
    return tuple(builder.build(sample, ()) for sample in samples.values()), messages


def make_engine(
    server: FakeServer,
    told: list[str] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    url: str | None = None,
    home: Path = Path("unused"),
    rollout: dict[str, Any] | None = None,
    **server_settings: Any,
) -> ServerEngine:
    settings = RolloutSettings.model_validate(
        {
            "engine": "server",
            "num_generations": GENERATIONS,
            "max_new_tokens": 20,
            "server": {"url": url or server.url, "wait_seconds": 0.0, "retries": 1, **server_settings},
        }
        | (rollout or {})
    )
    lines = [] if told is None else told
    return ServerEngine(policy(), settings, 7, should_stop, questions()[1], home, lines.append)


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
    server: FakeServer, rule: str, frames: int, warned: int
) -> None:
    """vLLM counts by Qwen's rule: it matters to a run by transformers' where a video's time passes its space."""
    server.models = {"data": [{"id": "m", "owned_by": "vllm"}]}
    server.prompt_tokens = None
    counted, prompts, messages = video_questions(rule, frames)
    told: list[str] = []
    settings = RolloutSettings.model_validate(
        {"engine": "server", "num_generations": 2, "max_new_tokens": 20, "server": {"url": server.url}}
    )
    engine = ServerEngine(counted, settings, 7, lambda: False, messages, Path("unused"), told.append)
    for step in range(2):
        engine.generate(prompts, step)
    lines = [line for line in told if "counts rotary positions by the rule qwen, this run by transformers" in line]
    assert len(lines) == warned
    assert all("sample 'x' is sampled at other positions" in li and "Set model.positions=qwen" in li for li in lines)


def test_one_request_brings_a_group(server: FakeServer) -> None:
    engine = make_engine(server)
    prompts, _ = questions()
    groups = engine.generate(prompts, 3)
    assert [[rollout.text for rollout in group] for group in groups] == [["a0", "a1", "a2", "a3"]] * 2
    assert [body["n"] for body in server.asked] == [GENERATIONS] * 2
    assert {body["seed"] for body in server.asked} == {rollout_key(7, 3, name, 0) % 2**53 for name in "xy"}
    assert all(body["model"] == "tiny" and body["top_k"] == -1 for body in server.asked)


def test_rollouts_are_scored_by_the_policy(server: FakeServer) -> None:
    prompts, _ = questions()
    (group, _) = make_engine(server).generate(prompts, 1)
    end = policy().tokenizer.eos_token_id
    for rollout in group:
        expected = [*policy().tokenizer(rollout.text)["input_ids"], end]
        assert rollout.token_ids.tolist() == expected and rollout.finish_reason == "stop"
        with torch.no_grad():
            ((logprobs,),) = policy().logprobs([ResponseGroup(prompts[0], (rollout.token_ids,))])
        torch.testing.assert_close(rollout.rollout_logprobs, logprobs, atol=1e-5, rtol=1e-4)
        assert rollout.sampling_logprobs is None and rollout.entropies is None


def test_a_server_without_n_is_asked_for_each_rollout(server: FakeServer) -> None:
    server.honours_n = False
    told: list[str] = []
    engine = make_engine(server, told)
    prompts, _ = questions()
    assert [len(group) for group in engine.generate(prompts[:1], 1)] == [GENERATIONS]
    assert ["n" in body for body in server.asked] == [True, False, False, False]
    assert len({body["seed"] for body in server.asked}) == GENERATIONS
    engine.generate(prompts[:1], 2)
    assert not any("n" in body for body in server.asked[GENERATIONS:])
    assert len(server.asked) == 2 * GENERATIONS and sum("1 of 4 choices" in line for line in told) == 1


def test_failures_are_retried(server: FakeServer) -> None:
    engine = make_engine(server)
    server.fail_first = 1
    assert len(engine.generate(questions()[0][:1], 1)[0]) == GENERATIONS
    assert len(server.asked) == 2 and server.asked[0] == server.asked[1]


@pytest.mark.parametrize(
    ("behaviour", "requests", "message"),
    [
        ({"fail_first": 99}, 2, r"failed 2 times .* status 503: .*out of memory"),
        ({"fail_first": 99, "status": 422}, 1, r"refused POST .* status 422: .*out of memory"),
        ({"finish_reason": "abort"}, 2, r"failed 2 times at POST /chat/completions.*abort"),
        ({"delay_seconds": 3.0}, 2, r"ReadTimeout.*rollout\.server\.timeout_seconds \(0\.2 now\)"),
    ],
)
def test_what_stops_the_run_is_told_in_the_servers_words(
    server: FakeServer, behaviour: dict[str, Any], requests: int, message: str
) -> None:
    engine = make_engine(server, timeout_seconds=0.2 if "delay_seconds" in behaviour else 600.0)
    for name, value in behaviour.items():
        setattr(server, name, value)
    with pytest.raises(ServerError, match=message):
        engine.generate(questions()[0][:1], 1)
    assert len(server.asked) == requests


def test_an_absence_costs_no_retry(server: FakeServer) -> None:
    engine = make_engine(server, retries=0, wait_seconds=30.0)
    server.fail_first, server.away_gets = 1, 2
    assert len(engine.generate(questions()[0][:1], 1)[0]) == GENERATIONS
    assert len(server.asked) == 2 and server.away_gets == 0


def test_a_request_that_always_takes_the_server_down_is_given_up(server: FakeServer) -> None:
    """The server comes back each time, and is away for longer than allowed in all."""
    engine = make_engine(server, retries=0, wait_seconds=0.5)

    def answer_and_fall(body: dict[str, Any]) -> tuple[int, Any]:
        server.asked.append(body)
        server.away_gets = 2 if len(server.asked) < 20 else 0
        return 503, {}

    server.answer = answer_and_fall  # type: ignore[method-assign]
    with pytest.raises(ServerError, match=r"not answered for 0\.5 s \(status 503\)"):
        engine.generate(questions()[0][:1], 1)
    assert len(server.asked) > 1


def test_a_dead_server_stops_the_run_and_says_how_to_go_on(server: FakeServer) -> None:
    told: list[str] = []
    engine = make_engine(server, told, wait_seconds=1.0)
    server.stop()
    with pytest.raises(ServerError, match=rf"{re.escape(server.url)}: It has not answered for 1 s .*run\.resume=auto"):
        engine.generate(questions()[0], 1)
    assert sum("does not answer" in line and "waiting up to 1 s" in line for line in told) == 1


def test_a_server_that_comes_back_is_waited_for(server: FakeServer) -> None:
    class Told(list[str]):
        def append(self, line: str) -> None:
            super().append(line)
            if "does not answer" in line:
                server.start()

    told = Told()
    engine = make_engine(server, told, wait_seconds=30.0)
    server.stop()
    assert len(engine.generate(questions()[0][:1], 1)[0]) == GENERATIONS
    assert sum("answers again" in line for line in told) == 1


@pytest.mark.parametrize("is_away", [False, True])
def test_a_stop_request_is_heard_while_waiting(server: FakeServer, is_away: bool) -> None:
    asked_to_stop = threading.Event()
    engine = make_engine(server, should_stop=asked_to_stop.is_set, wait_seconds=1000.0)
    server.delay_seconds = 30.0
    if is_away:
        server.stop()
    threading.Timer(0.3, asked_to_stop.set).start()
    with pytest.raises(InterruptedError):
        engine.generate(questions()[0][:1], 1)


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
def test_what_serves_no_such_model_is_refused_at_once(
    server: FakeServer, models: Any, settings: dict[str, Any], message: str
) -> None:
    server.models = server.models if models is None else models
    if "url" in settings:
        settings = {"url": server.url.removesuffix("/v1")}
    with pytest.raises(ServerError, match=message):
        make_engine(server, **settings)


@pytest.mark.parametrize("owner,at_once", [("someone", False), ("vllm", True)])
def test_equal_choices_of_one_request_are_noticed(server: FakeServer, owner: str, at_once: bool) -> None:
    """An unknown server is asked for single rollouts from then on."""
    server.models = {"data": [{"id": "tiny", "owned_by": owner}]}
    server.texts = lambda index: "a b c d e f g h i"
    told: list[str] = []
    engine = make_engine(server, told)
    for step in (1, 2):
        engine.generate(questions()[0][:1], step)
    assert "n" in server.asked[0] and ("n" in server.asked[1]) == at_once
    assert len(server.asked) == (2 if at_once else 1 + GENERATIONS)
    assert sum("are equal" in line for line in told) == (1 if at_once else 2)


def test_short_equal_answers_say_nothing(server: FakeServer) -> None:
    server.texts = lambda index: "a b"
    told: list[str] = []
    make_engine(server, told).generate(questions()[0][:1], 1)
    assert not any("are equal" in line for line in told)


def test_settings_an_unknown_server_may_ignore_are_named(server: FakeServer) -> None:
    server.models = {"data": [{"id": "tiny"}]}
    told: list[str] = []
    make_engine(server, told, rollout={"top_k": 5, "min_p": 0.1})
    assert "may ignore rollout.top_k, rollout.min_p" in told[0]


def test_the_key_is_in_the_header_and_nowhere_else(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", " secret-1\n")
    monkeypatch.setenv("MY_KEY", "secret-2")
    prompts, _ = questions()
    engine = make_engine(server)
    engine.generate(prompts[:1], 1)
    make_engine(server, api_key_variable="MY_KEY").generate(prompts[:1], 1)
    assert server.keys == ["Bearer secret-1", "Bearer secret-2"]
    said = {"error": "x" * (client.SHOWN_CHARACTERS - 30) + "Incorrect key secret-1, again: secret-1"}
    for status in (401, 500, 200):
        monkeypatch.setattr(server, "answer", lambda body, status=status: (status, said))
        said_here = recorded_or_raised(engine, prompts[:1])
        assert "Incorrect" in said_here and "secr" not in said_here
    assert "secret" not in engine.settings.model_dump_json()


@pytest.mark.parametrize("key", ["secret\nX-Other: 1", "secret–1", "secret\x7f"])
def test_a_key_that_no_header_can_hold_is_refused_unseen(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(ConfigError, match="OPENAI_API_KEY holds something other than printable ASCII") as caught:
        make_engine(server)
    assert "secret" not in str(caught.value)


def test_a_named_variable_must_hold_a_key(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(ConfigError, match="MY_KEY, which is empty or not set"):
        make_engine(server, api_key_variable="MY_KEY")


@pytest.mark.parametrize(
    "error", [httpx2.InvalidURL("Bearer k"), httpx2.LocalProtocolError("Bearer k"), UnicodeError("k")]
)
def test_a_request_that_cannot_be_sent_is_not_repeated(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    engine = make_engine(server, retries=9, wait_seconds=1000.0)
    tries: list[str] = []

    async def send(self: Any, request: httpx2.Request, **options: Any) -> None:
        tries.append(str(request.url))
        raise error

    monkeypatch.setattr(httpx2.AsyncClient, "send", send)
    with pytest.raises(ServerError, match="cannot be sent") as caught:
        engine.generate(questions()[0][:1], 1)
    assert len(tries) == 1 and "Bearer" not in str(caught.value) and caught.value.__cause__ is None


@pytest.mark.parametrize("owner", ["vllm", "sglang", "someone"])
def test_a_turn_is_ruled_out_as_media_tokens_are(server: FakeServer, owner: str) -> None:
    """Answers with one are refused, and so would cost another request."""
    server.models = {"data": [{"id": "tiny", "owned_by": owner}]}
    make_engine(server).generate(questions()[0][:1], 1)
    turn = policy().tokenizer.convert_tokens_to_ids("<|im_start|>")
    ruled_out = {str(token): -100 for token in (*policy().media_token_ids, turn)}
    assert server.asked[0]["logit_bias"] == ruled_out and len(ruled_out) == len(policy().media_token_ids) + 1


def test_a_turn_is_ruled_out_at_transformers_serve(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server.load_by_name()
    monkeypatch.setattr(policy().model, "name_or_path", str(ROOT / "assets" / "tiny-qwen2_5-vl"))
    make_engine(server, home=tmp_path).generate(questions()[0][:1], 1)
    suppressed = json.loads(server.asked[0]["generation_config"])["suppress_tokens"]
    assert policy().tokenizer.convert_tokens_to_ids("<|im_start|>") in suppressed
    assert set(policy().media_token_ids) <= set(suppressed)


def test_bodies_are_made_when_their_turn_comes(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, messages = questions()
    engine = make_engine(server, concurrency=1)
    made: list[tuple[int, bool]] = []

    def recorded(prompt: Prompt, kind: Kind) -> list[dict[str, Any]]:
        made.append((len(server.asked), threading.current_thread() is threading.main_thread()))
        return messages(prompt, kind)

    recorded.fields = messages.fields  # type: ignore[attr-defined]
    monkeypatch.setattr(engine._generator, "messages", recorded)
    engine.generate(prompts, 1)
    assert made == [(0, False), (1, False)]


def test_answers_without_choices_are_refused(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(server)
    monkeypatch.setattr(server, "answer", lambda body: (200, {"text": "hello"}))
    assert "gave {'text': 'hello'}" in recorded_or_raised(engine, questions()[0][:1])


def test_a_prompt_of_another_length_is_refused(server: FakeServer) -> None:
    prompts, _ = questions()
    engine = make_engine(server)
    server.prompt_tokens = prompts[0].num_tokens
    engine.generate(prompts[:1], 1)
    server.prompt_tokens += 5
    with pytest.raises(ServerError, match=f"of {server.prompt_tokens} tokens, .* scores {prompts[0].num_tokens}"):
        engine.generate(prompts[:1], 1)


def test_no_address_is_a_config_error(server: FakeServer) -> None:
    settings = RolloutSettings(engine="server")
    with pytest.raises(ConfigError, match=r"rollout\.server\.url is not set"):
        ServerEngine(policy(), settings, 0, lambda: False, questions()[1], Path("unused"), print)


def test_the_lag_of_weights_nobody_knows_is_not_reported(server: FakeServer) -> None:
    told: list[str] = []
    assert make_engine(server, told).lag_steps is None
    assert "weights it was started with" in told[0]


def test_weights_that_were_trained_since_the_last_checkpoint_lag(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server.load_by_name()
    checkpoint = ROOT / "assets" / "tiny-qwen2_5-vl"
    monkeypatch.setattr(policy().model, "name_or_path", str(checkpoint))
    engine = make_engine(server, home=tmp_path)
    assert engine.lag_steps == 0
    monkeypatch.setattr(policy(), "_weights_version", policy().weights_version + 2)
    engine.generate(questions()[0][:1], 1)
    assert engine.lag_steps == 2 and "n" not in server.asked[0]
    assert Path(server.asked[0]["model"]).parent == tmp_path
    engine.use_checkpoint(checkpoint)
    assert engine.lag_steps == 0


@pytest.mark.parametrize("error", [ServerError("gone"), SampleError("video_for_server", "another rate")])
def test_what_ends_a_run_in_its_rollouts_leaves_a_checkpoint(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Of the loop alone: without a model's weights and a run's folder."""
    trainer = object.__new__(Trainer)
    trainer.config = SimpleNamespace(training=SimpleNamespace(steps=3))  # type: ignore[assignment]
    trainer.policy = SimpleNamespace(device=torch.device("cpu"))  # type: ignore[assignment]
    trainer.console, trainer.stop, trainer.progress = Console(enabled=False), StopRequest(SINGLE_RANK), Progress(step=1)
    trainer.engine = SimpleNamespace(ranks=SINGLE_RANK)  # type: ignore[assignment]
    trainer.sampler = SimpleNamespace()  # type: ignore[assignment]
    trainer._cores, trainer._presence, trainer.timeline = CoreWatch(), None, Timeline(SINGLE_RANK, 0)
    saved: list[int] = []

    def fails(step: int) -> None:
        raise error

    monkeypatch.setattr(trainer, "_step", fails)
    monkeypatch.setattr(trainer, "save", lambda: saved.append(trainer.progress.step))
    with pytest.raises(type(error)):
        trainer.run(StepLogs())
    assert saved == [1]
