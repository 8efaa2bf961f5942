"""Short texts with a slash, which stands between two answers or belongs to one; captions, which have no value."""

from __future__ import annotations

import pytest

from vlm_pg.eval.reading import WholeReader
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.types import Sample

read_output = WholeReader(RewardSettings()).read


def sample(gold: str, question: str = "Which is it?", **details: str) -> Sample:
    return Sample("1", question, (), (), gold, "free_form" if details else "exact", "mmvu", "Art", details=details)


@pytest.mark.parametrize(
    ("gold", "output", "score"),
    [
        ("84 g/mol", "84 g/mol", 1),
        ("84 g/mol", "**84 g/mol**", 1),
        ("84 g/mol", "The molar mass is 84 g/mol.", 1),
        ("84 g/mol", "48 g/mol", 0),
        ("84 g/mol", "The molar mass is 48 g/mol.", 0),
        ("84 g/mol", "84 g", 0),
        ("84 g/mol", "84 g/mol or 48 g/mol", 0),
        ("84 g/mol", "84/48 g/mol", 0),
        ("3/4 cup", "The recipe uses 3/4 cup.", 1),
        ("3/4 cup", "3 cup", 0),
        ("acid/base titration", "acid/base titration", 1),
        ("Dolly zoom", "dolly zoom", 1),
        # Two answers.
        ("Dolly zoom", "dolly zoom/pan", 0),
    ],
)
def test_a_slash_is_part_of_answers_that_have_one(gold: str, output: str, score: int) -> None:
    assert read_output(sample(gold), output, False).score == score


def test_what_is_said_of_a_quantity_has_its_whole_unit() -> None:
    assert read_output(sample("84 g/mol"), "The molar mass is 48 g/mol.", False).answer == "48 g/mol"
    assert read_output(sample("3/4 cup"), "The recipe uses 1/4 cup.", False).answer == "1/4 cup"


def test_a_caption_that_a_judge_is_asked_about_has_no_value() -> None:
    asked = sample("A. dunking", "Generate a video caption.", mc_question="What is done?", mc_answer="A. dunking")
    reading = read_output(asked, "A. dunking", False)
    assert (reading.answer, reading.score) == (None, None) and "judge" in reading.note
