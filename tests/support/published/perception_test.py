"""Perception Test: deepmind's objects keyed by video, with the map of cuts, and lmms-lab's Parquet."""

from __future__ import annotations

from typing import Any

from tests.support.published.case import Published, media, video
from vlm_pg.types import Sample


def question_row(
    number: int, answer: int | None, options: tuple[str, ...] = ("left", "middle", "right")
) -> dict[str, Any]:
    """One question; None: without an answer, as in the test file."""
    question: dict[str, Any] = {"id": number, "question": "Under which cup is it?", "options": list(options)}
    question |= {"area": "memory", "reasoning": "descriptive", "tag": ["object permanence", "occlusion"]}
    return question if answer is None else question | {"answer_id": answer}


def film(name: str, *questions: Any, **changes: Any) -> dict[str, Any]:
    metadata = {"split": "train", "video_id": name, "frame_rate": 29.97, "num_frames": 300, "resolution": [1080, 1920]}
    metadata |= {"audio_samples": 480_000, "is_cup_game": 1, "is_camera_moving": 0}
    return {name: {"metadata": metadata | changes, "mc_question": list(questions)}}


TRAIN = {
    **film("video_1", question_row(0, 1), question_row(2, 0), is_cup_game=0),
    **film(
        "video_2",
        question_row(0, 2),
        question_row(1, 3),
        question_row(2, -1),
        question_row(3, 0, ("left", "right", "left")),
    ),
    **film("video_3", question_row(0, 1)),
    **film("video_4", question_row(0, 1), frame_rate=None),
    **film("video_5", question_row(0, 1)),
    **film("video_6"),
    **film("video_7", question_row(0, 1)),
}
VALID = film("video_10309", question_row(2, 1), split="valid", frame_rate=30.0)
TEST = film("video_20000", question_row(0, None), split="test")
CUTS = {"video_1": -1, "video_2": 60, "video_3": 301, "video_4": 60, "video_6": -1, "video_7": 90}


def sample(name: str, path: str, end: float | None, answer: str, category: str = "memory") -> Sample:
    options = ("A. left", "B. middle", "C. right")
    question_row = "Under which cup is it?"
    return Sample(
        name, question_row, video(path, end=end), options, answer, "multiple_choice", "perception_test", category
    )


def kept(folder: str) -> tuple[list[Sample], list[Sample]]:
    return [
        sample("video_1_0", f"{folder}/video_1.mp4", None, "B"),
        sample("video_1_2", f"{folder}/video_1.mp4", None, "A"),
        # Half a frame before frame 60: 59.5 / 29.97 s.
        sample("video_2_0", f"{folder}/video_2.mp4", 1.985, "C"),
    ], [sample("video_10309_2", f"{folder}/video_10309.mp4", 1.983, "B")]


def videos(folder: str) -> dict[str, None]:
    return media(*(f"{folder}/video_{number}.mp4" for number in (1, 2, 3, 4, 5, 6, 10309, 20000)))


REFUSED = [
    ("mc_question_train.json:1, record 2", "video_2_1", "answer_not_in_options"),
    ("mc_question_train.json:1, record 2", "video_2_2", "answer_not_in_options"),
    ("mc_question_train.json:1, record 2", "video_2_3", "bad_options"),
    ("mc_question_train.json:1, record 3", "video_3_0", "bad_cut"),
    ("mc_question_train.json:1, record 4", "video_4_0", "no_frame_rate"),
    ("mc_question_train.json:1, record 5", "video_5_0", "unknown_cut"),
    ("mc_question_train.json:1, record 7", "video_7_0", "missing_media"),
]
UNASKED = {"videos without a question of multiple choice": 1}
OBJECTS = {"mc_question_train.json": TRAIN, "mc_question_valid.json": VALID, "mc_question_test.json": TEST}
# Maps list the videos of their own split; video_5 is in that of another one only, which says nothing.
MAPS = {"cut_frame_mapping_train.json": CUTS, "cut_frame_mapping_valid.json": {"video_10309": 60, "video_5": -1}}
SHARD = "mc_question_val/validation-00000-of-00001.parquet"


def text_row(name: str, number: str, answer: str, area: str = "semantics") -> dict[str, Any]:
    row = question_row(0, None) | {"video_name": name, "question_id": number, "answer_id": answer, "area": area}
    del row["id"]
    return row


CASES = {
    "objects by video": Published({**OBJECTS, **MAPS, **videos("videos")}, *kept("videos"), REFUSED, left_out=UNASKED),
    "Parquet, all of it text": Published(
        {
            SHARD: [
                text_row("video_1", "0", "2"),
                text_row("video_1", "11", "0", "physics"),
                text_row("video_2", "0", "1"),
                text_row("video_5", "0", "1"),
                text_row("video_6", "0", "3"),
            ],
            "cut_frame_mapping_valid.json": CUTS,
            **videos("videos"),
        },
        (),
        [
            sample("video_1_0", "videos/video_1.mp4", None, "C", "semantics"),
            sample("video_1_11", "videos/video_1.mp4", None, "A", "physics"),
        ],
        [
            ("validation-00000-of-00001.parquet:3", "video_2_0", "no_frame_rate"),
            ("validation-00000-of-00001.parquet:4", "video_5_0", "unknown_cut"),
            ("validation-00000-of-00001.parquet:5", "video_6_0", "answer_not_in_options"),
        ],
        forms=(1,),
    ),
}
