"""Every answer kind reads its gold answer in the spellings of models, and no wrong neighbour of it earns as much."""

from __future__ import annotations

import pytest

from tests.support.answer_pairs import Pair, pairs
from tests.unit.answers.helpers import make_sample
from vlm_pg.answers import mathematics
from vlm_pg.answers.choices import named_letters
from vlm_pg.answers.grading import CHECKERS
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.types import ANSWER_KINDS, AnswerKind

SETTINGS = RewardSettings()


@pytest.fixture(scope="module", autouse=True)
def prepared() -> None:
    """As in a checking process."""
    mathematics.prepare()


@pytest.mark.parametrize("kind", ANSWER_KINDS)
def test_right_answers_earn_all_and_wrong_neighbours_what_the_formula_says(kind: AnswerKind) -> None:
    generated = list(pairs(kind, seed=0, num_questions=20, wrappings_of_an_answer=1))
    assert len(generated) >= 100
    assert not list(filter(None, map(fault, generated)))


@pytest.mark.parametrize(
    ("gold", "answer", "is_same"),
    [
        ("$40", "€40", False),
        ("€40", "$40", False),
        ("$40", "\\$40", True),
        ("\\boxed{$40}", "USD 40", True),
        ("$40", "40", True),
        ("40 dollars", "It costs $40.", True),
        ("USD 40", "€40", False),
        ("40 cents", "$0.40", True),
        ("40¢", "$40", False),
        ("HK$40", "US$40", False),
        ("HK$40", "$40", True),
        ("¥40", "40 yen", True),
        ("¥40", "₹40", False),
        ("40元", "40美元", False),
        ("40元", "¥40", True),
        ("$5 and $7", "€5 and €7", False),
        ("3R^2", "3r^2", True),
        ("MV", "mV", False),
        ("[5, 3)", "[7, 2)", False),
        ("\\emptyset", "[7, 2)", False),
        ("\\emptyset", "empty set", True),
    ],
)
def test_amounts_and_variables(gold: str, answer: str, is_same: bool) -> None:
    assert mathematics.compare(gold, answer)[0] == is_same


@pytest.mark.parametrize(
    ("options", "answer", "letter"),
    [
        ("$5 | 5% | €5", "€5", "C"),
        ("$5 | €7", "5", "A"),
        ("$5 | €7", "€5", ""),
        ("$5 | 5", "$5", "A"),
        ("$5 | 5", "5", "B"),
        ("5 | 5!", "5!", "B"),
        ("10 | 20", "10%", ""),
        ("Co | CO", "CO", "B"),
        ("Co | CO", "Co", "A"),
        ("Co | Cu", "CO", ""),
        ("CO2 | H2O", "co2", "A"),
        ("\\Delta | x", "\\delta", ""),
        ("$x$ | $X$", "x", "A"),
        ("Red | blue", "RED", "A"),
    ],
)
def test_an_option_by_its_text(options: str, answer: str, letter: str) -> None:
    assert named_letters(answer, options.split(" | ")) == set(letter)


@pytest.mark.parametrize(
    ("gold", "answer", "is_same"),
    [
        ("New York", "NEW YORK", True),
        ("The City of Rome", "the city Of rome", True),
        ("NO", "No", True),
        ("CO2", "co2", True),
        ("Gate B12", "gate b12", True),
        ("A", "a", True),
        ("CO2", "Co2", False),
        ("HF", "Hf", False),
        ("\\Delta", "\\delta", False),
        ("Δ", "δ", False),
        ("ΑΘΗΝΑ", "Αθηνα", True),
        ("2x+Y", "2X+y", False),
        ("5 m", "5 M", False),
        ("Straße", "STRASSE", True),
    ],
)
def test_capitals_count_in_symbols_only(gold: str, answer: str, is_same: bool) -> None:
    for one, other in ((gold, answer), (answer, gold)):
        assert CHECKERS["exact"](one, make_sample("exact", other), SETTINGS).value == is_same
    assert CHECKERS["exact"]("X", make_sample("exact", "$x$"), SETTINGS).value == 0.0


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
