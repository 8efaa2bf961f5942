"""Numbers and formulas: an equal one is right however it is set, and a wrong neighbour never is."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from string import ascii_uppercase

import pytest

from vlm_pg.eval.reading import WholeReader
from vlm_pg.eval.reading.symbols import is_symbolic, runs
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
    places = [place for place, sign in enumerate(text) if sign.isdigit()]
    place = rng.choice(places)
    others = [digit for digit in "123456789" if digit != text[place]]
    return f"{text[:place]}{rng.choice(others)}{text[place + 1 :]}"


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
    return tuple(f"{ascii_uppercase[place]}. {one}" for place, one in enumerate(texts))


def asked(options: tuple[str, ...], text: str) -> Sample:
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
    for _ in range(num_pairs):
        text, neighbour = pair(rng)
        options = options_with(text, neighbour, rng)
        sample = asked(options, text)
        right, wrong = frame.format(text), frame.format(neighbour)
        if '"answer"' in frame:
            right, wrong = right.replace("\\", "\\\\"), wrong.replace("\\", "\\\\")
        assert whole.read(sample, right, False).score == 1.0, (options, right)
        assert whole.read(sample, wrong, False).score == 0.0, (options, wrong, sample.answer)


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
    for place in range(18):
        first, second = rng.sample(range(2, 99), 2)
        gold, neighbour = rng.choice(NUMBERS)(first, second)
        kind = KINDS[place % len(KINDS)]
        sample = Sample("1", "What is it?", (), (), gold, kind, "s", "c")
        assert whole.read(sample, frame.format(gold), False).score == 1.0, (kind, frame.format(gold))
        assert whole.read(sample, frame.format(neighbour), False).score != 1.0, (kind, gold, frame.format(neighbour))
    start = rng.randint(1, 40)
    sample = Sample("1", "When?", (), (), f"[{start}.0, {start + 7}.5]", "time_span", "s", "c")
    assert whole.read(sample, frame.format(sample.answer), False).score == 1.0
    assert whole.read(sample, frame.format(f"[{start + 7}.5, {start}.0]"), False).score == 0.0


WORDS = ("red", "house", "Depth", "search", "the", "old", "river", "carbon", "Anna", "walks", "Vitamin", "quickly")
JOINTS = (" (", ": ", " - ", ", which is ", ", as ", ", because ", " because of ", " in the ", ", where ", "-", " and ")


@pytest.mark.parametrize("frame", [frame for frame in FRAMES if "We compare" not in frame])
def test_a_text_scores_1_against_itself(whole: WholeReader, frame: str) -> None:
    rng = random.Random(frame)
    for _ in range(30):
        joint = rng.choice(JOINTS)
        text = f"{rng.choice(WORDS)} {rng.choice(WORDS)}{joint}{rng.choice(WORDS)}{')' if '(' in joint else ''}"
        other = rng.choice([word for word in ("green", "mountain", "Bob") if word not in text])
        exact = Sample("1", "What is it called?", (), (), text, "exact", "s", "c")
        assert whole.read(exact, frame.format(text), False).score == 1.0, (text, frame)
        assert whole.read(exact, frame.format(other), False).score == 0.0, (text, other)
        choice = asked((f"A. {other}", f"B. {text}", "C. something else"), text)
        assert whole.read(choice, frame.format(text), False).score == 1.0, (text, frame)


@pytest.mark.parametrize(
    ("options", "gold", "output", "score"),
    [
        (("-3", "7", "9", "4"), "A", "3", 0),
        (("-3", "7", "9", "4"), "A", "The answer is 3, not 7.", 0),
        (("5", "7", "8"), "A", ".5", 0),
        (("x > 3", "x < 2", "x = 3"), "A", "x < 3", 0),
        (("5%", "7%", "50%"), "A", "$5", 0),
        (("2:1", "1:3"), "A", "1:2", 0),
        (("(3, -2)", "(2, 3)"), "A", "(3, 2)", 0),
        (("(3, -2)", "(2, 3)"), "B", "It lies at (2, 3).", 1),
        (("y = 2x - 3", "y = x + 3"), "A", "y = 2x + 3", 0),
        (("y = 2x - 3", "y = x + 3"), "A", "y=2x−3", 1),
        (("1/2", "1/3"), "A", "0.5", 1),
        ((r"$\frac{1}{2}$", r"$\frac{1}{3}$"), "A", r"$\dfrac{1}{2}$", 1),
        (("x = 5", "x = 7"), "A", "5", 1),
        (("x = 5", "x = 7"), "A", "y = 5", 0),
        (("5 m", "7 m"), "A", "500 cm", 1),
        (("$5", "$7"), "A", "It costs $5.", 1),
        (("96", "95", "96%"), "A", "The answer is 96.", 1),
        (("96", "95", "96%"), "A", "It is 96%.", 0),
        (("Group A", "red", "Group B"), "C", "A, B", 0),
        (("red", "Group B", "green"), "B", "A and B", 0),
        (("red", "blue", "green"), "A", "(A), (B)", 0),
        (("red", "blue", "green", "white"), "D", "Option A is shown. The answer is D.", 1),
        (("red", "blue", "green"), "B", "The correct answer is B. Option A would need a red lamp.", 1),
        (("red", "blue", "green"), "B", "B) blue\nExplanation: A) red is the colour of the lamp.", 1),
        (("red", "blue", "green"), "B", "B) blue\nExplanation: the answer is A.", 0),
        (("red", "blue", "green"), "B", "Option B.", 1),
    ],
)
def test_options_by_value_and_by_letter(
    whole: WholeReader, options: tuple[str, ...], gold: str, output: str, score: float
) -> None:
    labelled = tuple(f"{ascii_uppercase[place]}. {text}" for place, text in enumerate(options))
    sample = Sample("1", "Which one is it?", (), labelled, gold, "multiple_choice", "s", "c")
    assert whole.read(sample, output, False).score == score


@pytest.mark.parametrize(
    ("kind", "gold", "output", "score"),
    [
        ("box", "[10, 20, 30, 40]", '```json\n{\n  "bbox_2d": [\n    10,\n    20,\n    30,\n    40\n  ]\n}\n```', 1),
        ("box", "[10, 20, 30, 40]", '[\n  {"bbox_2d": [10, 20,\n   30, 40],\n   "label": "cat"}\n]', 1),
        ("time_span", "[5.0, 10.0]", "```json\n[\n  5.0,\n  10.0\n]\n```", 1),
        ("time_span", "[5.0, 10.0]", '{\n  "span": [\n    5.0,\n    10.0\n  ]\n}', 1),
        ("time_span", "[5.0, 10.0]", '{\n  "span": [\n    10.0,\n    5.0\n  ]\n}', 0),
        ("mathematics", "12", "$12$ (cm)", 1),
        ("mathematics", "12", "The length is $12$ (cm).", 1),
        ("mathematics", "12", "$-12$ (cm)", 0),
        ("mathematics", "y = 5", "So $v = 5$.", 0),
        ("exact", "Depth-First Search (DFS)", "The final answer is Depth-First Search (DFS).", 1),
        ("exact", "Carbon dioxide (CO2)", "Carbon dioxide (CO)", 0),
        ("exact", "six", "6", 1),
        ("exact", "6", "The answer is six.", 1),
        ("exact", "six", "-6", 0),
        ("exact", "22", "So we get .22 here.", 0),
    ],
)
def test_other_kinds(whole: WholeReader, kind: AnswerKind, gold: str, output: str, score: float) -> None:
    sample = Sample("1", "What is it?", (), (), gold, kind, "s", "c")
    assert whole.read(sample, output, False).score == score


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("(B) x = -3 m, not 5", ["x = -3 m", "5"]),
        ("A. -3", ["-3"]),
        ("- 5 people at 2:1", ["5", "2:1"]),
        ("It is (3, -2) or [1, 2).", ["(3, -2)", "[1, 2)"]),
        ("$5 million, 93 % and 4.4 m/s", ["$5 million", "93 %", "4.4 m/s"]),
        ("The T-shirt of H2O is red - blue", ["H2O"]),
        ("答案是-3。", ["-3"]),
    ],
)
def test_runs_of_symbols(text: str, found: list[str]) -> None:
    assert [text[start:end] for start, end in runs(text)] == found


def test_what_is_symbolic() -> None:
    assert all(map(is_symbolic, ("-3", ".5", "$5", "2:1", "x > 3", "(3, -2)", "sin x + 1", r"\sqrt{2}", "2, 3")))
    assert not any(map(is_symbolic, ("B", "red", "3 cups", "Vitamin B12", "in 1921", "")))
