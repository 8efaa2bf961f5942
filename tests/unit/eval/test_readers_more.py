"""More outputs than the hand-graded tables have, in the ways of several models and languages, graded by hand."""

from __future__ import annotations

import pytest

from vlm_pg.eval.reading import WholeReader
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.types import ANSWER_KINDS, AnswerKind, Sample

read_output = WholeReader(RewardSettings()).read

COLOUR = ("What colour is the car that turns left at the crossing?", ("A. Red", "B. Blue", "C. Green", "D. Black"))
WHY = (
    "Why does the man leave the shop without paying?",
    ("A. He forgot his wallet", "B. The shop was closing", "C. He received a phone call", "D. He knew the owner"),
)
PLACE = (
    "Where does the cat sleep at the end of the video?",
    ("A. On the sofa", "B. Under the table", "C. In a cardboard box", "D. On the windowsill"),
)
COUNT = ("How many people enter the lift?", ("A. 2", "B. 3", "C. 4", "D. 5"))
MOVE = ("In which direction does the ball roll?", ("A. To the left", "B. To the right", "C. Towards the camera"))
BOTH = ("Is the light on?", ("A. Yes", "B. No"))
ACTION = (
    "What does the girl do after opening the door?",
    ("A. She takes off her shoes", "B. She turns on the light", "C. She calls her mother", "D. She feeds the dog"),
)
LETTER = ("Which letter is painted on the door?", ("A. B", "B. D", "C. A", "D. C"))
TRUE = (
    "Which statement about the museum is correct?",
    ("A. It was founded in 1890", "B. It is closed on Mondays", "C. It has four floors", "D. None of the above"),
)

