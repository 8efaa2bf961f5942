"""Perception Test as published becomes multiple choice records; no video is shown beyond where it is to be cut."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from data_pipelines import perception_test
from data_pipelines.perception_test import PERCEPTION_TEST
from tests.support.pipeline_rows import check_odd_rows, example, kept, outcomes, rows_of, verdicts
from vlm_pg.errors import ConfigError
from vlm_pg.types import BadSample, MediaRef, Sample

CUPS = ["the left one", "the middle one", "the right one"]


def metadata(video: str, **changes: Any) -> dict[str, Any]:
    return {
        "split": "valid",
        "video_id": video,
        "frame_rate": 30.0,
        "num_frames": 300,
        "resolution": [1080, 1920],
        "is_cup_game": 1,
        "is_camera_moving": 0,
    } | changes


def question(number: Any = 2, **changes: Any) -> dict[str, Any]:
    return {
        "id": number,
        "question": "Under which cup is the ball at the end?",
        "options": CUPS,
        "answer_id": 1,
        "area": "memory",
        "reasoning": "descriptive",
        "tag": ["object permanence", "occlusion"],
    } | changes


def video_of(name: str, *questions: Any, **changes: Any) -> dict[str, Any]:
    return {name: {"metadata": metadata(name, **changes), "mc_question": list(questions)}}


def file_of(folder: Path, videos: Mapping[str, Any], cuts: Any = None) -> Path:
    path = folder / "mc_question_valid.json"
    path.write_text(json.dumps(videos))
    if cuts is not None:
        (folder / "cut_frame_mapping_valid.json").write_text(json.dumps(cuts))
    return path


def parquet_of(folder: Path, *videos: str) -> Path:
    """As lmms-lab has it, a row a question and all of it text."""
    rows = [
        {
            "video_name": video,
            "question": "Which object is moved?",
            "question_id": "0",
            "options": CUPS,
            "answer_id": "2",
            "area": "semantics",
            "reasoning": "descriptive",
            "tag": ["object recognition"],
        }
        for video in videos
    ]
    shards = folder / "mc_question_val"
    shards.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), shards / "validation-00000-of-00001.parquet")
    return Path(f"{shards}:validation")


def test_a_published_question_is_the_example(tmp_path: Path) -> None:
    path = file_of(tmp_path, video_of("video_10309", question()), {"video_10309": 60})
    assert kept(PERCEPTION_TEST, path) == [
        Sample(
            "video_10309_2",
            "Under which cup is the ball at the end?",
            (MediaRef("video", "video_10309.mp4", end=1.983),),
            ("A. the left one", "B. the middle one", "C. the right one"),
            "B",
            "multiple_choice",
            "perception_test",
            "memory",
        )
    ]
    assert kept(PERCEPTION_TEST, path) == [example(perception_test)]


def test_a_row_of_the_parquet_is_the_same_question(tmp_path: Path) -> None:
    (tmp_path / "cut_frame_mapping_valid.json").write_text('{"video_8241": -1}')
    assert kept(PERCEPTION_TEST, parquet_of(tmp_path, "video_8241")) == [
        Sample(
            "video_8241_0",
            "Which object is moved?",
            (MediaRef("video", "video_8241.mp4"),),
            ("A. the left one", "B. the middle one", "C. the right one"),
            "C",
            "multiple_choice",
            "perception_test",
            "semantics",
        )
    ]


@pytest.mark.parametrize(("rate", "cut"), [(30.0, 60), (29.97002997002997, 61), (25, 1), (15.0, 300)])
def test_no_frame_is_shown_from_the_cut_on_and_all_before_are(tmp_path: Path, rate: float, cut: int) -> None:
    path = file_of(tmp_path, video_of("video_1", question(), frame_rate=rate), {"video_1": cut})
    (sample,) = kept(PERCEPTION_TEST, path)
    end = sample.media[0].end
    assert end is not None and [frame for frame in range(400) if frame / rate <= end] == list(range(cut))


@pytest.mark.parametrize("place", [".", ".."])
def test_the_map_is_found_beside_the_annotations_or_above(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "annotations"
    folder.mkdir()
    path = file_of(folder, video_of("video_1", question()) | video_of("video_2", question()))
    (folder / place / "cut_frame_mapping_valid.json").write_text('{"video_1": 30, "video_2": -1}')
    assert [one.media[0].end for one in kept(PERCEPTION_TEST, path)] == [0.983, None]


@pytest.mark.parametrize(
    ("cuts", "changes", "verdict"),
    [
        ({"video_1": -1}, {}, "B"),
        ({"video_1": 300}, {}, "B"),
        ({"video_1": 300}, {"num_frames": None}, "B"),
        (None, {}, "refused: unknown_cut"),
        ({}, {}, "refused: unknown_cut"),
        ({"video_2": -1}, {}, "refused: unknown_cut"),
        ({"video_2": 30}, {}, "refused: unknown_cut"),
        ({"video_1": 0}, {}, "refused: bad_cut"),
        ({"video_1": -2}, {}, "refused: bad_cut"),
        ({"video_1": 301}, {}, "refused: bad_cut"),
        ({"video_1": 30.5}, {}, "refused: bad_cut"),
        ({"video_1": True}, {}, "refused: bad_cut"),
        ({"video_1": [30]}, {}, "refused: bad_cut"),
        ({"video_1": None}, {}, "refused: unknown_cut"),
        ({"video_1": 30}, {"frame_rate": None}, "refused: no_frame_rate"),
        ({"video_1": 30}, {"frame_rate": 0}, "refused: no_frame_rate"),
        ({"video_1": 30}, {"frame_rate": "30"}, "refused: no_frame_rate"),
        ({"video_1": -1}, {"frame_rate": None}, "B"),
    ],
)
def test_what_may_show_the_answer_is_refused(tmp_path: Path, cuts: Any, changes: dict[str, Any], verdict: str) -> None:
    path = file_of(tmp_path, video_of("video_1", question(), **changes), cuts)
    assert verdicts(PERCEPTION_TEST, path) == [("video_1_2", verdict)]


def test_maps_that_disagree_are_refused(tmp_path: Path) -> None:
    (tmp_path / "annotations").mkdir()
    path = file_of(tmp_path / "annotations", video_of("video_1", question()), {"video_1": 60})
    (tmp_path / "cut_frame_mapping_valid.json").write_text('{"video_1": -1}')
    (refused,) = outcomes(PERCEPTION_TEST, path)
    assert isinstance(refused, BadSample) and "to be cut at 60 and -1" in refused.message


@pytest.mark.parametrize(
    ("maps", "split", "verdict"),
    [
        ({"train": {"video_2": 30}}, "valid", "refused: unknown_cut"),
        ({"train": {"video_1": -1}}, "valid", "refused: unknown_cut"),
        ({"train": {"video_1": 30}, "valid": {"video_2": -1}}, "valid", "refused: unknown_cut"),
        ({"train": {"video_1": 500}, "valid": {"video_1": -1}}, "valid", "B"),
        # Its metadata know better than the name of the file ("valid"), which says it where they do not.
        ({"train": {"video_1": -1}}, "train", "B"),
        ({"train": {"video_1": -1}}, "test", "refused: unknown_cut"),
        ({"valid": {"video_1": -1}}, "validation", "B"),
        ({"valid": {"video_1": -1}}, None, "B"),
        ({"train": {"video_1": -1}}, None, "refused: unknown_cut"),
        ({"valid": {"video_1": -1}}, "odd", "refused: unknown_cut"),
    ],
)
def test_only_the_map_of_its_own_split_counts(
    tmp_path: Path, maps: dict[str, Any], split: str | None, verdict: str
) -> None:
    path = file_of(tmp_path, video_of("video_1", question(), split=split))
    for name, cuts in maps.items():
        (tmp_path / f"cut_frame_mapping_{name}.json").write_text(json.dumps(cuts))
    assert verdicts(PERCEPTION_TEST, path) == [("video_1_2", verdict)]


def test_a_refusal_names_the_map_that_lacks_the_video_or_that_none_can_be_chosen(tmp_path: Path) -> None:
    path = file_of(tmp_path, video_of("video_1", question()), {})
    (refused,) = outcomes(PERCEPTION_TEST, path)
    assert isinstance(refused, BadSample) and "no cut_frame_mapping_valid.json beside" in refused.message
    other = path.rename(tmp_path / "questions.json")
    other.write_text(json.dumps(video_of("video_1", question(), split=None)))
    (refused,) = outcomes(PERCEPTION_TEST, other)
    assert isinstance(refused, BadSample) and "neither metadata nor file name say the split" in refused.message


def test_rows_of_the_parquet_are_refused_where_the_video_is_cut_or_not_listed(tmp_path: Path) -> None:
    (tmp_path / "cut_frame_mapping_valid.json").write_text('{"video_1": -1, "video_2": 60}')
    assert verdicts(PERCEPTION_TEST, parquet_of(tmp_path, "video_1", "video_2", "video_3")) == [
        ("video_1_0", "C"),
        ("video_2_0", "refused: no_frame_rate"),
        ("video_3_0", "refused: unknown_cut"),
    ]


def test_a_map_that_is_none_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cut_frame_mapping_valid\.json"):
        verdicts(PERCEPTION_TEST, file_of(tmp_path, video_of("video_1", question()), ["video_1"]))


def test_questions_without_ids_are_not_called_like_rows(tmp_path: Path) -> None:
    nobody = [question(None), question(None), question(None)]
    videos = video_of("video_1", *nobody) | {"video_3": 3}
    names = [name for name, _ in verdicts(PERCEPTION_TEST, file_of(tmp_path, videos, {"video_1": -1}))]
    assert names == [*(f"mc_question_valid-1-{number}" for number in (1, 2, 3)), "mc_question_valid-1.2"]


def test_questions_are_kept_or_refused_one_by_one(tmp_path: Path) -> None:
    without = question(9)
    del without["answer_id"]
    questions = [
        question(0, answer_id=0),
        question(1, answer_id="2"),
        question(2, answer_id=3),
        question(3, answer_id=-1),
        question(4, answer_id=None),
        question(5, options=["a cup", "a ball", "a cup"], answer_id=1),
        question(6, options=["a cup", "a ball", "a cup"], answer_id=2),
        question(7, options=None),
        question(8, options=["a cup", 3]),
        without,
        "What?",
    ]
    videos = video_of("video_1", *questions) | video_of("video_2") | {"video_3": 3} | video_of("video_4", question(0))
    assert verdicts(PERCEPTION_TEST, file_of(tmp_path, videos, dict.fromkeys(videos, -1))) == [
        ("video_1_0", "A"),
        ("video_1_1", "C"),
        ("video_1_2", "refused: answer_not_in_options"),
        ("video_1_3", "refused: answer_not_in_options"),
        ("video_1_4", "refused: missing_field"),
        ("video_1_5", "B"),
        ("video_1_6", "refused: bad_options"),
        ("video_1_7", "refused: missing_field"),
        ("video_1_8", "refused: wrong_type"),
        ("video_1_9", "refused: missing_field"),
        ("mc_question_valid-1-11", "refused: wrong_type"),
        ("mc_question_valid-1.3", "refused: not_a_record"),
        ("video_4_0", "B"),
    ]


def test_videos_without_a_question_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    videos = video_of("video_1", question()) | video_of("video_2") | video_of("video_3")
    path = file_of(tmp_path, videos, {"video_1": -1})
    arguments = ["--eval", str(path), "--out", str(tmp_path / "out"), "--skip-media-check", "--workers", "0"]
    assert perception_test.main(arguments) == 0
    assert "left out      2  videos without a question of multiple choice" in capsys.readouterr().out
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["left_out"] == {"videos without a question of multiple choice": 2} and report["refused"] == {}


def test_odd_rows_are_refused_and_never_a_surprise(tmp_path: Path) -> None:
    videos = video_of("video_1", question())
    (published,) = rows_of(PERCEPTION_TEST, file_of(tmp_path, videos, {"video_1": 60}))
    (row,) = rows_of(PERCEPTION_TEST, parquet_of(tmp_path, "video_1"))
    found = check_odd_rows(PERCEPTION_TEST, published, added=["video_name", "cut", "map"])
    assert len(found + check_odd_rows(PERCEPTION_TEST, row, 1, ["cut", "map"])) > 200
