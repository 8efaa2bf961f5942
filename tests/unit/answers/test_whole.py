"""Whole outputs: none that a person grades wrong is read as right, and most right ones are read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.outputs import LATER_TABLES, TABLES, questions
from tests.unit.answers.never_right import DETAILS, NEVER_RIGHT, OPENS, OPTIONS, OPTIONS_OF, PEOPLE, READS, ROOM, SUM
from vlm_pg.answers.whole import WholeReader, as_voted
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.types import AnswerKind, Sample

KINDS: dict[str, AnswerKind] = {
    "choice": "multiple_choice",
    "yes_no": "yes_no",
    "text": "exact",
    "number": "numerical",
    "math": "mathematics",
    "span": "time_span",
}
# Right outputs of the hand-graded tables that are read; the others are paraphrases, which a judge may decide.
FEWEST_RIGHT = {"choice": 400, "yes_no": 44, "text": 50, "number": 200, "math": 75, "span": 54}
# Answers that people called wrong for their spelling alone, where the same words were asked for.
OTHER_SPELLINGS = {("5", "five"), ("24", "two dozen"), ("the cat", "cat")}
JUDGED = sorted((Path(__file__).parent / "judged").glob("*.jsonl"))


@pytest.fixture(scope="module")
def whole() -> Iterator[WholeReader]:
    with WholeReader(RewardSettings()) as reader:
        yield reader


def sample_of(path: Path, question: dict[str, Any]) -> Sample:
    options = tuple(f"{'ABCDEFGHIJ'[index]}. {text}" for index, text in enumerate(question.get("options", ())))
    details = {name: question[name] for name in ("unit", "precision", "answer_type") if name in question}
    kind = KINDS[question["kind"]]
    if path.stem == "vsi_bench" and kind == "numerical":
        kind = "mean_relative_accuracy"
    return Sample("1", question["question"], (), options, str(question["gold"]), kind, "s", "c", details=details)


def test_hand_graded_outputs(whole: WholeReader) -> None:
    right: Counter[str] = Counter()
    for path in (*TABLES, *LATER_TABLES):
        for question in questions(path):
            sample = sample_of(path, question)
            for output in question["outputs"]:
                score = whole.read(sample, output["text"], output.get("truncated", False)).score
                assert score is not None and score <= output["score"] + 1e-3, (output["id"], output["why"])
                right[question["kind"]] += score == pytest.approx(output["score"], abs=1e-3)
    assert all(right[kind] >= fewest for kind, fewest in FEWEST_RIGHT.items()), right


@pytest.mark.parametrize("path", JUDGED, ids=lambda path: path.stem)
def test_judged_answers_as_whole_outputs(whole: WholeReader, path: Path) -> None:
    """An answer alone is an output, too."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    num_right = 0
    lines = [line for line in lines if line["sure"]]
    for line in lines:
        text = line.get("response", line.get("answer"))
        fields = (line.get("question", "Which?"), (), tuple(line.get("options", ())), line["gold"], line["kind"])
        score, wanted = whole.read(Sample("1", *fields, "s", "c"), text, False).score, line["accuracy"]
        if score is None or wanted is None:
            num_right += 1
            continue
        assert score <= wanted + 0.005 or (line["gold"], text) in OTHER_SPELLINGS, (line["kind"], line["gold"], text)
        num_right += score >= wanted - 0.005
    assert num_right >= 0.95 * len(lines)


@pytest.mark.parametrize("case", NEVER_RIGHT)
def test_hostile_outputs_are_never_right(whole: WholeReader, case: tuple[AnswerKind, str, str]) -> None:
    kind, question, gold = case
    details = DETAILS.get(question, {})
    sample = Sample("1", question, (), OPTIONS_OF.get(question, ()), gold, kind, "s", "c", details=details)
    assert [output for output in NEVER_RIGHT[case] if whole.read(sample, output, False).score != 0.0] == []


ROOMS = OPTIONS_OF[ROOM]


