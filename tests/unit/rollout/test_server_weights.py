"""Whose weights a server has: the same are not warned of, others are, and another model's end the run."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.odd_server import OddServer, Reply
from tests.support.reports import reported
from tests.unit.rollout import test_server_misbehaviours as table
from vlm_pg.errors import ServerError
from vlm_pg.rollout.server.engine import DIVERGENCE, ServerEngine
from vlm_pg.rollout.server.weights import Divergence, WeightsCheck, divergence
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.types import ResponseGroup


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
    groups = engine.generate(table.questions()[0][:20], 1)
    assert sum(len(rollout.token_ids) for group in groups for rollout in group) > 100
    assert reported(engine)[DIVERGENCE] < 1e-6 and not any("other weights" in line for line in told)
    assert DIVERGENCE not in reported(engine)


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
    assert reported(engine)[DIVERGENCE] > 1.0


@pytest.mark.parametrize("setting,scored_again", [({}, 2), ({"top_k": 5}, 1)], ids=str)
def test_scoring_again_serves_a_stop_alone(setting: dict[str, Any], scored_again: int) -> None:
    """At temperature 0.7; where the run is not stopped anyway, nothing has to be confirmed."""
    settings = RolloutSettings.model_validate({"temperature": 0.7, "mismatch_every": 0} | setting)
    check = WeightsCheck("http://there/v1", "vllm", settings, lambda topic, line: None)
    ours, calls = torch.full((100,), -1.0), []

    def unscaled() -> list[torch.Tensor]:
        calls.append(1)
        return [ours]

    check.compare([(-3.0,) * 100], [ours], unscaled, 0.7, 1)
    with nullcontext() if setting else pytest.raises(ServerError, match="in 2 calls running"):
        check.compare([(-3.0,) * 100], [ours], unscaled, 0.7, 2)
    assert len(calls) == scored_again


def test_a_server_that_says_no_log_probabilities_is_named_once(servers: list[OddServer]) -> None:
    told: list[str] = []
    server, engine = truthful(servers, told)
    server.says = False
    for step in range(2):
        engine.generate(table.questions()[0][:2], step)
    (line,) = [line for line in told if "log-probabilities" in line]
    assert f"the server at {server.url} (vllm) was asked for log-probabilities and gave none" in line
    assert "not checked" in line and DIVERGENCE not in reported(engine)


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
    groups = engine.generate(table.questions()[0][:20], 1)
    assert sum(len(rollout.token_ids) for group in groups for rollout in group) > 100
    assert reported(engine)[DIVERGENCE] < 1e-6