# (question, output, letter that a careful human reads)
CHOICES: list[tuple[tuple[str, tuple[str, ...]], str, str | None]] = [
    (COLOUR, "B. Blue", "B"),
    (COLOUR, "The answer is B", "B"),
    (COLOUR, "The correct answer is (C) Green.", "C"),
    (COLOUR, "**Answer: D**", "D"),
    (COLOUR, "**D. Black**\n\nThe black car turns left after the red one has stopped.", "D"),
    (
        COLOUR,
        "After watching the clip carefully, the car turning left appears to be blue. Therefore, the answer is **B**.",
        "B",
    ),
    (COLOUR, "The red car goes straight on and the green car turns right. The car that turns left is black.", "D"),
    (COLOUR, "The car is not red but blue.", "B"),
    (COLOUR, "It could be red or blue.", None),
    (COLOUR, "Red? No, that one goes straight. It's the green car.", "C"),
    (COLOUR, "A car turns left at the crossing while a cyclist waits.", None),
    (COLOUR, "The car is yellow.", None),
    (COLOUR, "选项B正确。", "B"),
    (COLOUR, "根据视频内容，左转的汽车是蓝色的，因此答案是B。", "B"),
    (COLOUR, "答案为 (C)", "C"),
    (COLOUR, "A不对，B也不对，正确答案是D。", "D"),
    (COLOUR, "Die richtige Antwort ist B.", "B"),
    (COLOUR, "Die Antwort lautet: C", "C"),
    (COLOUR, "La respuesta es D, porque el coche negro gira a la izquierda.", "D"),
    (COLOUR, "La bonne réponse est B.", "B"),
    (COLOUR, "正解はCです。", "C"),
    (COLOUR, "Option A is incorrect. Option B is incorrect. Option D is incorrect. Option C is correct.", "C"),
    (COLOUR, "I think it's B, but I am not completely sure.", "B"),
    (COLOUR, "I cannot determine the colour of the car from the frames.", None),
    (COLOUR, "Final Answer: $\\boxed{\\text{B. Blue}}$", "B"),
    (COLOUR, "$\\boxed{\\text{blue}}$", "B"),
    (COLOUR, "A: Red\nB: Blue\nC: Green\nD: Black", None),
    (COLOUR, "A: Red\nB: Blue\nC: Green\nD: Black\n\nAnswer: C", "C"),
    (COLOUR, "<answer>B</answer>\nThe blue car turns left.", "B"),
    (COLOUR, "<answer>C. Blue</answer>", None),
    (COLOUR, "<think>It may be A.</think>\n\nD", "D"),
    (COLOUR, "<think>The car is red, so A", None),
    (COLOUR, "Both the red and the blue car turn left.", None),
    (COLOUR, "B) Blue", "B"),
    (COLOUR, "b)", "B"),
    (COLOUR, "The car is blue. Wait, looking at the last frame again, that one goes straight. The answer is A.", "A"),
    (COLOUR, "Of the four cars, the one that turns left is the green one.", "C"),
    (COLOUR, "Not A, not B, not D.", None),
    (COLOUR, "Answer: A or B", None),
    (COLOUR, "I'd say (D).", "D"),
    (WHY, "He received a phone call.", "C"),
    (WHY, "The man leaves because he got a call on his phone.", "C"),
    (WHY, "He leaves the shop.", None),
    (WHY, "A man walks into a shop and talks to a woman.", None),
    (WHY, "Based on the video, the man leaves the shop because he knew the owner. So the answer is D.", "D"),
    (
        WHY,
        "Let's evaluate:\n\n- A: There is no sign of this.\n- B: The lights are still on.\n"
        "- C: His phone rings and he walks out.\n- D: Not supported.\n\nThe best answer is C.",
        "C",
    ),
    (
        WHY,
        "The answer cannot be B because the shop was open, and it cannot be D either. The most likely answer is A.",
        "A",
    ),
    (WHY, "The correct option is **A. He forgot his wallet**.", "A"),
    (WHY, "He did not forget his wallet; he knew the owner.", "D"),
    (WHY, '{"answer": "B", "reason": "the shop was closing"}', "B"),
    (WHY, "As the shop was closing, he had to hurry. Answer: (B)", "B"),
    (WHY, "I choose C over A since the phone is visible.", "C"),
    (PLACE, "The cat sleeps in a cardboard box.", "C"),
    (PLACE, "At first it lies on the sofa, but at the end it sleeps under the table.", "B"),
    (PLACE, "A cat sleeps somewhere in the room.", None),
    (PLACE, "It sleeps on the windowsill, not on the sofa.", "D"),
    (PLACE, "the box", "C"),
    (PLACE, "The answer is: In a cardboard box", "C"),
    (PLACE, "Unter dem Tisch, also Antwort B.", "B"),
    (PLACE, "On the sofa or on the windowsill.", None),
    (COUNT, "4", "C"),
    (COUNT, "Three people enter the lift.", "B"),
    (COUNT, "There are 5 people in total.", "D"),
    (COUNT, "First 2 people enter, then 1 more, so 2 + 1 = 3.", "B"),
    (COUNT, "7", None),
    (COUNT, "Between 3 and 5.", None),
    (COUNT, "C", "C"),
    (COUNT, "B. 4", None),
    (MOVE, "It rolls to the left.", "A"),
    (MOVE, "The ball rolls from left to right.", "B"),
    (MOVE, "right", "B"),
    (MOVE, "Right, so the ball is rolling towards the camera.", "C"),
    (MOVE, "The right answer is A.", "A"),
    (BOTH, "Yes, the light is on.", "A"),
    (BOTH, "No, the room is dark.", "B"),
    (BOTH, "No doubt, the answer is A.", "A"),
    (ACTION, "She turned on the light.", "B"),
    (ACTION, "After opening the door, she feeds the dog.", "D"),
    (ACTION, "The girl opens the door and walks in.", None),
    (ACTION, "She first takes off her shoes and then calls her mother.", None),
    (COLOUR, "The video shows a busy crossing. The driver of the blue car waves at a child.", None),
    (COLOUR, "The answer is B, which is Blue. However, D is also possible.", None),
    (COLOUR, "A red traffic light is seen, then the car turns.", None),
    (COLOUR, "If the car is blue, then B.", None),
    (COLOUR, "The car is blue-green.", None),
    (COLOUR, "Blue is wrong.", None),
    (COLOUR, "None of the options is correct.", None),
    (COLOUR, "The answer is E.", None),
    (COLOUR, "Is it B?", None),
    (COLOUR, "1. A\n2. B\n3. C", None),
    (COLOUR, "We can rule out A, C, and D, leaving B.", "B"),
    (COLOUR, "Es ist nicht A, sondern B.", "B"),
    (COLOUR, "So the answer is A... no wait, B.", "B"),
    (COLOUR, "<answer>B</answer> No wait. <answer>C</answer>", "C"),
    (WHY, "He forgot his phone.", None),
    (WHY, "B. He forgot his wallet", None),
    (PLACE, "The cat jumps off the sofa.", None),
    (PLACE, "The cat is no longer on the sofa; it has moved into a cardboard box.", "C"),
    (WHY, "The owner looks at the phone and smiles.", None),
    (COLOUR, "B seems more likely than A.", "B"),
    (LETTER, "The letter on the door is D.", None),
    (LETTER, "The answer is C.", "C"),
    (LETTER, "D", "D"),
    (TRUE, "It is closed on Mondays.", "B"),
    (TRUE, "None of the above", "D"),
    (TRUE, "A is false (it was founded in 1902), B is false, and C is false. Hence D.", "D"),
    (TRUE, "Statement C is correct: the guide mentions four floors.", "C"),
]

