"""Mathematics whose gold answer says what the question says, or leaves a base to it: MATH-500 has both."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vlm_pg.eval.reading import WholeReader
from vlm_pg.eval.reading.mathematics import as_voted
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.types import Sample

ROOT = r"What is $\sqrt{53}$ in simplest radical form?"
TWO = "What is the largest eight-digit base 2 integer? Express your answer in base 10."
EIGHT = "Write $1010_2$ in base 8."
SQUARE = "Factor $x^2+2x+1$."


@pytest.fixture(scope="module")
def whole() -> Iterator[WholeReader]:
    with WholeReader(RewardSettings()) as reader:
        yield reader


@pytest.mark.parametrize(
    ("question", "gold", "output", "score"),
    [
        (ROOT, r"\sqrt{53}", r"53 is a prime, so it is $\boxed{\sqrt{53}}$.", 1),
        (ROOT, r"\sqrt{53}", r"<answer>$\sqrt{ 53 }$</answer>", 1),
        # Said in passing it is no answer.
        (ROOT, r"\sqrt{53}", r"I am to simplify $\sqrt{53}$.", 0),
        # What is to be factored is no factoring of itself.
        (SQUARE, "(x+1)^2", r"\boxed{x^2+2x+1}", 0),
        (SQUARE, "(x+1)^2", r"\boxed{(x+1)^2}", 1),
        (TWO, "255", r"\boxed{255}", 1),
        (TWO, "255", r"\boxed{254}", 0),
        (EIGHT, "12_8", r"\boxed{12}", 1),
        (EIGHT, "12_8", r"\boxed{10}", 0),
        # A sequence called a is no article.
        ("What is $a_{2023}?$", "-1", "So $a_{2023} = -1$.", 1),
        ("What is $a_2$?", "-1", "So $a_2 = 1$.", 0),
    ],
)
def test_the_gold_answer_is_right_and_no_other(
    whole: WholeReader, question: str, gold: str, output: str, score: float
) -> None:
    sample = Sample("1", question, (), (), gold, "mathematics", "math", "math")
    assert whole.read(sample, output, False).score == score


@pytest.mark.parametrize(
    ("answer", "voted"),
    [
        ("025", "25"),
        ("000", "0"),
        ("-0", "0"),
        ("-1.0", "-1"),
        ("3,159", "3159"),
        ("0.50", "0.5"),
        ("$7$", "7"),
        ("1, 234", "1, 234"),
        ("12_8", "12_8"),
        (r"\frac{1}{2}", r"\frac{1}{2}"),
        ("1,23", "1,23"),
    ],
)
def test_numbers_are_counted_alike_however_they_are_spelled(answer: str, voted: str) -> None:
    assert as_voted(answer) == voted
