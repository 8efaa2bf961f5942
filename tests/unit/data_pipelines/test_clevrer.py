"""CLEVRER as published becomes records of words, numbers and several right choices; each question stands for itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_pipelines import clevrer
from data_pipelines.clevrer import CLEVRER
from tests.support.pipeline_rows import check_odd_rows, example, kept, outcomes, verdicts
from vlm_pg.rewards import Response, Rewarder, RewardSettings
from vlm_pg.rewards.gold import gold_faults
from vlm_pg.types import BadSample, MediaRef, Sample

CHOICES = (
    "the presence of the gray cube",
    "the collision between the cube and the sphere",
    "the red object's entering the scene",
)
WORDS = ["yes", "no", "0", "1", "2", "3", "4", "5"]
WORDS += ["gray", "red", "blue", "green", "brown", "cyan", "purple", "yellow"]
WORDS += ["rubber", "metal", "cube", "sphere", "cylinder"]


def descriptive(number: int, answer: Any, **changes: Any) -> dict[str, Any]:
    return {
        "question_id": number,
        "question": "What is the answer?",
        "question_type": "descriptive",
        "question_subtype": "query",
        "program": ["events", "unique"],
        "answer": answer,
    } | changes


def of_choices(number: int, *judged: str, kind: str = "explanatory") -> dict[str, Any]:
    return {
        "question_id": number,
        "question": "Which of the following is responsible for the collision?",
        "question_type": kind,
        "program": ["events"],
        "choices": [
            {"choice_id": place, "choice": text, "program": ["objects"], "answer": answer}
            for place, (text, answer) in enumerate(zip(CHOICES, judged, strict=False))
        ],
    }


def scene(index: int, *questions: Any) -> dict[str, Any]:
    return {"scene_index": index, "video_filename": f"video_{index:05}.mp4", "questions": list(questions)}


def file_of(folder: Path, *scenes: Any) -> Path:
    path = folder / "validation.json"
    path.write_text(json.dumps(scenes))
    return path


def test_questions_are_asked_as_their_answers_are_checked_best(tmp_path: Path) -> None:
    media = (MediaRef("video", "video_10000.mp4"),)
    path = file_of(
        tmp_path,
        scene(10000, descriptive(0, "yes"), descriptive(1, "2"), descriptive(2, "rubber"), of_choices(11, *"cwc")),
    )
    path.write_text(path.read_text().replace('"c"', '"correct"').replace('"w"', '"wrong"'))
    what = "What is the answer?"
    options = tuple(f"{letter}. {text}" for letter, text in zip("ABC", CHOICES, strict=True))
    samples = kept(CLEVRER, path)
    assert samples[:3] == [
        Sample("video_10000_0", what, media, (), "yes", "yes_no", "clevrer", "descriptive"),
        Sample("video_10000_1", what, media, (), "2", "numerical", "clevrer", "descriptive"),
        Sample("video_10000_2", what, media, (), "rubber", "exact", "clevrer", "descriptive"),
    ]
    assert samples[3] == example(clevrer)
    assert (samples[3].options, samples[3].answer, samples[3].answer_kind) == (options, "A, C", "multiple_select")


@pytest.mark.parametrize("kind", ["explanatory", "predictive", "counterfactual"])
def test_none_one_or_several_choices_may_be_correct(tmp_path: Path, kind: str) -> None:
    """Also where one is: a question is right when every choice is."""
    judged = [("wrong", "wrong"), ("wrong", "correct"), ("correct", "correct"), ("correct", "wrong", "correct")]
    questions = [of_choices(number, *answers, kind=kind) for number, answers in enumerate(judged)]
    samples = kept(CLEVRER, file_of(tmp_path, scene(7, *questions)))
    assert [one.answer for one in samples] == ["none", "B", "A, B", "A, C"]
    assert {(one.answer_kind, one.category) for one in samples} == {("multiple_select", kind)}
    with Rewarder(RewardSettings()) as rewarder:
        answers = [["none"], ["B", "A, B", "none", "A"], ["A, B", "A", "B", "none"], ["A, C", "A", "A, B", "A, B, C"]]
        for sample, (right, *wrong) in zip(samples, answers, strict=True):
            scored = rewarder.score([Response(sample, f"<answer>{answer}</answer>") for answer in (right, *wrong)])
            assert [one.parts["accuracy"] for one in scored] == [1.0, *[0.0] * len(wrong)]


def test_each_of_the_21_words_earns_full_reward_and_no_other_does(tmp_path: Path) -> None:
    questions = [descriptive(number, word) for number, word in enumerate(WORDS)]
    samples = kept(CLEVRER, file_of(tmp_path, scene(3, *questions)))
    assert len(WORDS) == 21 and [one.answer for one in samples] == WORDS
    assert list(gold_faults(samples)) == [None] * 21
    with Rewarder(RewardSettings()) as rewarder:
        for sample in samples:
            scored = rewarder.score([Response(sample, f"<answer>{word}</answer>") for word in WORDS])
            assert [word for word, one in zip(WORDS, scored, strict=True) if one.parts["accuracy"]] == [sample.answer]


def test_questions_are_refused_one_by_one(tmp_path: Path) -> None:
    bad = of_choices(7, "correct", "wrong")
    twice = of_choices(8, "correct", "wrong")
    twice["choices"][1]["choice"] = twice["choices"][0]["choice"]
    questions = [
        descriptive(0, "no"),
        descriptive(1, "pink"),
        descriptive(2, "2.5"),
        descriptive(3, None),
        descriptive(4, "red", question_type="descriptiv"),
        descriptive(5, "red", question=""),
        of_choices(6, "correct", "maybe"),
        bad | {"choices": [{"choice_id": 0, "choice": "x"}]},
        twice,
        of_choices(9),
        "What?",
        descriptive(11, "red", question_id=None),
    ]
    rows = [scene(3, *questions), scene(4), {"scene_index": 5, "video_filename": "video_00005.mp4", "questions": None}]
    assert verdicts(CLEVRER, file_of(tmp_path, *rows, scene(6, descriptive(0, "red")))) == [
        ("video_00003_0", "no"),
        ("video_00003_1", "refused: unknown_answer"),
        ("video_00003_2", "refused: unknown_answer"),
        ("video_00003_3", "refused: missing_field"),
        ("video_00003_4", "refused: unknown_question_type"),
        ("video_00003_5", "refused: missing_field"),
        ("video_00003_6", "refused: unknown_answer"),
        ("video_00003_7", "refused: missing_field"),
        ("video_00003_8", "refused: bad_options"),
        ("video_00003_9", "refused: too_few_options"),
        ("validation-1-11", "refused: wrong_type"),
        ("validation-1-12", "red"),
        ("validation-1.2", "refused: no_questions"),
        ("validation-1.3", "refused: missing_field"),
        ("video_00006_0", "red"),
    ]


def test_the_file_without_answers_gives_no_record(tmp_path: Path) -> None:
    questions = [descriptive(0, ""), of_choices(1, "", "")]
    for question in (questions[0], *questions[1]["choices"]):
        del question["answer"]
    found = outcomes(CLEVRER, file_of(tmp_path, scene(15000, *questions)))
    assert [one.reason for one in found if isinstance(one, BadSample)] == ["missing_field"] * 2


def test_odd_rows_are_refused_and_never_a_surprise() -> None:
    assert len(check_odd_rows(CLEVRER, scene(1, descriptive(0, "red"), of_choices(1, "correct", "wrong")))) > 200
