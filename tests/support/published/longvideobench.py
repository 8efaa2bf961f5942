"""LongVideoBench: ``lvb_val.json`` and Parquet, videos in ``videos``, subtitles of two forms in ``subtitles``."""

from __future__ import annotations

from typing import Any

from tests.support.published.case import Published, media, stored, video
from vlm_pg.types import Sample

FIRST, SECOND, THIRD = "9PD3ciudpIE", "@someone-7240000000000000001", "mH9LdC7IFH8"
TEXTS = ["yellow", "green", "blue"]


def row(number: str, choice: int | None, **changes: Any) -> dict[str, Any]:
    name = number[:-2]
    fields = {"video_id": name, "question": "What colour is it?", "question_wo_referring_query": "What colour?"}
    fields |= {"candidates": TEXTS, "correct_choice": choice, "position": [3068, 4001], "level": "L1-Perception"}
    fields |= {"topic_category": "NP-News-Programs", "question_category": "T2A", "id": number, "duration": 61.5}
    fields |= {"video_path": f"{name}.mp4", "subtitle_path": f"{name}_en.json", "duration_group": 60}
    return fields | {"starting_timestamp_for_subtitles": 100, "view_count": 4172} | changes


ROWS = [
    row(f"{FIRST}_0", 0),
    row(f"{FIRST}_1", 2, question_category="TOS", duration_group=60),
    row(f"{SECOND}_0", 1, starting_timestamp_for_subtitles=0, duration=14.0, duration_group=15),
    row(f"{FIRST}_2", 3),
    row(f"{FIRST}_3", None),
    row("gone_0", 1),
    row(f"{FIRST}_4", 0, starting_timestamp_for_subtitles=None),
    row(f"{THIRD}_0", 0, duration=9.0),
]
# The clip is of seconds 100 to 161.5 of the video.
SAID = [
    {"start": "00:01:38.000", "end": "00:01:40.000", "line": "before"},
    {"start": "00:01:39.500", "end": "00:01:41.250", "line": "into it"},
    {"start": "00:02:00.000", "end": "00:02:02.5", "line": "amid\nit"},
    {"start": "00:02:41.500", "end": "00:02:43.000", "line": "after"},
]
TIMED = [{"timestamp": [0.0, 1.5], "text": "it"}, {"timestamp": [1.5, None], "text": "goes on"}]
# 99.5 s is before the clip; 101.25 - 100; 120 - 100; 122.5 - 100.
FIRST_VTT = "WEBVTT\n\n00:00:00.000 --> 00:00:01.250\ninto it\n\n00:00:20.000 --> 00:00:22.500\namid it\n"
SECOND_VTT = "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nit\n\n00:00:01.500 --> 00:00:14.000\ngoes on\n"
SUBTITLES = {f"subtitles/{FIRST}_en.json": SAID, f"subtitles/{SECOND}_en.json": TIMED}


def sample(number: str, path: str, vtt: str, answer: str, kind: str = "T2A", zero: int = 100, **details: Any) -> Sample:
    published = {"video_id": number[:-2], "duration_group": 60, "duration": 61.5, "question_category": kind}
    published |= {"topic_category": "NP-News-Programs", "level": "L1-Perception", "position": [3068, 4001]}
    published |= {"view_count": 4172, "question_wo_referring_query": "What colour?"}
    published |= {"starting_timestamp_for_subtitles": zero, "subtitle_path": f"{number[:-2]}_en.json"}
    ref = video(path, subtitles=vtt and stored(vtt.encode(), ".vtt"))
    options = ("A. yellow", "B. green", "C. blue")
    kinds = ("multiple_choice", "longvideobench", kind)
    return Sample(number, "What colour is it?", ref, options, answer, *kinds, details=published | details)


def kept(folder: str, first: str = FIRST_VTT, second: str = SECOND_VTT) -> list[Sample]:
    one, other = f"{folder}/{FIRST}.mp4", f"{folder}/{SECOND}.mp4"
    return [
        sample(f"{FIRST}_0", one, first, "A"),
        sample(f"{FIRST}_1", one, first, "C", "TOS"),
        sample(f"{SECOND}_0", other, second, "B", zero=0, duration=14.0, duration_group=15),
    ]


NAMES = (FIRST, SECOND, THIRD)
DAMAGED = {f"subtitles/{THIRD}_en.json": [{"timestamp": [3.0], "text": "it"}]}
REASONS = [
    (4, f"{FIRST}_2", "answer_not_in_options"),
    (5, f"{FIRST}_3", "missing_field"),
    (6, "gone_0", "missing_media"),
    (7, f"{FIRST}_4", "missing_field"),
    (8, f"{THIRD}_0", "bad_subtitles"),
]
JSON_REFUSED = [(f"lvb_val.json:1, record {number}", name, reason) for number, name, reason in REASONS]
SHARD = "validation-00000-of-00001.parquet"
COLUMNS = [f"option{number}" for number in range(5)]


def with_columns(published: dict[str, Any], *texts: str) -> dict[str, Any]:
    """As one of the tables has a row's options."""
    kept = {name: value for name, value in published.items() if name != "candidates"}
    return kept | dict(zip(COLUMNS, texts or (*TEXTS, "N/A", "N/A"), strict=True))


CASES = {
    "as published": Published(
        {"lvb_val.json": ROWS, **SUBTITLES, **DAMAGED, **media(*(f"videos/{name}.mp4" for name in NAMES))},
        (),
        kept("videos"),
        JSON_REFUSED,
    ),
    "in a folder of all sets, without subtitles": Published(
        {
            "LongVideoBench/lvb_val.json": ROWS[:6],
            **media(*(f"LongVideoBench/videos/{name}.mp4" for name in NAMES), "other/gone.mp4"),
        },
        (),
        kept("LongVideoBench/videos", "", ""),
        JSON_REFUSED[:3],
    ),
    "Parquet with candidates": Published(
        {SHARD: ROWS, **SUBTITLES, **DAMAGED, **media(*(f"videos/{name}.mp4" for name in NAMES))},
        (),
        kept("videos"),
        [(f"{SHARD}:{number}", name, reason) for number, name, reason in REASONS],
        forms=(1,),
    ),
    "Parquet with a column for each option": Published(
        {
            SHARD: [
                *map(with_columns, ROWS[:4]),
                with_columns(ROWS[0] | {"id": f"{FIRST}_9"}, "yellow", "N/A", "blue", "N/A", "N/A"),
            ],
            **SUBTITLES,
            **media(*(f"videos/{name}.mp4" for name in NAMES)),
        },
        (),
        kept("videos"),
        [(f"{SHARD}:4", f"{FIRST}_2", "answer_not_in_options"), (f"{SHARD}:5", f"{FIRST}_9", "bad_options")],
        forms=(1,),
    ),
}