@pytest.mark.parametrize(
    ("kind", "question", "options", "gold", "output", "answer"),
    [
        ("multiple_choice", ROOM, ROOMS, "C", "She walks on.\n\nSo the answer is C.", "C"),
        ("multiple_choice", ROOM, ROOMS, "C", "<think>A or C?</think>C. Hallway\nShe puts them on a table.", "C"),
        ("multiple_choice", ROOM, ROOMS, "C", "The woman leaves the keys in the hallway.", "C"),
        ("multiple_choice", ROOM, ROOMS, "C", "A, B and D are wrong. I'd go with C.", "C"),
        ("multiple_choice", ROOM, ROOMS, "C", "Kitchen ❌\nHallway ✅\nBedroom ❌", "C"),
        ("multiple_choice", ROOM, ROOMS, "C", "The answer is A. Wait, she takes them with her. The answer is C.", "C"),
        ("multiple_choice", ROOM, ROOMS, "C", '{"answer": "C"}', "C"),
        ("multiple_choice", ROOM, ROOMS, "C", "\\boxed{A} or \\boxed{C}", None),
        ("multiple_choice", READS, OPTIONS, "B", "After he reads the letter, the man opens the window.", "B"),
        ("multiple_choice", "Which line is the longest?", ("B", "A", "C"), "B", "The answer is (B).", "B"),
        ("multiple_choice", "Why does she smile?", ("happy to be here", "sad"), "A", "A. happy to be here", "A"),
        ("multiple_select", "Which?", ROOMS, "A, C", "The answer is A and C.", "A, C"),
        ("yes_no", OPENS, (), "yes", "The man opens the window.", "yes"),
        ("yes_no", OPENS, (), "no", "The man does not open the window.", "no"),
        ("yes_no", OPENS, (), "no", "No. It stays shut.", "no"),
        ("numerical", PEOPLE, (), "3", "Two cook, and one comes in, so there are three people in the kitchen.", "3"),
        ("numerical", PEOPLE, (), "3", "There are 3 people in the garden.", None),
        ("numerical", "How long is it, in minutes?", (), "90", "1 hour and 30 minutes", "90"),
        ("numerical", "What is the current, in amperes?", (), "0.25", "\\boxed{250\\ \\text{mA}}", "0.25"),
        ("regression", "How far is it?", (), "5", "The answer is -5.", "-5"),
        ("mathematics", SUM, (), "7", "$a = 3$ and $b = 4$, so $a + b = 7$.", "7"),
        ("mathematics", SUM, (), "7", "$a = 7$", None),
        ("mathematics", "Find all solutions of $x^2=4$.", (), "-2, 2", "\\boxed{-2} and \\boxed{2}", "-2, 2"),
        ("mathematics", "Simplify. Give simplest radical form.", (), "3\\sqrt{2}", "\\boxed{\\sqrt{18}}", "\\sqrt{18}"),
        ("exact", "What colour is the car?", (), "red", "The car is red.", "red"),
        ("exact", "What colour is the car?", (), "red", "The truck is red.", "The truck is red"),
        ("free_form", "What is it?", (), "a cat", "a cat", "a cat"),
        ("ocr", "What does it say?", (), "STOP", "<answer>STOP</answer>", "STOP"),
        ("time_span", "When?", (), "[5.0, 10.0]", "It happens from 5 to 10 seconds.", "[5, 10]"),
        ("box", "Where?", (), "[1, 2, 3, 4]", '```json\n{"bbox_2d": [1, 2, 3, 4]}\n```', "[1, 2, 3, 4]"),
        ("numerical", PEOPLE, (), "3", "<think>three, I think", None),
    ],
)
def test_forms_of_every_kind(
    whole: WholeReader,
    kind: AnswerKind,
    question: str,
    options: tuple[str, ...],
    gold: str,
    output: str,
    answer: str | None,
) -> None:
    reading = whole.read(Sample("1", question, (), options, gold, kind, "s", "c"), output, False)
    assert reading.answer == answer
    assert reading.score == float(answer == gold.replace(".0", "") and answer is not None)


def test_the_length_limit_leaves_the_last_statement_open(whole: WholeReader) -> None:
    sample = Sample("1", PEOPLE, (), (), "3", "numerical", "s", "c")
    assert whole.read(sample, "The answer is 3", True).answer is None
    assert whole.read(sample, "The answer is 3. They sit and", True).answer == "3"


def test_captions_are_for_a_judge(whole: WholeReader) -> None:
    sample = Sample("1", "Describe.", (), (), "A", "free_form", "s", "c", details={"mc_question": "?"})
    assert whole.read(sample, "A man.", False).score is None


@pytest.mark.parametrize(
    ("answer", "voted"),
    [
        ("025", "25"),
        ("-0", "0"),
        ("3,159", "3159"),
        ("0.50", "0.5"),
        ("$7$", "7"),
        ("1, 234", "1, 234"),
        ("1,23", "1,23"),
    ],
)
def test_numbers_count_alike_in_votes(answer: str, voted: str) -> None:
    assert as_voted(answer) == voted
