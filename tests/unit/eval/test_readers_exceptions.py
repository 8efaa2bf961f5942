"""Questions for what is not so: what says that an option is so does not choose it, what says that it is not does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vlm_pg.eval.reading import WholeReader
from vlm_pg.eval.reading.exceptions import asks_for_exception
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.types import Sample

STATEMENTS = ("A. The curve rises", "B. The curve is dashed", "C. The axis starts at zero", "D. The title is red")
ANIMALS = ("A. a dog", "B. a cat", "C. a bird", "D. a horse")
CHINESE = ("A. 曲线上升", "B. 曲线是虚线", "C. 坐标轴从零开始", "D. 标题是红色")
NOT_CORRECT = ("Which statement about the graph is NOT correct?", STATEMENTS)
NOT_SEEN = ("Which of these animals does not appear in the video?", ANIMALS)
EXCEPT = ("All of the following appear in the video EXCEPT:", ANIMALS)
IN_CHINESE = ("下列关于图表的说法,不正确的是?", CHINESE)
IN_GERMAN = ("Welche Aussage ist falsch?", STATEMENTS)
IN_SPANISH = ("¿Cuál de las siguientes afirmaciones NO es correcta?", STATEMENTS)
IN_FRENCH = ("Laquelle de ces affirmations est fausse ?", STATEMENTS)
# In each of them C is the gold answer, and these do not choose it.
NOT_CHOSEN = [
    (NOT_CORRECT, "Statement C is correct."),
    (NOT_CORRECT, "C is true."),
    (NOT_CORRECT, "Only C is correct."),
    (NOT_CORRECT, "(C) is correct"),
    (NOT_CORRECT, "C: True"),
    (NOT_CORRECT, "C matches the graph."),
    (NOT_CORRECT, "C is consistent with the graph."),
    (NOT_CORRECT, "C is not incorrect."),
    (NOT_CORRECT, "I doubt that C is incorrect."),
    (NOT_CORRECT, "C might be incorrect."),
    (NOT_CORRECT, "C seems false at first but is true."),
    (NOT_CORRECT, "The answer is not C."),
    (NOT_CORRECT, "Every statement except C is wrong."),
    (NOT_CORRECT, "None except C is correct."),
    (NOT_CORRECT, "Statement C does not mention the colour of the curve."),
    (NOT_CORRECT, "A and C are false."),
    (NOT_CORRECT, "A ❌\nB ❌\nC ✅\nD ❌"),
    (NOT_CORRECT, "The axis starts at zero, as the graph shows."),
    (NOT_SEEN, "The bird can be seen at 0:12."),
    (NOT_SEEN, "The video shows a bird."),
    (NOT_SEEN, "There is a bird."),
    (NOT_SEEN, "The bird is not visible until 0:10."),
    (NOT_SEEN, "The bird does not sing."),
    (NOT_SEEN, "The bird isn't missing."),
    (NOT_SEEN, "Option C: the bird is shown."),
    (EXCEPT, "The bird appears."),
    (EXCEPT, "C appears."),
    (IN_CHINESE, "C正确"),
    (IN_CHINESE, "C没有错"),
    (IN_CHINESE, "除了C都错"),
    (IN_CHINESE, "A、B、D正确"),
    (IN_GERMAN, "C ist richtig."),
    (IN_SPANISH, "La afirmación C es correcta."),
    (IN_FRENCH, "C est vraie."),
]
CHOSEN = [
    (NOT_CORRECT, "C is incorrect."),
    (NOT_CORRECT, "A is true. B is true. C is false. D is true."),
    (NOT_CORRECT, "A. True\nB. True\nC. False\nD. True"),
    (NOT_CORRECT, "- A: ✅\n- B: ✅\n- C: ❌\n- D: ✅"),
    (NOT_CORRECT, "The statement that is not correct is C."),
    (NOT_CORRECT, "The correct answer is C."),
    (NOT_CORRECT, "All statements except C are correct."),
    (NOT_CORRECT, "C contradicts the graph."),
    (NOT_CORRECT, "The axis does not start at zero."),
    (NOT_CORRECT, "Statement C is wrong: the axis starts at 5. Statement D is correct."),
    (NOT_SEEN, "The bird does not appear in the video."),
    (NOT_SEEN, "There is no bird in the video."),
    (NOT_SEEN, "A dog (A), a cat (B) and a horse (D) appear, but no bird (C)."),
    (NOT_SEEN, "I cannot see a bird."),
    (NOT_SEEN, "The bird."),
    (EXCEPT, "All appear except the bird."),
    (IN_CHINESE, "选项C不正确"),
    (IN_CHINESE, "A、B、D正确,C错误"),
    (IN_CHINESE, "正确答案是C"),
    (IN_GERMAN, "Aussage C ist nicht richtig."),
    (IN_SPANISH, "La incorrecta es C."),
    (IN_FRENCH, "C est fausse."),
]


@pytest.fixture(scope="module")
def reader() -> Iterator[WholeReader]:
    with WholeReader(RewardSettings()) as opened:
        yield opened


def read(reader: WholeReader, asked: tuple[str, tuple[str, ...]], output: str) -> str | None:
    sample = Sample("1", asked[0], (), asked[1], "C", "multiple_choice", "s", "c")
    return reader.read(sample, output, False).answer


@pytest.mark.parametrize("asked,output", NOT_CHOSEN)
def test_what_says_that_an_option_is_so_does_not_choose_it(
    reader: WholeReader, asked: tuple[str, tuple[str, ...]], output: str
) -> None:
    assert read(reader, asked, output) is None


@pytest.mark.parametrize("asked,output", CHOSEN)
def test_what_says_that_an_option_is_not_so_chooses_it(
    reader: WholeReader, asked: tuple[str, tuple[str, ...]], output: str
) -> None:
    assert read(reader, asked, output) == "C"


@pytest.mark.parametrize(
    "question",
    [
        "Why does the man not open the door?",
        "What does the man do when he is not looking?",
        "What is wrong with the car?",
        "What happens to the ball that does not roll?",
    ],
)
def test_other_questions_with_a_negation_ask_for_what_is_so(question: str) -> None:
    assert not asks_for_exception(question)
