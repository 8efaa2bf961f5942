"""Video-R1 as published, and records of that format in other files: each is kept as it is, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_pipelines import video_r1
from data_pipelines.engine.rows import form_of
from data_pipelines.video_r1 import VIDEO_R1
from tests.support.data_sets import png, records, save, shard
from tests.support.pipeline_rows import (
    annotations,
    empty_files,
    example,
    outcomes,
    reasons_of,
    samples_of,
    write_json,
    write_lines,
)
from vlm_pg.data.records import read_records
from vlm_pg.errors import ConfigError, SampleError
from vlm_pg.media.paths import resolve
from vlm_pg.types import MediaRef, Sample

RUSSIAN = {
    "problem_id": 2,
    "problem": "What appears on the screen in Russian during the missile's ascent?",
    "data_type": "video",
    "problem_type": "multiple choice",
    "options": [
        "A. A YouTube subscription notification",
        "B. A military command",
        "C. A warning message",
        "D. A weather update",
    ],
    "solution": "<answer>A</answer>",
    "path": "./LLaVA-Video-178K/liwei_youtube_videos/videos/youtube_video_2024/ytb_7nRmsEw7nsE.mp4",
    "data_source": "LLaVA-Video-178K/30_60_s_youtube_v0_1",
}
THOUGHT = {"process": "<think>Let me think about this ...</think>"}


def row(**changes: Any) -> dict[str, Any]:
    return RUSSIAN | changes


def outcome(tmp_path: Path, *rows: Any) -> list[Any]:
    return outcomes(VIDEO_R1, write_json(tmp_path / "Video-R1-260k.json", rows))


def test_the_published_row_with_and_without_reasoning(tmp_path: Path) -> None:
    (plain,) = outcome(tmp_path, RUSSIAN)
    (thought,) = outcomes(VIDEO_R1, write_json(tmp_path / "Video-R1-COT-165k.json", [RUSSIAN | THOUGHT]))
    assert plain == Sample(
        "2",
        RUSSIAN["problem"],
        (MediaRef("video", RUSSIAN["path"]),),
        tuple(RUSSIAN["options"]),
        "A",
        "multiple_choice",
        source=RUSSIAN["data_source"],
        category=RUSSIAN["data_source"],
    )
    assert thought == example(video_r1) and thought.process == THOUGHT["process"]


def test_all_kinds_of_answers(tmp_path: Path) -> None:
    image = row(data_type="image", path="./Math/Multimath-300k/1.png", options=[], data_source="Multimath-300k")
    rows = [
        image | {"problem_id": number, "problem_type": kind, "solution": f"<answer>{gold}</answer>"}
        for number, (kind, gold) in enumerate(
            [("numerical", "4"), ("OCR", "STOP"), ("free-form", "A person cracks an egg."), ("regression", "2.7")]
        )
    ]
    samples = samples_of(outcome(tmp_path, *rows)).values()
    assert [(one.answer_kind, one.answer) for one in samples] == [
        ("numerical", "4"),
        ("ocr", "STOP"),
        ("free_form", "A person cracks an egg."),
        ("regression", "2.7"),
    ]
    assert {one.media for one in samples} == {(MediaRef("image", "./Math/Multimath-300k/1.png"),)}


def test_real_records_pass_unchanged(media_dir: Path) -> None:
    path = media_dir / "questions.json"
    assert outcomes(VIDEO_R1, path) == read_records(path)[0]
    for sample in samples_of(outcomes(VIDEO_R1, path, root=media_dir)).values():
        assert Path(resolve(sample.media[0], media_dir)).is_file()


def test_bad_records_are_refused_each_for_its_reason(media_dir: Path) -> None:
    result = outcomes(VIDEO_R1, media_dir / "questions_bad.json", root=media_dir)
    assert reasons_of(result) == {"105": "empty_question", "106": "media_token_in_text"}
    reasons = {}
    for name, sample in samples_of(result).items():
        try:
            resolve(sample.media[0], media_dir)
        except SampleError as error:
            reasons[name] = error.reason
    assert reasons == {"102": "missing_media", "103": "outside_root", "104": "remote_media"}


def test_odd_rows_are_refused(tmp_path: Path) -> None:
    odd = {
        "missing_field": [
            {},
            *(row(**{key: None}) for key in ("problem_id", "problem", "data_type", "solution", "path")),
        ],
        "wrong_type": [row(problem_id=[2]), row(problem=3), row(options="A. a"), row(path={}), row(process=["a"])],
        "too_few_options": [row(options=[]), row(options=None)],
        "no_answer_tag": [row(solution="A")],
        "answer_not_in_options": [row(solution="<answer>E</answer>")],
        "unknown_answer_kind": [row(problem_type="riddle"), row(problem_type="")],
        "unknown_data_type": [row(data_type="sound"), row(data_type=3)],
        "not_a_record": [None, [], 3, "text"],
    }
    for reason, rows in odd.items():
        result = outcome(tmp_path, RUSSIAN, *rows)
        assert [one.reason for one in result[1:]] == [reason] * len(rows), reason


def test_refused_records_are_called_by_their_own_ids(tmp_path: Path) -> None:
    assert reasons_of(outcome(tmp_path, row(problem=""), row(problem_id=""), row(problem_id=9, problem=" "))) == {
        "2": "empty_question",
        "Video-R1-260k-1.2": "missing_field",
        "9": "empty_question",
    }


def test_media_are_taken_from_their_paths_and_no_others(tmp_path: Path) -> None:
    """Media sets share names: "1.png" of another set is another picture."""
    annotations = write_json(
        tmp_path / "Video-R1-260k.json", [RUSSIAN, row(problem_id=3, data_type="image", path="./Chart/1.png")]
    )
    empty_files(tmp_path, RUSSIAN["path"], "Math/1.png")
    first, second = (one.media[0].path for one in samples_of(outcomes(VIDEO_R1, annotations, root=tmp_path)).values())
    assert first == RUSSIAN["path"].removeprefix("./") and second == "./Chart/1.png"


def test_the_file_with_reasoning_is_read_when_it_is_named(tmp_path: Path) -> None:
    """Both number the same questions."""
    empty_files(tmp_path, "Video-R1-260k.json", "Video-R1-COT-165k.json", "Chart/Chart_part1.zip")
    assert annotations(VIDEO_R1, tmp_path) == {"train": ["Video-R1-260k.json"], "eval": []}


def test_records_in_other_files(tmp_path: Path) -> None:
    sums = records(4)
    paths = [
        write_lines(tmp_path / "sums.jsonl", sums),
        save(tmp_path / "saved", sums),
        Path(f"{shard(tmp_path / 'sums', 'train', sums, 2)}:train"),
    ]
    for path in paths:
        assert [one.answer for one in samples_of(outcomes(VIDEO_R1, path)).values()] == ["0", "2", "4", "6"]


def test_media_inside_rows_become_files(tmp_path: Path) -> None:
    import datasets

    sums = records(3)
    rows = [
        one | {"data_type": "image", "path": {"bytes": png(place), "path": "a.png"}} for place, one in enumerate(sums)
    ]
    plain = datasets.Dataset.from_list(sums).features
    text = datasets.Value("string")
    features = datasets.Features(plain | {"path": datasets.Image(), "options": datasets.List(text)})
    folder = save(tmp_path / "saved", rows, features=features)
    root = tmp_path / "root"
    root.mkdir()
    samples = samples_of(outcomes(VIDEO_R1, folder, root=root)).values()
    assert [Path(resolve(one.media[0], root)).read_bytes() for one in samples] == [png(place) for place in range(3)]


def test_a_file_of_other_rows_is_refused_with_what_is_expected(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"question": "Who?"}]))
    with pytest.raises(ConfigError, match=r"the row has no problem_id, problem, data_type.*Video-R1-COT-165k\.json"):
        form_of(VIDEO_R1, path)