FENCE = "Is the dog jumping over the fence?"
# (question, output, side)
SIDES: list[tuple[str, str, str | None]] = [
    (FENCE, "Yes", "yes"),
    (FENCE, "No, it isn't.", "no"),
    (FENCE, "The dog is jumping over the fence.", "yes"),
    (FENCE, "The dog is not jumping over the fence.", "no"),
    (FENCE, "The dog lies in the grass.", None),
    (FENCE, "**Yes**, the dog jumps over it at 0:03.", "yes"),
    (FENCE, "Based on the video, the answer is no.", "no"),
    (FENCE, "不是，狗在睡觉。", "no"),
    (FENCE, "Nein, der Hund schläft.", "no"),
    (FENCE, "Sí, el perro salta.", "yes"),
    (FENCE, "No idea.", None),
    (FENCE, "It is not true.", "no"),
    (FENCE, "<think>yes?</think> No.", "no"),
    (FENCE, "Yes, I can see the fence. Wait, that is a hedge and the dog stays on this side. So no.", "no"),
    (FENCE, "I cannot see any dog in the video, so I am unable to answer.", None),
]

# (question, gold, output, answer that is read, score)
TEXTS: list[tuple[str, str, str, str | None, float]] = [
    ("What is the man eating?", "an apple", "An apple.", "apple", 1.0),
    ("What is the man eating?", "an apple", "He is eating an apple.", "apple", 1.0),
    ("What is the man eating?", "an apple", "The answer is: a pear", "pear", 0.0),
    ("What is the man eating?", "an apple", "<answer>apple</answer>", "apple", 1.0),
    ("What is the man eating?", "an apple", "Either an apple or a pear.", None, 0.0),
    ("What is the man eating?", "an apple", "I can't tell what he is eating.", None, 0.0),
    ("What is the man eating?", "an apple", "pineapple", "pineapple", 0.0),
    ("What is the man eating?", "an apple", "It is not an apple.", None, 0.0),
    ("Which city is shown?", "Paris", "The city is Paris.", "paris", 1.0),
    ("Which city is shown?", "Paris", "**Paris**", "paris", 1.0),
    ("Which city is shown?", "Paris", "The city shown in the video is London, not Paris.", "london", 0.0),
    ("Which city is shown?", "Paris", "\\boxed{\\text{paris}}", "paris", 1.0),
    ("What is seen in the beaker?", "adsorption", "absorption", "absorption", 0.0),
    ("What is wrong with him?", "hypertension", "hypotension", "hypotension", 0.0),
    ("What is his job?", "fire fighter", "firefighter", "firefighter", 1.0),
    ("How heavy is the stone?", "2 kg", "2000 g", "2000 g", 1.0),
    ("How heavy is the stone?", "2 kg", "2 g", "2 g", 0.0),
]

