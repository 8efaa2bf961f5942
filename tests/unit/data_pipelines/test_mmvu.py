"""MMVU's rows become questions with options or open ones about local videos; what does not fit is refused."""

from __future__ import annotations

from typing import Any

import pytest

from data_pipelines import mmvu
from data_pipelines.engine.answers import open_answer
from data_pipelines.mmvu import MMVU
from tests.support.pipeline_rows import check_example, check_odd_rows, one_row
from vlm_pg.rewards.gold import gold_faults
from vlm_pg.types import BadSample, MediaRef, Sample

HUB = "https://huggingface.co/datasets/yale-nlp/MMVU/resolve/main/videos"
CHOSEN = {
    "id": "validation_1",
    "video": f"{HUB}/Chemistry/0.mp4",
    "youtube_url": "https://www.youtube.com/watch?v=6HuyUxJBY3E",
    "question_type": "multiple-choice",
    "metadata": {"subject": "Chemistry", "textbook": "Chemistry", "knowledge": [], "rationale": "..."},
    "question": "... how many grams of precipitate are produced approximately?",
    "choices": {"A": "10.0", "B": "5.0", "C": "12.0", "D": "15.0", "E": "20.0"},
    "answer": "A",
}
OPEN = CHOSEN | {"question_type": "open-ended", "choices": dict.fromkeys("ABCDE", ""), "answer": "Dolly Zoom"}


def test_the_example_is_what_becomes_of_the_published_row() -> None:
    check_example(mmvu, CHOSEN)


@pytest.mark.parametrize("choices", [dict.fromkeys("ABCDE", ""), dict.fromkeys("ABCDE"), {}, None])
def test_an_open_question_has_no_options_however_that_is_written(choices: Any) -> None:
    (sample,) = one_row(MMVU, OPEN | {"choices": choices})
    assert isinstance(sample, Sample)
    assert (sample.options, sample.answer, sample.answer_kind) == ((), "Dolly Zoom", "exact")
    assert sample.details == {"subject": "Chemistry", "question_type": "open-ended"}


@pytest.mark.parametrize(
    ("gold", "kind"),
    [
        ("48", "numerical"), ("-1.5", "numerical"), ("1.06", "numerical"), ("3.429", "mathematics"),
        ("24/7", "mathematics"), ("A", "exact"), ("Yes", "yes/no"), ("no", "yes/no"), ("C. elegans", "exact"),
        ("84 g/mol", "exact"), ("1,249.24", "numerical"), ("['24/7', '3.429', '3.43]", "exact"),
        ("Yes, it is", "exact"), ("1e5", "exact"),
    ],
)  # fmt: skip
def test_open_answers_are_of_the_kind_that_checks_them_best(gold: str, kind: str) -> None:
    found = open_answer(f" {gold} ")
    assert found["problem_type"] == kind
    assert found["solution"] == f"<answer>{gold.lower() if kind == 'yes/no' else gold}</answer>"
    (sample,) = one_row(MMVU, OPEN | {"answer": gold})
    assert isinstance(sample, Sample) and list(gold_faults([sample])) == [None]


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"video": f"{HUB}/Modern_Physics/12.mp4"}, "videos/Modern_Physics/12.mp4"),
        ({"video": f" {HUB}/Modern%20Physics/12.mp4"}, "videos/Modern Physics/12.mp4"),
        ({"video_path": "videos/Art/1.mp4"}, "videos/Art/1.mp4"),
        ({"video_path": "./data/videos/Art/1.mp4"}, "videos/Art/1.mp4"),
        ({"video_path": None}, "videos/Chemistry/0.mp4"),
    ],
)
def test_the_video_is_a_path_below_the_root(changes: dict[str, Any], path: str) -> None:
    (sample,) = one_row(MMVU, CHOSEN | changes)
    assert isinstance(sample, Sample) and sample.media == (MediaRef("video", path),)


@pytest.mark.parametrize("metadata", [None, {}, {"subject": None}])
def test_without_metadata_the_folder_names_the_subject(metadata: Any) -> None:
    (sample,) = one_row(MMVU, CHOSEN | {"metadata": metadata, "video": f"{HUB}/Modern_Physics/1.mp4"})
    assert isinstance(sample, Sample) and sample.category == sample.details["subject"] == "Modern Physics"


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("unknown_question_type", {"question_type": "essay"}),
        ("bad_options", {"question_type": "open-ended"}),
        ("bad_options", {"choices": {"A": "1", "C": "2"}}),
        ("bad_options", {"choices": {"A": "1", "B": "", "C": "2"}}),
        ("bad_options", {"choices": {"A": "1", "B": 2}}),
        ("answer_not_in_options", {"answer": "F"}),
        ("no_gold_answer", {"answer": None}),
        ("bad_media", {"video": "https://www.youtube.com/watch?v=6HuyUxJBY3E"}),
        ("bad_media", {"video": "videos"}),
        ("missing_field", {"question": ""}),
    ],
)
def test_rows_that_do_not_fit_are_refused(reason: str, changes: dict[str, Any]) -> None:
    (one,) = one_row(MMVU, CHOSEN | changes)
    assert isinstance(one, BadSample) and one.reason == reason


def test_odd_rows_are_refused() -> None:
    for row in (CHOSEN, OPEN):
        refused = dict(check_odd_rows(MMVU, row))
        assert refused["without answer"].reason == "missing_field" and refused["video=[]"].reason == "wrong_type"
        assert refused["choices=7.5"].reason == "wrong_type" and refused["choices.A=7.5"].reason == "bad_options"
