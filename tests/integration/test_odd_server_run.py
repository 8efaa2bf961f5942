"""Whole runs against a server that misbehaves: what fits trains, what never fits is recorded, finished steps stay."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.misbehaviours import all_misbehaviours, message, text, whole, wire, with_entries
from tests.support.odd_server import Misbehave, OddServer, Reply
from tests.support.runs import read_lines
from tests.support.short_run import STEPS, short_run, train_here
from vlm_pg.rollout.server import client, generator
from vlm_pg.training.checkpoints import find_checkpoints

pytestmark = pytest.mark.matrix

KEY = "sk-0123456789abcdefghij"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[OddServer]:
    monkeypatch.setattr("vlm_pg.http.client.FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(client, "PROBE_EVERY_SECONDS", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server = OddServer()
    yield server
    server.stop()


@pytest.fixture
def config(server: OddServer, tmp_path: Path) -> Path:
    settings = {"url": server.url, "retries": 2, "wait_seconds": 0.0, "timeout_seconds": 30.0}
    settings |= {"max_divergence": None, "weights": "keep"}
    return short_run(
        tmp_path,
        rollout={"engine": "server", "num_generations": 4, "max_new_tokens": 16, "server": settings},
        training={"checkpoint_every": 0},
        observe={"rollouts_per_step": 9},
    )


def steps_saved(config: Path) -> list[int]:
    return [step for step, _ in find_checkpoints(config.parent / "run" / "checkpoints")]


def test_a_run_goes_on_over_what_does_not_fit(server: OddServer, config: Path) -> None:
    rng = random.Random(1)
    quick = [i for i in all_misbehaviours() if i.ends == "again" and i.exact and i.name not in ("a drip", "too late")]

    def next_reply(number: int) -> Misbehave | None:
        return rng.choice(quick).change if number % 3 == 0 else None

    server.next_reply = next_reply
    assert train_here(config).code == 0
    lines = read_lines(config.parent / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert sum(line["rollouts_asked_again"] for line in lines) > 0
    assert all(line["server_divergence"] >= 0 for line in lines)
    responses = {record["response"] for record in read_lines(config.parent / "run" / "rollouts.jsonl")}
    assert len(responses) > 10


def test_evaluation_between_steps_measures_the_weights_that_are_trained(server: OddServer, config: Path) -> None:
    """And says so: the server samples rollouts alone."""
    records = config.parent / "records.json"
    ended = train_here(config, f"data.eval.held={records}", "eval.every=1", "eval.limit=2")
    assert ended.code == 0, ended.printed
    assert ended.printed.count("evaluation before, between and after steps samples in this process") == 1
    assert server.requests == STEPS * 2  # questions a step
    assert (config.parent / "run" / "eval_held_before.jsonl").is_file()


def test_a_question_that_never_fits_is_recorded_and_the_others_train(server: OddServer, config: Path) -> None:
    def unfit(reply: Reply) -> None:
        if "3 + 3" in reply.asked["messages"][-1]["content"][-1]["text"]:
            reply.value["choices"][0]["message"]["content"] = None

    server.next_reply = lambda number: unfit
    ended = train_here(config)
    assert ended.code == 0, ended.printed
    run = config.parent / "run"
    (fault,) = read_lines(run / "bad_samples.jsonl")
    assert (fault["sample_id"], fault["reason"]) == ("3", "server_answer") and "message.content" in fault["message"]
    assert min(line["groups"] for line in read_lines(run / "metrics.jsonl")) == 1
    assert not any(record["sample_id"] == "3" for record in read_lines(run / "rollouts.jsonl"))


@pytest.mark.parametrize("value", [None, {"choices": [None]}])
def test_a_server_that_breaks_loses_no_step(
    server: OddServer, config: Path, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As many questions as one of these short steps has.
    monkeypatch.setattr(generator, "MOST_IN_A_ROW", 2)

    server.next_reply = lambda number: whole(value) if number >= 2 * (STEPS - 1) else None
    ended = train_here(config)
    assert ended.code == 2 and server.url in ended.printed and "Traceback" not in ended.printed
    assert "the checkpoint of step 2 is written" in ended.printed and steps_saved(config) == [2]
    server.next_reply = lambda number: None
    ended = train_here(config)
    assert ended.code == 0 and "resuming after step 2" in ended.printed and steps_saved(config) == [2, 3]


def hostile_reply(rng: random.Random) -> Misbehave:
    """Strings of a server's own anywhere: halves of characters, controls, its caller's key."""
    odd = rng.choice((KEY, "\ud800", "\udfff" + KEY, "\x00\x1b[2J", "a" * 5000))
    return rng.choice(
        (
            text(lambda given: given + odd),
            with_entries(finish_reason=odd),
            with_entries(logprobs={"content": [{"token": odd, "logprob": rng.choice((float("nan"), 10**400))}]}),
            message(role=odd),
            wire(status=500, body=odd.encode("utf-8", "surrogatepass")),
            whole({"error": {"message": odd}}),
            whole({odd: odd}),
        )
    )


def test_no_string_of_a_server_ends_in_a_traceback_or_shows_the_key(
    server: OddServer, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server.exact, server.models = False, {"data": [{"id": f"tiny-{KEY}", "owned_by": "vllm"}]}
    times: Counter[str] = Counter()

    def twice_hostile(reply: Reply) -> None:
        """The first two replies to every question, and all to one."""
        question = reply.asked["messages"][-1]["content"][-1]["text"]
        times[question] += 1
        if times[question] <= 2 or "3 + 3" in question:
            hostile_reply(random.Random(f"{question} {times[question]}"))(reply)

    server.next_reply = lambda number: twice_hostile
    ended = train_here(config)
    assert ended.code == 0, ended.printed
    run = config.parent / "run"
    (fault,) = read_lines(run / "bad_samples.jsonl")
    assert fault["sample_id"] == "3" and read_lines(run / "rollouts.jsonl")
    assert KEY not in ended.printed
    assert [path for path in run.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()] == []
    server.models = {"data": [{"id": f"tiny-{KEY}\x1b"}, {"id": "\ud800"}]}
    ended = train_here(config, f"run.dir={config.parent / 'other'}", "rollout.server.model=other")
    assert ended.code == 2 and "It lists: tiny-[key]" in ended.printed and KEY not in ended.printed


def run_of_single_questions(server: OddServer, folder: Path, **sections: Any) -> Path:
    """Without retries a request is a question."""
    settings = {"url": server.url, "retries": 0, "wait_seconds": 0.0, "max_divergence": None, "weights": "keep"}
    rollout = {"engine": "server", "num_generations": 4, "max_new_tokens": 16, "server": settings}
    training = {"prompts_per_step": 1, "checkpoint_every": 0}
    return short_run(folder, rollout=rollout, training=training, **sections)


def unfit(reply: Reply) -> None:
    reply.value["choices"][0] |= {"token_ids": []}


def all_alike(reply: Reply) -> None:
    """A group without spread."""
    first = reply.value["choices"][0]
    reply.value["choices"] = [first | {"index": index} for index in range(len(reply.value["choices"]))]


def test_a_step_of_one_question_goes_without_it(server: OddServer, tmp_path: Path) -> None:
    config = run_of_single_questions(server, tmp_path)
    server.next_reply = lambda number: unfit if number == 1 else None
    ended = train_here(config)
    assert ended.code == 0, ended.printed
    assert "step 2: no question could be used, so there was no update" in ended.printed
    run = config.parent / "run"
    assert [line["groups"] for line in read_lines(run / "metrics.jsonl")] == [1, 0, 1]
    (fault,) = read_lines(run / "bad_samples.jsonl")
    assert fault["reason"] == "server_answer" and server.url in fault["message"]


def test_a_round_that_replaces_one_question_goes_without_it(server: OddServer, tmp_path: Path) -> None:
    config = run_of_single_questions(server, tmp_path, algorithm={"resample_rounds": 1})
    server.next_reply = lambda number: {0: all_alike, 1: unfit}.get(number)
    ended = train_here(config)
    assert ended.code == 0, ended.printed
    run = config.parent / "run"
    assert len(read_lines(run / "bad_samples.jsonl")) == 1
    lines = read_lines(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    # The first step asked two: one had no spread, the one in its place no answer. No other step lacked its question.
    assert [line["questions"] for line in lines] == [1] * STEPS
    assert [line["resampled_groups"] for line in lines] == [0] * STEPS
    assert [line["unfilled_groups"] for line in lines] == [1] + [0] * (STEPS - 1)


def test_too_large_a_share_of_such_questions_ends_the_run(server: OddServer, tmp_path: Path) -> None:
    config = run_of_single_questions(server, tmp_path, data={"max_bad_share": 0.4, "min_seen_for_bad_share": 2})
    server.next_reply = lambda number: unfit if number == 1 else None
    ended = train_here(config)
    assert ended.code == 2 and "1 of 2 samples could not be used (server_answer: 1)" in ended.printed
