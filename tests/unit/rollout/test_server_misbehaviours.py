"""Whatever a server sends, it ends as an answer that it sampled, another try, a fault or an error that names it.

The table is generated (``tests/support/misbehaviours.py``); the usual tests hold every tenth of its entries.
"""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.groups import tiny_policy
from tests.support.misbehaviours import Misbehaviour, all_misbehaviours, model_pages
from tests.support.odd_server import Misbehave, OddServer
from tests.support.reports import reported
from vlm_pg.errors import ServerError
from vlm_pg.models.policy import Policy
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.prompts.settings import PromptSettings
from vlm_pg.rollout.server.engine import ASKED_AGAIN, ServerEngine
from vlm_pg.rollout.server.messages import ChatMessages
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.types import Prompt, Rollout, Sample

TABLE = all_misbehaviours()
# Each of these has its own way through the client; the others are alike in tens.
SINGLE = ("charset=", "gzip a thousand", "logprobs ", "empty text beside", "lone surrogate")
SAMPLE = [item for place, item in enumerate(TABLE) if place % 10 == 3 or item.name.startswith(SINGLE[1:])]
SAMPLE += [item for item in TABLE if SINGLE[0] in item.name and item not in SAMPLE]
QUESTIONS = 40
# They would go on for an hour: only a limit of time ends them.
ENDLESS = ("a drip", "too late")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever Retry-After says."""
    monkeypatch.setattr("vlm_pg.http.client.LONGEST_PAUSE_SECONDS", 0.01)


@lru_cache(maxsize=1)
def policy() -> Policy:
    return tiny_policy()


@lru_cache(maxsize=1)
def questions() -> tuple[tuple[Prompt, ...], ChatMessages, dict[str, str]]:
    """Prompts, their messages, and the question text of each sample."""
    builder = PromptBuilder(policy().processor, PromptSettings(), policy().positions)
    samples = {f"q{i}": Sample(f"q{i}", f"Question {i}?", (), (), "1", "numerical", "t", "t") for i in range(QUESTIONS)}
    messages = ChatMessages(policy(), samples)
    texts = {name: builder.question_text(sample) for name, sample in samples.items()}
    return tuple(builder.build(sample, ()) for sample in samples.values()), messages, texts


def begin(servers: list[OddServer], exact: bool, told: list[str] | None = None, **settings: Any) -> ServerEngine:
    servers.append(OddServer(exact))
    rollout = {
        "engine": "server",
        "num_generations": 3,
        "max_new_tokens": 64,
        "server": {
            "url": servers[0].url,
            "wait_seconds": 0.0,
            "retries": 2,
            "timeout_seconds": 60.0,
            "max_answer_mb": 1.0,
            "max_divergence": None,
        }
        | settings,
    }
    tell = [].append if told is None else told.append
    settled = RolloutSettings.model_validate(rollout)
    return ServerEngine(policy(), settled, 7, lambda: False, questions()[1], Path("unused"), tell)


def assert_sampled(server: OddServer, prompts: tuple[Prompt, ...], groups: list[tuple[Rollout, ...]]) -> int:
    """Every response is, token by token, one the server sampled for that question; how many there are."""
    texts = questions()[2]
    rollouts = [(prompt, rollout) for prompt, group in zip(prompts, groups, strict=True) for rollout in group]
    for prompt, rollout in rollouts:
        assert (texts[prompt.sample_id], tuple(rollout.token_ids.tolist())) in server.log
        assert len(rollout.rollout_logprobs) == len(rollout.token_ids)
    return len(rollouts)


def recorded_or_raised(engine: ServerEngine, prompts: tuple[Prompt, ...]) -> str:
    """Why the one question has no answer: recorded where the answer is at fault, raised where the server is."""
    try:
        groups = engine.generate(prompts, 2)
    except ServerError as error:
        return str(error)
    (fault,) = engine.take_faults()
    assert groups == [()] and fault.sample_id == prompts[0].sample_id
    return fault.message


def once_and_always(servers: list[OddServer], item: Misbehaviour) -> None:
    engine = begin(servers, item.exact, timeout_seconds=5.0 if item.name in ENDLESS else 60.0)
    server, prompts = servers[0], questions()[0][:1]
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
    said = recorded_or_raised(engine, prompts)
    assert "127.0.0.1" in said and len(said) < 2000


def test_the_table_is_as_large_as_promised() -> None:
    names = list(map(str, TABLE))
    assert len(names) == len(set(names)) >= 100
    assert {item.ends for item in SAMPLE} == {"again", "harmless", "refused"}


@pytest.mark.parametrize("item", SAMPLE, ids=str)
def test_a_misbehaviour_ends_well(servers: list[OddServer], item: Misbehaviour) -> None:
    once_and_always(servers, item)


@pytest.mark.matrix
@pytest.mark.parametrize("item", TABLE, ids=str)
def test_every_misbehaviour_ends_well(servers: list[OddServer], item: Misbehaviour) -> None:
    once_and_always(servers, item)


@pytest.mark.parametrize("page", model_pages().items(), ids=lambda page: page[0])
def test_what_is_no_list_of_models_is_refused_by_name(servers: list[OddServer], page: tuple[str, Any]) -> None:
    engine = begin(servers, True)
    servers[0].models = page[1]
    with pytest.raises(ServerError, match=r"127\.0\.0\.1"):
        ServerEngine(policy(), engine.settings, 7, lambda: False, questions()[1], Path("unused"), print)


ANSWERS = [300, pytest.param(10_000, marks=pytest.mark.matrix)]


@pytest.mark.parametrize("exact", [True, False], ids=["ids", "texts"])
@pytest.mark.parametrize("count", ANSWERS)
def test_what_is_trained_on_was_sampled(servers: list[OddServer], count: int, exact: bool) -> None:
    """A tenth of all answers is wrong in some way of the table; what never fits is recorded."""
    engine = begin(servers, exact, retries=4)
    server, rng = servers[0], random.Random(3)
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
    assert misbehaved >= 0.07 * server.requests and reported(engine)[ASKED_AGAIN] > 0
    assert trained == 3 * (step * len(prompts) - recorded) > 0.5 * count
