"""Outputs that hold the gold answer and do not give it: readers give them nothing, and what is near them its due."""

from __future__ import annotations

import pytest

from vlm_pg.eval.reading import WholeReader
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.types import AnswerKind, Sample

COLOURS = ("A. red", "B. blue", "C. green", "D. black")
# (kind, question, options, gold, output, score), graded by hand
TABLE: tuple[tuple[AnswerKind, str, tuple[str, ...], str, str, float], ...] = (
    ("multiple_choice", "Which colour?", COLOURS, "C", "C？不，是D。", 0),
    ("multiple_choice", "Which colour?", COLOURS, "C", "C?不,是D", 0),
    ("multiple_choice", "Which colour?", COLOURS, "C", "答案是C，不是D", 1),
    ("yes_no", "Does he open the door?", (), "yes", "It would be wrong to say yes.", 0),
    ("yes_no", "Does he open the door?", (), "yes", "Yes, but he does not open it.", 0),
    ("yes_no", "Does he open the door?", (), "yes", "Yes, but he does not go through.", 1),
    ("exact", "What colour is the car at the end?", (), "red", "The car was red, but it is blue now.", 0),
    ("exact", "What colour is the car at the end?", (), "red", "The car is red.", 1),
    ("mathematics", "What is x?", (), "5", "$2x = 5$", 0),
    ("mathematics", "What is x?", (), "5", "So x^2=5.", 0),
    ("mathematics", "What is x?", (), "5", "\\boxed{2x = 5}", 0),
    ("mathematics", "What is $2x$?", (), "5", "$2x = 5$", 1),
    ("mathematics", "What is x?", (), "5", "$x = 5$", 1),
    ("mathematics", "What is the area?", (), "10", "$A = 2 \\cdot 5 = 10$", 1),
    ("numerical", "How wide is the door, in cm?", (), "180", "It is wider than 180 cm.", 0),
    ("numerical", "How wide is the door, in cm?", (), "180", "It is 180 cm wide.", 1),
)


@pytest.mark.parametrize(("kind", "question", "options", "gold", "output", "score"), TABLE)
def test_what_is_not_said_earns_nothing(
    kind: AnswerKind, question: str, options: tuple[str, ...], gold: str, output: str, score: float
) -> None:
    with WholeReader(RewardSettings(), print) as reader:
        sample = Sample("1", question, (), options, gold, kind, "s", "c")
        assert (reader.read(sample, output, False).score or 0.0) == score
