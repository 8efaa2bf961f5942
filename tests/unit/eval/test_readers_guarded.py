"""Readings beside which a wrong one lies near: each rule of language with what it must not take for an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from vlm_pg.eval.reading import WholeReader
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.types import Sample


@pytest.fixture(scope="module")
def reader() -> Iterator[WholeReader]:
    with WholeReader(RewardSettings()) as opened:
        yield opened


MOOD = ("How does the boy feel at the end?", ("Happy", "Sad", "Angry", "Surprised"))
MOOD_FIRST = ("How does the boy feel at the beginning?", MOOD[1])
DOOR = (
    "If I stand by the sofa and face the television, where is the door?",
    ("front-left", "front-right", "back-left", "back-right"),
)
STOP = ("Why does the cyclist stop?", ("The traffic light turns red", "A dog", "His chain comes off", "A photo"))
TRUE = ("Which of these is true?", ("The dough rests", "Butter is added", "The oven is hot", "All of the above"))
KEYS = ("In which room does the woman leave the keys?", ("Kitchen", "Bathroom", "Hallway", "Bedroom"))
HOW = ("How are x and y related?", ("They are proportional", "They are equal", "Cannot be determined"))
SPEAK = ("How many people speak in the video?", ("2", "3", "4", "5"))
BOX = (
    "What happens after the girl opens the box?",
    ("A cat jumps out", "She closes it again", "Nothing happens", "She calls her brother"),
)
# (question and options, output, letter)
CHOICES: list[tuple[tuple[str, tuple[str, ...]], str, str | None]] = [
    (MOOD, "He is happy at first, then sad.", "B"),
    (MOOD, "He is angry at first, but later surprised.", "D"),
    (MOOD_FIRST, "He is happy at first, then sad.", None),
    (MOOD, "He is happy, then sad.", None),
    (DOOR, "The window is front-left and the door is back-left.", "C"),
    (DOOR, "The sofa is front-left and the door is back-left.", None),
    (DOOR, "The door is front-left and the door is back-left.", None),
    (DOOR, "The door is front-left, and it is back-left.", None),
    (STOP, "答案是A。", "A"),
    (STOP, "所以选A", "A"),
    (STOP, "选项A正确", "A"),
    (STOP, "因此答案是A,不是B。", "A"),
    (STOP, "答案不是A", None),
    (STOP, "不选A，选B", "B"),
    (STOP, "A是错误的", None),
    (STOP, "是A还是B？", None),
    (STOP, "他在A点停下。", None),
    (STOP, "B?", "B"),
    (STOP, "B? C?", None),
    (TRUE, "All of A, B, and C.", "D"),
    (TRUE, "A, B and C are all true.", "D"),
    (TRUE, "All of A and B.", None),
    (TRUE, "Not all of A, B and C.", None),
    (KEYS, "If I had to choose between the kitchen and the hallway, I would pick the hallway.", "C"),
    (KEYS, "Between the kitchen and the hallway, I would pick the kitchen or the hallway.", None),
    (KEYS, "If she had left them in the hallway, I would have seen them there.", None),
    (KEYS, "She might leave them in the kitchen. On the other hand, she leaves the keys in the hallway.", None),
    (KEYS, "The woman leaves the keys in the hallway. The kitchen, on the other hand, is empty.", "C"),
    (HOW, "The relation cannot be determined from the graph.", "C"),
    (HOW, "I cannot tell how they are related.", None),
    (SPEAK, "There are 2 women and 2 men, that is 4 people.", "C"),
    (SPEAK, "There are 2 women and 3 men.", None),
    (BOX, "The girl calls her brother.", "D"),
    (BOX, "She calls her sister.", None),
    (BOX, "Her brother calls her.", None),
    (BOX, "A dog jumps out", None),
]
# (question, output, side)
SIDES: list[tuple[str, str, str | None]] = [
    ("Is the red cup to the left of the blue cup?", "The blue cup is to the left of the red cup.", "no"),
    ("Is the red cup to the left of the blue cup?", "The blue cup is not to the left of the red cup.", None),
    ("Is the red cup to the left of the blue cup?", "The red cup is to the left of the blue cup.", "yes"),
    ("Is the man next to the dog before the boy?", "The dog is next to the man.", None),
    ("Are there two dogs in the garden?", "There are three dogs in the garden.", "no"),
    ("Are there two dogs in the garden?", "There are two dogs in the garden.", "yes"),
    ("Are there two dogs in the garden?", "There are not three dogs in the garden.", None),
    ("Are there two dogs in the garden?", "There are three dogs and two cats in the garden.", None),
    ("Does the bus stop?", "Answer: No\nReason: Yes, there is a station, but the bus keeps moving.", "no"),
    ("Is there no one in the room?", "No one is in the room.", "yes"),
    ("Is there no one in the room?", "There is someone in the room.", None),
    ("Is there anyone in the room?", "No one is in the room.", "no"),
    ("Does she put the cup back?", "She does, at 0:41.", "yes"),
    ("Does she put the cup back?", "She does not, at 0:41.", "no"),
]
SHARE = ("What percentage of the students passed the exam?", {"unit": "percent"})
BIRDS = ("How many birds are on the wire at the beginning?", {})
CHART = ("What was the value in 2015 according to the chart?", {})
HATS = ("How many people wear a hat?", {})
OVEN = ("How many minutes does the cake stay in the oven?", {"unit": "minutes"})
# (question and details, output, number)
NUMBERS: list[tuple[tuple[str, dict[str, str]], str, float | None]] = [
    (SHARE, "80% failed.", None),
    (SHARE, "20% failed, so 80% passed.", 80),
    (SHARE, "80% passed and 20% failed.", None),
    (SHARE, "80% made it.", 80),
    (BIRDS, "There are 7 birds at the beginning. Four are left at the end.", 7),
    (BIRDS, "Four are left at the end.", None),
    (BIRDS, "At the end there are 4 birds, at the beginning there are 7.", 7),
    (CHART, "In 2010 the value was 130 and in 2015 it was 145.", 145),
    (CHART, "The value rose from 100 in 2010 to 130 in 2015.", 130),
    (CHART, "It was 100 in 2010, and it was not 130 in 2015 but 120.", None),
    (CHART, "In 2010 it was 130, in 2012 it was 145.", None),
    (HATS, "Only one of the four people wears a hat.", 1),
    (HATS, "Three of the four people wear no hat.", None),
    (HATS, "Three of the four people are women.", None),
    (OVEN, "Three quarters of an hour.", 45),
    (OVEN, "Three quarters of the cake are eaten.", None),
]
FAR = ("What is the distance between the sofa and the stove (in meters)?", {"unit": "m"})
HEIGHT = ("What is the height of the cabinet in centimeters?", {"unit": "cm"})
NUMBERS += [
    (HEIGHT, "The door is 200 cm high and the cabinet is slightly lower, about 180 cm.", 180),
    (HEIGHT, "The cabinet is 180 cm high and the door is 200 cm high.", 180),
    (FAR, "The sofa is 2.5 m from the stove.", 2.5),
    (FAR, "2.5 m from the left edge of the sofa", 2.5),
    (FAR, "The sofa is 2.5 m away from the window.", None),
    (HEIGHT, "The cabinet is 20 cm lower than the door, and the door is 200 cm high.", None),
]
# Outputs to "When is the door opened?", and the span.
SPANS: list[tuple[str, list[float] | None]] = [
    ("The door is opened from 5 to 10 seconds, and then the man sits from 10 to 20 seconds.", [5, 10]),
    ("The door is opened from 5 to 10 seconds and closed from 10 to 20 seconds.", [5, 10]),
    ("The door opens from 5 to 10 seconds and the door closes from 10 to 20 seconds.", [5, 10]),
    ("The door handle moves from 5 to 10 seconds, and the man sits from 10 to 20 seconds.", None),
    ("The man sits from 10 to 20 seconds, and the door is not opened from 5 to 10 seconds.", None),
]
TWO = ("Solve $x^2 - 5x + 6 = 0$.", "2, 3")
ONE = ("Solve $2x = 6$.", "3")
VALUE = ("What is the value of $f(3)$?", "8")
HEADS = ("What is the probability of heads?", "\\frac{1}{4}")
MANY = ("How many coins are in the bag?", "4")
# (question and gold, output, whether it is right)
MATHEMATICS: list[tuple[tuple[str, str], str, bool]] = [
    (TWO, "The roots are $2$ and $3$.", True),
    (TWO, "$x = 2$ or $x = 3$", True),
    (TWO, "\\boxed{2} \\text{ and } \\boxed{3}", True),
    (TWO, "$x = 3$", False),
    (TWO, "The roots are $2$, $3$ and $4$.", False),
    (ONE, "The roots are $2$ and $3$.", False),
    (ONE, "$x = 7$ and $x = 3$", False),
    (ONE, "$2x = 6$ and $x = 3$", True),
    (ONE, "$y = 4$ and $x = 3$", True),
    (VALUE, "$f(3) = 8$ and $f(2) = 3$.", True),
    (VALUE, "$f(3) = 3$ and $f(2) = 8$.", False),
    (HEADS, "One quarter.", True),
    (HEADS, "It is 1 in 4.", True),
    (HEADS, "It is 1 in 5.", False),
    (MANY, "One in the hand, and $4$ in the bag.", True),
    (MANY, "One quarter.", False),
]
RIVER = ("What is the name of the river that the travellers cross?", "Mekong")
GRAPH = ("Which algorithm does the animation demonstrate?", "Dijkstra's algorithm")
# (question and gold, output, whether it is right)
TEXTS: list[tuple[tuple[str, str], str, bool]] = [
    (RIVER, "The travellers cross the Mekong River on a ferry.", True),
    (RIVER, "They cross a river called the Mekong, which rises in Tibet.", True),
    (RIVER, "Mekong, not Irrawaddy.", True),
    (RIVER, "Not the Irrawaddy but the Mekong.", True),
    (RIVER, "Irrawaddy, not Mekong.", False),
    (RIVER, "Not the Mekong but the Irrawaddy.", False),
    (RIVER, "The travellers cross a tributary of the Mekong.", False),
    (RIVER, "The travellers cross the bridge over the Mekong.", False),
    (RIVER, "The travellers cross a river near the Mekong.", False),
    (RIVER, "The travellers never cross the Mekong.", False),
    (RIVER, "The travellers almost cross the Mekong.", False),
    (RIVER, "The travellers cross the Irrawaddy and the Mekong.", False),
    (RIVER, 'I think it\'s the Mekong. No wait, the sign says "Irrawaddy". So: Irrawaddy.', False),
    (GRAPH, "The animation demonstrates Dijkstra's algorithm on a graph.", True),
    (GRAPH, "The animation demonstrates Dijkstra's other algorithm.", False),
    (GRAPH, "Bellman-Ford variant of Dijkstra", False),
    (GRAPH, "The animation demonstrates an algorithm faster than Dijkstra's.", False),
]


@pytest.mark.parametrize("asked,output,letter", CHOICES, ids=[row[1][:60] for row in CHOICES])
def test_choices(reader: WholeReader, asked: tuple[str, tuple[str, ...]], output: str, letter: str | None) -> None:
    options = tuple(f"{one}. {text}" for one, text in zip("ABCDE", asked[1], strict=False))
    sample = Sample("1", asked[0], (), options, letter or "A", "multiple_choice", "s", "c")
    assert reader.read(sample, output, False).answer == letter


@pytest.mark.parametrize("question,output,side", SIDES, ids=[row[1][:60] for row in SIDES])
def test_yes_and_no(reader: WholeReader, question: str, output: str, side: str | None) -> None:
    assert reader.read(Sample("1", question, (), (), "yes", "yes_no", "s", "c"), output, False).answer == side


@pytest.mark.parametrize("asked,output,number", NUMBERS, ids=[row[1][:60] for row in NUMBERS])
def test_numbers(reader: WholeReader, asked: tuple[str, dict[str, str]], output: str, number: float | None) -> None:
    sample = Sample("1", asked[0], (), (), f"{number or 3}", "numerical", "s", "c", details=asked[1])
    reading = reader.read(sample, output, False)
    assert (None if reading.answer is None else float(reading.answer)) == number
    assert reading.score == float(number is not None)


@pytest.mark.parametrize("output,span", SPANS, ids=[row[0][:60] for row in SPANS])
def test_spans(reader: WholeReader, output: str, span: list[float] | None) -> None:
    sample = Sample("1", "When is the door opened?", (), (), "[5.0, 10.0]", "time_span", "s", "c")
    answer = reader.read(sample, output, False).answer
    assert (None if answer is None else json.loads(answer)) == span


@pytest.mark.parametrize("asked,output,is_right", MATHEMATICS, ids=[row[1][:60] for row in MATHEMATICS])
def test_mathematics(reader: WholeReader, asked: tuple[str, str], output: str, is_right: bool) -> None:
    sample = Sample("1", asked[0], (), (), asked[1], "mathematics", "s", "c")
    assert reader.read(sample, output, False).score == float(is_right)


@pytest.mark.parametrize("asked,output,is_right", TEXTS, ids=[row[1][:60] for row in TEXTS])
def test_texts(reader: WholeReader, asked: tuple[str, str], output: str, is_right: bool) -> None:
    sample = Sample("1", asked[0], (), (), asked[1], "exact", "s", "c")
    assert reader.read(sample, output, False).score == float(is_right)
