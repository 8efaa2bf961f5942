"""Outputs that do not say the gold answer, though its words stand in them: none may be called right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from vlm_pg.eval.reading import WholeReader
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.types import AnswerKind, Sample

OPTIONS = ("A. He picks up the phone", "B. He opens the window", "C. He sits on the sofa", "D. He leaves the room")
READS = "What does the man do after he reads the letter?"
OPENS = "Does the man open the window?"
PEOPLE = "How many people are in the kitchen?"
CHANGE = "By how many degrees does the temperature change?"
VOTES = "What percentage of voters chose Kim?"
SUM = "What is $a+b$?"
CAR = "What colour is the car?"
WHEN = "When does the man open the window?"
# kind, question, gold answer, details, outputs
TABLE: list[tuple[AnswerKind, str, str, dict[str, Any], tuple[str, ...]]] = [
    (
        "multiple_choice",
        READS,
        "B",
        {},
        (
            "He opens the door.",
            "He closes the window.",
            "He tries to open the window but fails.",
            "He is about to open the window when the phone rings, so he picks it up.",
            "He wants to open the window, but he picks up the phone.",
            "He doesn't open the window.",
            "The woman opens the window.",
            "The window is opened by the woman.",
            "Someone else opens the window.",
            "He asks her to open the window.",
            "He had opened the window before he read the letter.",
            "Before reading the letter, he opens the window.",
            "After opening the window, he reads the letter.",
            "He could open the window.",
            "He refuses to open the window.",
            "He forgets to open the window.",
            "I doubt that he opens the window.",
            "It is unclear whether he opens the window.",
            "B was my first guess; it's actually C.",
            "B is what the question wants us to think, but the right one is C.",
            "Bob picks up the phone.",
            "B-roll footage shows him leaving the room.",
            "Plan B is to leave the room.",
            "The answer is anything except B.",
            "(A) no (B) no (C) yes (D) no",
            "B 30%, C 60%",
            "选项B的描述与视频不符,选C",
            "除了B都对",
            "B看起来正确,但实际上是C",
            "我原本以为是B,后来发现是D",
            "答案在A和B之间",
        ),
    ),
    (
        "multiple_choice",
        READS,
        "A",
        {},
        (
            "A man reads a letter and leaves.",
            "视频中有A和B两个人",
            "在A处",
            "Type A personality",
            "A: no. B: no. C: yes.",
            "A. He picks up the phone is wrong.",
            "A. He picks up the phone: wrong",
            "A. He picks up the phone (incorrect)",
            "A. He picks up the phone? No.",
            "A. The first one is wrong.",
            "A. ist falsch",
            "A. 是错误的",
        ),
    ),
    (
        "yes_no",
        OPENS,
        "yes",
        {},
        (
            "He tries to open the window but fails.",
            "The woman opens the window.",
            "He closes the window.",
            "He refuses to open the window.",
            "If he opens the window, it gets cold.",
            "Yes is not the answer.",
            "The answer is not yes.",
            "It is not true that the man opens the window.",
            "It's false that the man opens the window.",
            "Nobody opens the window.",
            "The man opens the window? No.",
            "The man is unable to open the window.",
        ),
    ),
    (
        "yes_no",
        OPENS,
        "no",
        {},
        (
            "No doubt, he opens the window.",
            "No, wait, he does open it. Yes.",
            "Not only does the man open the window, he also closes it.",
            "It is not true that he does not open the window.",
        ),
    ),
    (
        "numerical",
        PEOPLE,
        "3",
        {},
        (
            "There are 3 people in the garden.",
            "3 of the 5 people are in the garden.",
            "There are fewer than 3 people.",
            "3-4",
            "In frame 3 there are several people.",
            "3 more people than in the hall.",
            "3 times as many as in the hall",
            "3%",
            "at 3 o'clock",
            "There are 3 of them in the garden.",
            "Some wear hats. There are 3 of them.",
            "There were 3 people, but two left, so there is one.",
            "3 dogs and 2 people",
            "If 3 more came, there would be 5.",
            "There aren't 3 people in the kitchen.",
        ),
    ),
    (
        "numerical",
        VOTES,
        "40",
        {"unit": "percent"},
        ("40% did not choose Kim.", "Kim was chosen by 40 people.", "More than 40%", "40% of the voters were women."),
    ),
    (
        "mathematics",
        SUM,
        "7",
        {},
        (
            "$a = 7$",
            "$a = 3$, $b = 7$",
            "$a+b \\neq 7$",
            "$a + b > 7$",
            "$a + b = 7$ or $8$",
            "$a - b = 7$",
            "$2(a+b) = 7$",
            "\\boxed{7} is wrong",
            "Let $a = 3$, $b = 7$.",
            "$a+b=7$ would imply $a<0$, a contradiction.",
            "If $a + b = 7$ then ...",
        ),
    ),
    (
        "exact",
        CAR,
        "red",
        {},
        (
            "The car is not red.",
            "The truck is red.",
            "The car is red and white.",
            "dark red",
            "The car is either red or blue.",
            "It was red before it was painted blue.",
            "blue, not red",
            "The car next to the red one is blue.",
            "It is not blue but not red either.",
            "The car looks red but is actually orange.",
        ),
    ),
    (
        "time_span",
        WHEN,
        "[5.0, 10.0]",
        {},
        (
            "He closes the window from 5 to 10 seconds.",
            "Not from 5 to 10 seconds.",
            "He opens the window before 5 seconds and leaves after 10 seconds.",
            "5 to 10 frames",
            "It is 5 to 10 minutes long.",
        ),
    ),
]
EVERY = [(*row[:4], output) for row in TABLE for output in row[4]]


@pytest.fixture(scope="module")
def reader() -> Iterator[WholeReader]:
    with WholeReader(RewardSettings()) as opened:
        yield opened


@pytest.mark.parametrize("kind,question,gold,details,output", EVERY, ids=[f"{one[0]}-{one[4][:60]}" for one in EVERY])
def test_what_does_not_say_the_gold_answer_is_not_right(
    reader: WholeReader, kind: AnswerKind, question: str, gold: str, details: dict[str, Any], output: str
) -> None:
    options = OPTIONS if kind == "multiple_choice" else ()
    sample = Sample("1", question, (), options, gold, kind, "s", "c", details=details)
    assert reader.read(sample, output, False).score == 0.0


# What says the gold answer in words that are near to those above.
RIGHT: list[tuple[AnswerKind, str, str, dict[str, Any], str]] = [
    ("multiple_choice", READS, "B", {}, "After reading the letter, he opens the window."),
    ("multiple_choice", READS, "B", {}, "The man opens the window."),
    ("multiple_choice", READS, "B", {}, "A. He picks up the phone is wrong, so B."),
    ("multiple_choice", READS, "B", {}, "A. He picks up the phone is wrong. The answer is B."),
    ("multiple_choice", READS, "B", {}, "A. He picks up the phone is wrong, so it must be B."),
    ("multiple_choice", READS, "B", {}, "B. The others are wrong."),
    ("multiple_choice", READS, "B", {}, "He can be seen opening the window."),
    ("yes_no", OPENS, "yes", {}, "It is true that the man opens the window."),
    ("numerical", PEOPLE, "3", {}, "There are 3 people in the kitchen."),
    ("numerical", PEOPLE, "3", {}, "In the video, there are 3 people."),
    ("numerical", PEOPLE, "3", {}, "There are 3 of them."),
    ("numerical", CHANGE, "-10", {}, "It changes by -10 degrees."),
    ("numerical", PEOPLE, "3", {}, "There are 3 people in the room."),
    ("numerical", PEOPLE, "3", {}, "In the evening, 2 of the 5 leave, so 3 people are left."),
    ("mathematics", SUM, "7", {}, "$a = 3$, $b = 4$, so $a + b = 7$."),
    ("mathematics", SUM, "7", {}, "If you add them you get $7$."),
    ("mathematics", SUM, "7", {}, "If we substitute $a = 3$ and $b = 4$, then $a + b = 7$."),
    ("mathematics", SUM, "7", {}, "$b + a = 7$"),
    ("exact", CAR, "red", {}, "It is red."),
    ("exact", CAR, "red", {}, "The car is red."),
    ("time_span", WHEN, "[5.0, 10.0]", {}, "The man opens the window from 5 to 10 seconds."),
]


@pytest.mark.parametrize("kind,question,gold,details,output", RIGHT, ids=[f"{one[0]}-{one[4][:60]}" for one in RIGHT])
def test_what_says_it_is_right(
    reader: WholeReader, kind: AnswerKind, question: str, gold: str, details: dict[str, Any], output: str
) -> None:
    options = OPTIONS if kind == "multiple_choice" else ()
    sample = Sample("1", question, (), options, gold, kind, "s", "c", details=details)
    assert reader.read(sample, output, False).score == 1.0