# (output, selected, score) of a question whose gold answer is "A, C"
SELECTED: list[tuple[str, str | None, float]] = [
    ("A, C", "A, C", 1.0),
    ("The correct answers are A and C.", "A, C", 1.0),
    ("<answer>A,C,D</answer>", "A, C, D", 0.0),
    ("AC", "A, C", 1.0),
    ("<think>B?</think>A, C", "A, C", 1.0),
    ("A or C", None, 0.0),
    ("none of them", "none", 0.0),
    ("The first shot shows both.\n\nAnswer: A, C", "A, C", 1.0),
    ("(A) and (C)", "A, C", 1.0),
    ("A. Red\nC. Green", "A, C", 1.0),
]


def sample(question: str, options: tuple[str, ...], gold: str, kind: AnswerKind) -> Sample:
    return Sample("1", question, (), options, gold, kind, "s", "c")


@pytest.mark.parametrize("asked,output,letter", CHOICES)
def test_choices(asked: tuple[str, tuple[str, ...]], output: str, letter: str | None) -> None:
    question, options = asked
    for gold in "AB":
        reading = read_output(sample(question, options, gold, "multiple_choice"), output, False)
        assert reading.answer == letter
        assert reading.score == float(letter == gold)


@pytest.mark.parametrize("question,output,side", SIDES)
def test_yes_and_no(question: str, output: str, side: str | None) -> None:
    for gold in ("yes", "no"):
        reading = read_output(sample(question, (), gold, "yes_no"), output, False)
        assert (reading.answer, reading.score) == (side, float(side == gold))


@pytest.mark.parametrize("question,gold,output,answer,score", TEXTS)
def test_short_texts(question: str, gold: str, output: str, answer: str | None, score: float) -> None:
    reading = read_output(sample(question, (), gold, "exact"), output, False)
    assert (reading.answer, reading.score) == (answer, score)


@pytest.mark.parametrize("output,selected,score", SELECTED)
def test_selected_options(output: str, selected: str | None, score: float) -> None:
    reading = read_output(sample(*COLOUR, "A, C", "multiple_select"), output, False)
    assert (reading.answer, reading.score) == (selected, score)


@pytest.mark.parametrize(
    "kind,gold", [("multiple_choice", "E"), ("multiple_select", "A, F"), ("yes_no", "maybe"), ("exact", "...")]
)
def test_a_gold_answer_that_cannot_be_used_has_no_score(kind: AnswerKind, gold: str) -> None:
    assert read_output(sample(*COLOUR, gold, kind), "B", False).score is None


def test_transcribed_text_is_held_against_all_that_is_said() -> None:
    # One word of four is wrong.
    assert (
        read_output(sample("Read the sign.", (), "MIND THE GAP PLEASE", "ocr"), "MIND THE CAP PLEASE", False).score
        == 0.75
    )


def test_free_texts_have_the_value_of_their_reward() -> None:
    asked = sample("What happens?", (), "a dog runs", "free_form")
    assert read_output(asked, "<think>hm</think>A dog runs.", False).score == 1.0
    assert read_output(asked, "", False).score == 0.0


def test_boxes_are_those_stated_last() -> None:
    asked = sample("Where is the dog?", (), "[10, 10, 20, 20]", "box")
    reading = read_output(asked, "The cat is at [0, 0, 5, 5].\nThe dog is at [10, 10, 20, 20].", False)
    assert (reading.answer, reading.score) == ("[10, 10, 20, 20]", 1.0)
    assert read_output(asked, "[10, 10, 20, 20] or [30, 30, 40, 40]", False).answer is None
    assert read_output(asked, "nowhere", False).score == 0.0


def test_every_kind_of_answer_has_a_reader() -> None:
    with WholeReader(RewardSettings()) as reader:
        for kind in ANSWER_KINDS:
            reading = reader.read(sample("?", ("A. x", "B. y"), "B", kind), "", False)
            assert reading.answer is None and reading.score in (0.0, None)
