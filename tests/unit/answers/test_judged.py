"""Graders agree with people on every answer on which people agree, and call no wrong answer right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vlm_pg.rewards import Response, Rewarder, RewardSettings
from vlm_pg.rewards.settings import CheckerSettings
from vlm_pg.types import ANSWER_KINDS, Sample

JUDGED = Path(__file__).parent / "judged"
FILES = {"by_class.jsonl": 400, "second_look.jsonl": 400, "independent.jsonl": 1400, "confusable.jsonl": 500}
# Judged "0 for a gold answer of 0 is right"; a relative error to 0 is undefined, and such a sample has no value at all,
# so that the valued rollouts of a group are no biased choice.
NO_VALUE = {("regression", "0", "0")}


@pytest.fixture(scope="module")
def rewarder() -> Iterator[Rewarder]:
    with Rewarder(RewardSettings(checker=CheckerSettings(workers=1, timeout_seconds=60.0))) as opened:
        yield opened


def response_of(line: dict[str, Any]) -> Response:
    sample = Sample(
        "1",
        line.get("question", "Which?"),
        (),
        tuple(line.get("options", ())),
        line["gold"],
        line["kind"],
        source="judged",
        category="judged",
    )
    return Response(sample, line.get("response", f"<think>x</think><answer>{line.get('answer')}</answer>"))


@pytest.mark.parametrize(("file", "fewest"), FILES.items())
def test_graders_agree_with_people(rewarder: Rewarder, file: str, fewest: int) -> None:
    lines = [json.loads(line) for line in (JUDGED / file).read_text(encoding="utf-8").splitlines()]
    assert len(lines) >= fewest
    assert {line["kind"] for line in lines} <= set(ANSWER_KINDS)
    found = [reward.parts["accuracy"] for reward in rewarder.score([response_of(line) for line in lines])]
    others = []
    for line, accuracy in zip(lines, found, strict=True):
        wanted = None if (line["kind"], line["gold"], line.get("answer")) in NO_VALUE else line["accuracy"]
        same = accuracy == wanted or (None not in (accuracy, wanted) and accuracy == pytest.approx(wanted, abs=0.005))
        if line["sure"] and not same:
            others.append((line["kind"], line["gold"], line.get("response", line.get("answer")), wanted, accuracy))
    assert not others
