"""Video-MMMU's rows become questions of a track, with options beyond the letter J, or open; names tell the track."""

from __future__ import annotations

import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_pipelines import video_mmmu
from data_pipelines.video_mmmu import VIDEO_MMMU
from tests.support.pipeline_rows import check_odd_rows, example, kept, one_row, parted, write_json, write_lines
from vlm_pg.rewards.gold import gold_faults
from vlm_pg.types import BadSample, MediaRef, Sample

ROW = {
    "id": "validation_Math_2",
    "question": "Which graph is it? <image 1>",
    "options": ["the first", "the second"],
    "answer": "B",
    "question_type": "multiple-choice",
    "link_selected": "https://www.youtube.com/watch?v=x",
    "track": "Adaptation",
}
OPEN = ROW | {"options": [], "question_type": "open"}


def only(**changes: Any) -> Sample:
    (sample,) = one_row(VIDEO_MMMU, ROW | changes)
    assert isinstance(sample, Sample), sample
    return sample


def test_the_example_is_what_becomes_of_the_published_row() -> None:
    example_sample = example(video_mmmu)
    media = (MediaRef("video", "Science/validation_Math_2.mp4"),)  # the domain's folder is found, not published
    assert replace(only(), where="", media=media) == example_sample
    assert only().media == (MediaRef("video", "validation_Math_2.mp4"),)


@pytest.mark.parametrize("count", [2, 10, 11, 14, 26])
def test_the_last_of_many_options_may_be_right_and_earns_the_reward(count: int) -> None:
    letter = string.ascii_uppercase[count - 1]
    sample = only(options=[f"text {number}" for number in range(count)], answer=letter)
    assert sample.options[-1] == f"{letter}. text {count - 1}" and sample.answer == letter
    assert list(gold_faults([sample])) == [None]


def test_a_letter_beyond_the_options_is_refused() -> None:
    (one,) = one_row(VIDEO_MMMU, ROW | {"options": [f"text {number}" for number in range(10)], "answer": "K"})
    assert isinstance(one, BadSample) and one.reason == "answer_not_in_options"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["red", "blue"], ("A. red", "B. blue")),
        (["A. red", "B. blue"], ("A. red", "B. blue")),
        ("['red', 'blue']", ("A. red", "B. blue")),
        ("['it\\'s red', \"it's blue\"]", ("A. it's red", "B. it's blue")),
        (["E. coli", "S. aureus"], ("A. E. coli", "B. S. aureus")),
        (["$1.00", " 2 "], ("A. $1.00", "B. 2")),
    ],
)
def test_options_have_letters_from_a_on_however_they_are_written(options: Any, expected: tuple[str, ...]) -> None:
    assert only(options=options).options == expected


@pytest.mark.parametrize("options", [[], "[]", "", None])
def test_an_open_question_has_none(options: Any) -> None:
    sample = only(**(OPEN | {"options": options, "answer": "Transformation"}))
    assert (sample.options, sample.answer_kind, sample.answer) == ((), "exact", "Transformation")
    assert sample.details["question_type"] == "open"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [("['24/7', '3.429', '3.43]", "exact"), ("C", "exact"), ("1.06", "numerical"), ("0.286", "mathematics")],
)
def test_odd_open_answers_are_kept_as_published(answer: str, kind: str) -> None:
    sample = only(**(OPEN | {"answer": answer}))
    assert (sample.answer, sample.answer_kind) == (answer, kind)
    assert list(gold_faults([sample])) == [None]


def test_options_of_a_question_without_a_type_are_options() -> None:
    sample = only(question_type="None")
    assert sample.answer_kind == "multiple_choice" and sample.details["question_type"] == "None"


@pytest.mark.parametrize(
    ("name", "subject"),
    [
        ("validation_Basic_Medical_Science_10", "Basic_Medical_Science"),
        ("dev_Math_1", "Math"),
        ("new_Art_Theory_3", "Art_Theory"),
    ],
)
def test_the_subject_stands_between_the_first_and_last_underscore_of_the_id(name: str, subject: str) -> None:
    assert only(id=name).details["subject"] == subject


def test_only_adaptation_has_a_video_of_its_picture_alone() -> None:
    assert only().details["question_only"] == "question_only/validation_Math_2_image.mp4"
    for track in ("Perception", "Comprehension"):
        sample = only(track=track)
        assert "question_only" not in sample.details and sample.category == sample.details["track"] == track


@pytest.mark.parametrize("name", ["Adaptation.json", "video_mmmu_adaptation.jsonl", "Adaptation/test.json"])
def test_the_name_of_the_file_or_its_folder_tells_the_track(tmp_path: Path, name: str) -> None:
    rows = [{key: value for key, value in ROW.items() if key != "track"}]
    write = write_lines if name.endswith(".jsonl") else write_json
    (sample,) = kept(VIDEO_MMMU, write(tmp_path / "x" / name, rows))
    assert (sample.sample_id, sample.category) == ("Adaptation_validation_Math_2", "Adaptation")


def test_a_file_whose_name_does_not_tell_it_is_refused(tmp_path: Path) -> None:
    _, (refused,) = parted(VIDEO_MMMU, write_json(tmp_path / "x" / "y" / "z.json", [ROW]))
    assert refused.reason == "unknown_track" and "Files of Perception, Comprehension, Adaptation" in refused.message


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("too_few_options", {"options": []}),
        ("too_few_options", {"options": ["one"], "answer": "A"}),
        ("unknown_question_type", {"question_type": "essay"}),
        ("bad_options", {"options": "red or blue"}),
        ("bad_options", {"options": "[" * 5_000}),
        ("bad_options", {"options": "[" * 50_000}),
        ("bad_options", {"options": "{'A': 'red'}"}),
        ("wrong_type", {"options": ["red", 2]}),
        ("bad_options", {"options": [f"text {number}" for number in range(27)]}),
        ("no_gold_answer", {"answer": " "}),
    ],
)
def test_rows_that_do_not_fit_are_refused(reason: str, changes: dict[str, Any]) -> None:
    (one,) = one_row(VIDEO_MMMU, ROW | changes)
    assert isinstance(one, BadSample) and one.reason == reason


def test_odd_rows_are_refused() -> None:
    for row in (ROW, OPEN):
        refused = dict(check_odd_rows(VIDEO_MMMU, row, added=["track"]))
        assert refused["without options"].reason == "missing_field" and refused["id=[]"].reason == "wrong_type"
        assert refused["options=7.5"].reason == "bad_options" and refused["question=''"].reason == "missing_field"
