"""What a record may add: the part of a medium that is meant, reasoning, several right options."""

from __future__ import annotations

import json

import pytest

from vlm_pg.data.records import parse_record, to_record
from vlm_pg.errors import SampleError

RECORD = {
    "problem_id": 8,
    "problem": "What is filmed?",
    "data_type": "text",
    "problem_type": "exact",
    "solution": "<answer>a piano</answer>",
    "path": "",
}

VIDEO = RECORD | {"data_type": "video", "path": "a.mp4"}


@pytest.mark.parametrize(
    "parts",
    [
        {"start": 1.5},
        {"end": 4.0},
        {"start": 1.5, "end": 4.0, "subtitles": "a.srt"},
        {"times": [0.0, 2.5, 3.0]},
        {"path": ["a.mp4", "b.mp4"], "start": [None, 2.0], "end": [1.0, 3.0], "subtitles": ["", "b.vtt"]},
        {"path": ["a.mp4", "b.mp4"], "times": [[1.0, 2.0], []]},
        {"path": ["a.jpg", "b.mp4"], "data_type": ["image", "video"], "end": [None, 3.0]},
        {"path": "frames/a", "folder_fps": 3, "start": 1.5},
        {"path": ["a.mp4", "frames/b"], "folder_fps": [None, 29.97]},
    ],
)
def test_parts_of_media_are_read_and_written(parts: dict[str, object]) -> None:
    record = VIDEO | parts
    sample = parse_record(record)
    again = parse_record(json.loads(json.dumps(to_record(sample))))
    assert again == sample
    for name, value in parts.items():
        read = [getattr(ref, name) for ref in sample.media] if name in ("start", "end", "folder_fps") else None
        assert read is None or read == (value if isinstance(value, list) else [value])


@pytest.mark.parametrize(
    ("parts", "reason", "message"),
    [
        ({"start": -1}, "bad_clip", r"'start' holds -1\.0\. Seconds from 0 on"),
        ({"start": 10**400}, "bad_clip", "'start' holds inf"),
        ({"times": [1, 10**5000]}, "bad_clip", "'times' holds inf"),
        ({"start": float("nan")}, "bad_clip", "'start' holds nan"),
        ({"start": True}, "wrong_type", "'start' holds True"),
        ({"start": "3"}, "wrong_type", "'start' holds '3'"),
        ({"start": 3, "end": 3}, "bad_clip", r"begins at 3 s and ends at 3 s\. A later end"),
        ({"end": 0}, "bad_clip", "begins at 0 s and ends at 0 s"),
        ({"times": [2, 1]}, "bad_clip", "each later than the one before"),
        ({"times": [1, 1]}, "bad_clip", "each later than the one before"),
        ({"times": [1, None]}, "bad_clip", "each later"),
        ({"times": 3}, "wrong_type", "'times' is 3"),
        ({"times": [1], "end": 2}, "bad_clip", "'times' stand beside 'start' or 'end'"),
        ({"subtitles": 7}, "wrong_type", "'subtitles' is 7"),
        (
            {"path": ["a.mp4", "b.mp4"], "start": 2.0},
            "wrong_type",
            r"'start' is 2.0 beside a 'path' that lists 2 media",
        ),
        ({"path": ["a.mp4", "b.mp4"], "end": [2.0]}, "wrong_type", "a 'path' that lists 2 media"),
        ({"data_type": "image", "path": "a.jpg", "end": 2.0}, "bad_clip", "an image has 'end'"),
        ({"data_type": "image", "path": "a", "folder_fps": 2.0}, "bad_clip", "an image has 'folder_fps'"),
        ({"folder_fps": 0}, "bad_clip", "'folder_fps' is 0. A number of pictures a second, above 0 and up to 1000,"),
        ({"folder_fps": 1001}, "bad_clip", "'folder_fps' is 1001"),
        ({"folder_fps": float("nan")}, "bad_clip", "'folder_fps' is nan"),
        ({"folder_fps": True}, "wrong_type", "'folder_fps' is True"),
        ({"folder_fps": "3"}, "wrong_type", "'folder_fps' is '3'"),
        ({"path": ["a", "b"], "folder_fps": 3.0}, "wrong_type", "'folder_fps' is 3.0 beside a 'path' that lists 2"),
    ],
)
def test_parts_that_make_no_sense_are_refused(parts: dict[str, object], reason: str, message: str) -> None:
    with pytest.raises(SampleError, match=message) as caught:
        parse_record(VIDEO | parts)
    assert caught.value.reason == reason


def test_reasoning_is_kept() -> None:
    sample = parse_record(RECORD | {"process": "<think>red, then blue</think>"})
    assert sample.process == "<think>red, then blue</think>"
    assert parse_record(to_record(sample)) == sample


@pytest.mark.parametrize(
    ("solution", "answer"), [("C,A", "A, C"), ("B", "B"), ("None", "none"), ("A, B, C", "A, B, C")]
)
def test_several_right_options_are_a_list_of_letters(solution: str, answer: str) -> None:
    options = ["red", "blue", "green"]
    record = RECORD | {
        "problem_type": "multiple select",
        "options": options,
        "solution": f"<answer>{solution}</answer>",
    }
    assert parse_record(record).answer == answer
    assert parse_record(to_record(parse_record(record))).answer == answer


@pytest.mark.parametrize(
    ("options", "solution", "reason"),
    [
        (["red", "blue"], "C", "answer_not_in_options"),
        (["red", "blue"], "A, A", "answer_not_in_options"),
        (["red", "blue"], "A and B", "answer_not_in_options"),
        ([], "none", "too_few_options"),
        (["red", "red"], "A", "bad_options"),
        (["red", ""], "A", "bad_options"),
    ],
)
def test_gold_answers_that_select_nothing_known_are_refused(options: list[str], solution: str, reason: str) -> None:
    record = RECORD | {
        "problem_type": "multiple select",
        "options": options,
        "solution": f"<answer>{solution}</answer>",
    }
    with pytest.raises(SampleError) as caught:
        parse_record(record)
    assert caught.value.reason == reason
