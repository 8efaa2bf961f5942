"""TempCompass's questions become records of the kind that their task asks for, with what its own scoring needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data_pipelines import tempcompass
from data_pipelines.tempcompass import TEMPCOMPASS
from tests.support.pipeline_rows import (
    check_example,
    check_odd_rows,
    one_row,
    outcomes,
    reasons_of,
    samples_of,
    write_json,
)
from vlm_pg.types import BadSample, Sample

CHOICE = (
    "What is the man doing in the video?\nA. dunking a basketball\nB. dribbling a basketball\nC. passing a basketball"
)
VIDEO: dict[str, Any] = {
    "video_id": "1034419625",
    "action": [{"question": CHOICE, "answer": "A. dunking a basketball"}],
    "task": "multi-choice",
    "fine": {"action": "fine-grained action"},
    "judged": {},
}
ROW = {"video_id": "7", "dim": "speed", "number": 2, "fine_dim": None}
ADDED = ("task", "fine", "judged", "number", "fine_dim")


def of(task: str, question: str, answer: Any, **more: Any) -> Sample | BadSample:
    (one,) = one_row(TEMPCOMPASS, {**ROW, "task": task, "question": question, "answer": answer, **more}, form=1)
    return one


def test_the_example_is_what_becomes_of_the_published_question() -> None:
    check_example(tempcompass, VIDEO)


@pytest.mark.parametrize("answer", ["A. dunking a basketball", "B. dribbling a basketball", "C. passing a basketball"])
def test_question_and_options_together_are_the_published_text(answer: str) -> None:
    sample = of("multi-choice", CHOICE, answer)
    assert isinstance(sample, Sample)
    assert "\n".join((sample.question, *sample.options)) == CHOICE == sample.details["question"]
    assert (sample.answer, sample.details["answer"]) == (answer[0], answer)


@pytest.mark.parametrize(
    ("first", "second"), [("Option 1", "Option 2"), ("Sentence A", "Sentence B"), ("Caption A", "Caption B")]
)
def test_captions_get_letters_and_keep_their_names_in_the_details(first: str, second: str) -> None:
    published = f"Which is it?\n{first}: He says: go.\n{second}: He sits."
    sample = of("caption_matching", published, f"{second}: He sits.")
    assert isinstance(sample, Sample)
    assert (sample.question, sample.options, sample.answer) == ("Which is it?", ("A. He says: go.", "B. He sits."), "B")
    assert sample.details["question"] == published and sample.sample_id == "caption_matching_7_speed_2"


@pytest.mark.parametrize(
    "lines", ["Option 1: a.", "Option 1: a.\nOption 2: b.\nOption 1: c.", "Option 1: a.\nB. b.", "Caption C: a.\nb", ""]
)
def test_other_lines_than_two_captions_are_refused(lines: str) -> None:
    bad = of("caption_matching", f"Which is it?\n{lines}", "Option 1: a.")
    assert isinstance(bad, BadSample) and bad.reason == "bad_options"


def test_a_caption_is_judged_by_the_first_multi_choice_question_about_its_video_and_dimension(tmp_path: Path) -> None:
    asked = {"question": "Caption it.\nGenerated Caption:", "answer": "A. up"}
    first, later = ({"question": f"{which}?\nA. up\nB. down", "answer": "A. up"} for which in ("Where", "Whither"))
    write_json(tmp_path / "multi-choice.json", {"1": {"direction": [first, later]}, "2": {"speed": [first]}})
    path = write_json(
        tmp_path / "captioning.json", {"1": {"direction": [asked, asked], "speed": [asked]}, "2": {"order": [asked]}}
    )
    found = outcomes(TEMPCOMPASS, path)
    judged = {name: one.details["mc_question"] for name, one in samples_of(found).items()}
    assert judged == dict.fromkeys(("captioning_1_direction_1", "captioning_1_direction_2"), "Where?\nA. up\nB. down")
    assert reasons_of(found) == dict.fromkeys(("captioning_1_speed_1", "captioning_2_order_1"), "no_mc_question")


@pytest.mark.parametrize(("answer", "gold"), [("yes", "yes"), ("No", "no"), (" no ", "no")])
def test_yes_no_questions(answer: str, gold: str) -> None:
    sample = of("yes_no", "Is it?", answer)
    assert isinstance(sample, Sample) and (sample.answer, sample.answer_kind) == (gold, "yes_no")


def test_a_file_that_is_called_like_no_task_is_refused() -> None:
    bad = of("open-ended", "What?", "that")
    assert isinstance(bad, BadSample) and bad.reason == "unknown_task"


@pytest.mark.parametrize(
    ("form", "row"),
    [
        (0, VIDEO),
        (1, {**ROW, "task": "multi-choice", "question": CHOICE, "answer": "A. dunking a basketball"}),
        (1, {**ROW, "task": "yes_no", "question": "Is it?", "answer": "yes"}),
        (
            1,
            {**ROW, "task": "captioning", "question": "So:", "answer": "A. x", "mc_question": "q", "mc_answer": "A. x"},
        ),
    ],
)
def test_odd_rows_are_refused_and_never_a_surprise(form: int, row: dict[str, Any]) -> None:
    assert len(check_odd_rows(TEMPCOMPASS, row, form, added=ADDED)) > 40
