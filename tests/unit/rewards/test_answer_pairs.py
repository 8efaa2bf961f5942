"""Every answer kind reads its gold answer in the spellings of models, and no wrong neighbour of it earns as much."""

from __future__ import annotations

import pytest

from tests.support.answer_pairs import Pair, pairs
from tests.unit.rewards.helpers import make_sample
from vlm_pg.rewards import mathematics
from vlm_pg.rewards.rubric import CHECKERS
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.types import ANSWER_KINDS, AnswerKind

SETTINGS = RewardSettings()


@pytest.fixture(scope="module", autouse=True)
def prepared() -> None:
    """As in a checking process."""
    mathematics.prepare()


@pytest.mark.parametrize("kind", ANSWER_KINDS)
def test_right_answers_earn_all_and_wrong_neighbours_what_the_formula_says(kind: AnswerKind) -> None:
    generated = list(pairs(kind, seed=0, num_questions=16, wrappings_of_an_answer=1))
    assert len(generated) >= 100
    assert not list(filter(None, map(fault, generated)))


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ANSWER_KINDS)
def test_in_all_spellings(kind: AnswerKind) -> None:
    assert not list(filter(None, map(fault, pairs(kind, seed=1, num_questions=60, wrappings_of_an_answer=20))))


def fault(pair: Pair) -> tuple[object, ...] | None:
    """What is wrong with the accuracy of an answer."""
    question = pair.question
    if question.kind == "mathematics":
        accuracy, _ = mathematics.compare(question.gold, pair.answer)
    else:
        sample = make_sample(question.kind, question.gold, question.options)
        accuracy = CHECKERS[question.kind](pair.answer, sample, SETTINGS).value
    if accuracy is not None and (
        accuracy < 1.0 - 1e-9 if pair.accuracy is None else accuracy == pytest.approx(pair.accuracy, abs=1e-9)
    ):
        return None
    return question.kind, question.gold, question.options, pair.answer, pair.accuracy, accuracy
