"""Whole outputs with numbers and formulas: an equal one is right in every setting, a wrong neighbour in none."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from string import ascii_uppercase

import pytest

from vlm_pg.answers.whole import WholeReader
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.types import AnswerKind, Sample

FRAMES = (
    "{}",
    "The answer is {}.",
    r"The answer is \({}\).",
    r"\boxed{{{}}}",
    r"So it is $\boxed{{{}}}$.",
    "<answer>{}</answer>",
    r"\boxed{{\text{{{}}}}}",
    "**{}**",
    "Final answer:\n\n{}",
    "We compare the two sides.\nSo we get {}.",
    "答案是{}。",
    '{{"answer": "{}"}}',
)
UNITS = ("cm", "kg", "m/s", "km/h", "°C", "seconds", "%")


def digit_changed(text: str, rng: random.Random) -> str:
    indices = [index for index, sign in enumerate(text) if sign.isdigit()]
    index = rng.choice(indices)
    others = [digit for digit in "123456789" if digit != text[index]]
    return f"{text[:index]}{rng.choice(others)}{text[index + 1 :]}"


def pair(rng: random.Random) -> tuple[str, str]:
    """A number or formula, and another one that differs from it in its sign, order, unit or a digit."""
    a, b = rng.sample(range(2, 99), 2)
    x, y = rng.sample("xyzuv", 2)
    unit, other_unit = rng.sample(UNITS, 2)
    sign, other_sign = rng.sample("+-", 2)
    relation, other_relation = rng.sample("<>≤≥", 2)
    made = [
        (f"-{a}", f"{a}"),
        (f"{a}", f"-{a}"),
        (f"{a}", f".{a}"),
        (f"0.{a}", f"{a}"),
        (f"{a}.{b}", f"{b}.{a}"),
        (f"{a}/{b}", f"{b}/{a}"),
        (f"{a}:{b}", f"{b}:{a}"),
        (f"({a}, {b})", f"({b}, {a})"),
        (f"({a}, {b})", f"({a}, -{b})"),
        (f"({a}, {b}]", f"[{a}, {b})"),
        (f"{a} {unit}", f"{a} {other_unit}"),
        (f"{a}%", f"${a}"),
        (f"${a}", f"{a}¢"),
        (f"${a}", f"€{a}"),
        (f"{x} {relation} {a}", f"{x} {other_relation} {a}"),
        (f"{x} = {a}", f"{y} = {a}"),
        (f"{y} = {a}{x} {sign} {b}", f"{y} = {a}{x} {other_sign} {b}"),
        (f"{y} = {a}{x} {sign} {b}", f"{y} = {b}{x} {sign} {a}"),
        (f"{a}{x} {sign} {b}{y}", f"{a}{y} {sign} {b}{x}"),
        (f"{x}^{a}", f"{a}^{x}"),
        (f"{x}^{a}", f"{x}_{a}"),
        (f"{x} - {y}", f"{y} - {x}"),
        (f"{a} × 10^5", f"{a} × 10^-5"),
        (rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{b}}}{{{a}}}"),
        (rf"\frac{{{x}+{a}}}{{{b}}}", rf"{x}+\frac{{{a}}}{{{b}}}"),
        (rf"\sqrt{{{a}}}", f"{a}"),
        (f"CO{a}", f"Co{a}"),
        (f"{a} red and {b} blue cups", f"{b} red and {a} blue cups"),
        (f"{a} cups", f"-{a} cups"),
        (f"{a} cups", f"0.{a} cups"),
        (f"{a}:{b} in the afternoon", f"{b}:{a} in the afternoon"),
    ]
    if rng.random() < 0.2:
        text = rng.choice([one for one, _ in made if re.search("[0-9]", one)])
        return text, digit_changed(text, rng)
    return rng.choice(made)


def options_with(text: str, neighbour: str, rng: random.Random) -> tuple[str, ...]:
    """Options that have ``text``, three others of its form, and the neighbour in half of the cases."""
    others = [digit_changed(text, rng) if any(map(str.isdigit, text)) else f"{text} + {number}" for number in range(3)]
    texts = [text, *(one for one in dict.fromkeys(others) if one not in (text, neighbour))]
    if rng.random() < 0.5:
        texts.append(neighbour)
    rng.shuffle(texts)
    return tuple(f"{ascii_uppercase[index]}. {one}" for index, one in enumerate(texts))


def sample_with(options: tuple[str, ...], text: str) -> Sample:
    gold = next(option[0] for option in options if option[3:] == text)
    return Sample("1", "Which one is it?", (), options, gold, "multiple_choice", "s", "c")


@pytest.fixture(scope="module")
def whole() -> Iterator[WholeReader]:
    with WholeReader(RewardSettings()) as reader:
        yield reader


@pytest.mark.parametrize("num_pairs", [25, pytest.param(170, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("frame", FRAMES)
def test_an_option_is_chosen_by_an_equal_text_and_never_by_a_wrong_neighbour(
    whole: WholeReader, frame: str, num_pairs: int
) -> None:
    rng = random.Random(frame)
    num_right = 0
    for _ in range(num_pairs):
        text, neighbour = pair(rng)
        options = options_with(text, neighbour, rng)
        sample = sample_with(options, text)
        right, wrong = frame.format(text), frame.format(neighbour)
        if '"answer"' in frame:
            right, wrong = right.replace("\\", "\\\\"), wrong.replace("\\", "\\\\")
        num_right += whole.read(sample, right, False).score == 1.0
        assert whole.read(sample, wrong, False).score == 0.0, (options, wrong, sample.answer)
    # Behind "So we get" an equation and a fraction of LaTeX are unread.
    assert num_right >= (0.6 if "So we get" in frame else 1.0) * num_pairs


NUMBERS = (
    lambda a, b: (f"{a}", f"-{a}"),
    lambda a, b: (f"-{a}", f"{a}"),
    lambda a, b: (f"{a}", f".{a}"),
    lambda a, b: (f"{a}.{b}", f"{b}.{a}"),
    lambda a, b: (f"{a}", f"{a}{b}"),
    lambda a, b: (f"{a} cm", f"{a} kg"),
    lambda a, b: (f"{a} cm", f"{a} m"),
    lambda a, b: (f"{a}/{b}", f"{b}/{a}"),
    lambda a, b: (f"{a}%", f"{b}%"),
)
KINDS: tuple[AnswerKind, ...] = ("numerical", "regression", "mathematics")


@pytest.mark.parametrize("frame", [frame for frame in FRAMES if "answer" not in frame or "<" in frame])
def test_a_gold_number_is_right_in_every_setting_and_its_neighbours_are_not(whole: WholeReader, frame: str) -> None:
    rng = random.Random(frame)
    for index in range(18):
        first, second = rng.sample(range(2, 99), 2)
        gold, neighbour = rng.choice(NUMBERS)(first, second)
        kind = KINDS[index % len(KINDS)]
        sample = Sample("1", "What is it?", (), (), gold, kind, "s", "c")
        assert whole.read(sample, frame.format(gold), False).score == 1.0, (kind, frame.format(gold))
        assert whole.read(sample, frame.format(neighbour), False).score != 1.0, (kind, gold, frame.format(neighbour))
    start = rng.randint(1, 40)
    sample = Sample("1", "When?", (), (), f"[{start}.0, {start + 7}.5]", "time_span", "s", "c")
    assert whole.read(sample, frame.format(sample.answer), False).score == 1.0
    assert whole.read(sample, frame.format(f"[{start + 7}.5, {start}.0]"), False).score == 0.0
