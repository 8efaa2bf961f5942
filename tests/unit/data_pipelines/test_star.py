"""STAR as published becomes multiple choice records with clips; every row is kept or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data_pipelines import star
from data_pipelines.star import STAR
from tests.support.pipeline_rows import check_odd_rows, example, kept, verdicts
from vlm_pg.types import MediaRef, Sample

PUBLISHED: dict[str, Any] = {
    "question_id": "Interaction_T1_13",
    "question": "Which object was tidied up by the person?",
    "video_id": "6H78U",
    "start": 11.1,
    "end": 19.6,
    "answer": "The clothes.",
    "question_program": [{"function": "Situations", "value_input": []}],
    "choices": [
        {"choice_id": number, "choice": text, "choice_program": [{"function": "Equal", "value_input": [text]}]}
        for number, text in enumerate(("The closet/cabinet.", "The blanket.", "The clothes.", "The table."))
    ],
    "situations": {"000198": {"rel_pairs": [["o000", "o003"]], "rel_labels": ["r002"]}},
}


def file_of(folder: Path, *rows: Any, name: str = "STAR_val.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(rows))
    return path


def choices(*texts: str) -> list[dict[str, Any]]:
    return [{"choice_id": number, "choice": text} for number, text in enumerate(texts)]


def test_a_published_row_is_the_example(tmp_path: Path) -> None:
    assert kept(STAR, file_of(tmp_path, PUBLISHED)) == [
        Sample(
            "Interaction_T1_13",
            "Which object was tidied up by the person?",
            (MediaRef("video", "6H78U.mp4", start=11.1, end=19.6),),
            ("A. The closet/cabinet.", "B. The blanket.", "C. The clothes.", "D. The table."),
            "C",
            "multiple_choice",
            "star",
            "Interaction",
        )
    ]
    assert kept(STAR, file_of(tmp_path, PUBLISHED)) == [example(star)]


def test_rows_are_kept_or_refused_one_by_one(tmp_path: Path) -> None:
    rows = [
        PUBLISHED | {"question_id": "Sequence_T1_0", "start": 0, "end": 4},
        PUBLISHED | {"question_id": "Prediction_T2_1", "answer": "The shoe."},
        PUBLISHED | {"question_id": "Prediction_T2_2", "answer": None},
        PUBLISHED
        | {"question_id": "Feasibility_T3_3", "choices": choices("Wash.", "Wash.", "Dry."), "answer": "Wash."},
        PUBLISHED | {"question_id": "Feasibility_T3_4", "choices": choices("Wash.", "Wash.", "Dry."), "answer": "Dry."},
        PUBLISHED | {"question_id": "Feasibility_T3_5", "start": 19.6, "end": 11.1},
        PUBLISHED | {"question_id": "Feasibility_T3_6", "start": "11.1"},
        PUBLISHED | {"question_id": "Feasibility_T3_7", "choices": choices("The clothes.")},
        PUBLISHED | {"question_id": "Feasibility_T3_8", "choices": choices(*map(str, range(26)), "The clothes.")},
    ]
    assert verdicts(STAR, file_of(tmp_path, *rows)) == [
        ("Sequence_T1_0", "C"),
        ("Prediction_T2_1", "refused: answer_not_in_options"),
        ("Prediction_T2_2", "refused: missing_field"),
        ("Feasibility_T3_3", "refused: ambiguous_answer"),
        ("Feasibility_T3_4", "C"),
        ("Feasibility_T3_5", "refused: bad_clip"),
        ("Feasibility_T3_6", "refused: wrong_type"),
        ("Feasibility_T3_7", "refused: too_few_options"),
        ("Feasibility_T3_8", "refused: bad_options"),
    ]


def test_rows_of_the_file_without_answers_are_refused(tmp_path: Path) -> None:
    without = {name: value for name, value in PUBLISHED.items() if name != "answer"}
    path = file_of(tmp_path, without, name="STAR_test.json")
    assert verdicts(STAR, path) == [("Interaction_T1_13", "refused: missing_field")]


def test_odd_rows_are_refused_and_never_a_surprise(tmp_path: Path) -> None:
    assert len(check_odd_rows(STAR, PUBLISHED)) > 100
