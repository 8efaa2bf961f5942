"""A question without a fit answer that is alone in its round: recorded, and left to data.max_bad_share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.odd_server import OddServer, Reply
from tests.support.runs import read_lines
from tests.support.short_run import STEPS, short_run, train_here
from vlm_pg.rollout.server import client


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[OddServer]:
    monkeypatch.setattr("vlm_pg.http.client.FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(client, "PROBE_EVERY_SECONDS", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server = OddServer()
    yield server
    server.stop()


def run_of_single_questions(server: OddServer, folder: Path, **sections: Any) -> Path:
    """Without retries a request is a question."""
    settings = {"url": server.url, "retries": 0, "wait_seconds": 0.0, "max_divergence": None}
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
