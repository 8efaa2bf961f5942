"""NExT-QA as published, and as lmms-lab has it, becomes multiple choice records; every row is kept or refused."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from data_pipelines import nextqa
from data_pipelines.nextqa import NEXTQA
from tests.support.pipeline_rows import check_odd_rows, example, kept, rows_of, verdicts
from vlm_pg.errors import ConfigError
from vlm_pg.types import MediaRef, Sample

COLUMNS = ["video", "frame_count", "width", "height", "question", "answer", "qid", "type", "a0", "a1", "a2", "a3", "a4"]


def row(video: Any = 17, qid: Any = 3, **changes: Any) -> dict[str, Any]:
    values = [video, 300, 640, 480, "what moves", 2, qid, "DC", "a car", "a dog", "a bird", "a boat", "a ball"]
    return dict(zip(COLUMNS, values, strict=True)) | changes


def csv_of(folder: Path, *rows: Mapping[str, Any]) -> Path:
    with (folder / "val.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return folder / "val.csv"


def parquet_of(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    (folder / "MC").mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), folder / "MC" / "test-00000-of-00001.parquet")
    return Path(f"{folder / 'MC'}:test")


SAMPLE = Sample(
    "17_3",
    "what moves",
    (MediaRef("video", "17.mp4"),),
    ("A. a car", "B. a dog", "C. a bird", "D. a boat", "E. a ball"),
    "C",
    "multiple_choice",
    "nextqa",
    "DC",
    details={"type": "DC", "qid": "3"},
)


def test_a_row_becomes_a_sample_in_either_form(tmp_path: Path) -> None:
    assert kept(NEXTQA, csv_of(tmp_path, row())) == [SAMPLE]
    assert kept(NEXTQA, parquet_of(tmp_path, [row(), row("17", "3")][:1])) == [SAMPLE]


def test_the_real_file_is_kept_as_a_whole_and_begins_with_the_example(data_dir: Path) -> None:
    samples = kept(NEXTQA, data_dir / "nextqa_val.csv")
    assert len(samples) == len({one.sample_id for one in samples}) == 4996
    assert samples[0] == example(nextqa)
    with (data_dir / "nextqa_val.csv").open(encoding="utf-8", newline="") as file:
        for sample, published in zip(samples, csv.DictReader(file), strict=True):
            gold = published[f"a{published['answer']}"].strip()
            assert dict(option.split(". ", 1) for option in sample.options)[sample.answer] == gold


def test_spaces_around_options_are_not_theirs(tmp_path: Path) -> None:
    (sample,) = kept(NEXTQA, csv_of(tmp_path, row(a2=" a bird ")))
    assert sample == SAMPLE


@pytest.mark.parametrize("parquet", [False, True])
def test_rows_are_kept_or_refused_one_by_one(tmp_path: Path, parquet: bool) -> None:
    rows = [
        row(1, 0),
        row(2, 0, answer=5),
        row(2, 1, answer=-1),
        row(2, 2, answer=None),
        row(3, 0, a2="a dog"),
        row(3, 1, a2="a dog "),
        row(3, 2, a0="a dog"),
        row(4, 0, a4=None),
        row(4, 1, question=""),
        row(None, 1),
        row(5, None),
    ]
    name = "MC-test" if parquet else "val"
    first = 0 if parquet else 1
    assert verdicts(NEXTQA, parquet_of(tmp_path, rows) if parquet else csv_of(tmp_path, *rows)) == [
        ("1_0", "C"),
        ("2_0", "refused: answer_not_in_options"),
        ("2_1", "refused: answer_not_in_options"),
        ("2_2", "refused: missing_field"),
        ("3_0", "refused: bad_options"),
        ("3_1", "refused: bad_options"),
        ("3_2", "C"),
        ("4_0", "refused: missing_field"),
        ("4_1", "refused: missing_field"),
        (f"{name}-{first + 10}", "refused: missing_field"),
        (f"{name}-{first + 11}", "C"),
    ]


@pytest.mark.parametrize("folder", ["", "NExTVideo/", "nextqa/NExTVideo/"])
@pytest.mark.parametrize("place", ["0101/17.mp4", "17.mp4"])
@pytest.mark.parametrize("mapped", [False, True])
def test_videos_are_found_where_their_archives_put_them(tmp_path: Path, folder: str, place: str, mapped: bool) -> None:
    video = tmp_path / "media" / folder / place
    video.parent.mkdir(parents=True)
    video.touch()
    if mapped:
        (tmp_path / "map_vid_vidorID.json").write_text('{"17": "0101/17", "18": "1101/18"}')
    found, missing = kept(NEXTQA, csv_of(tmp_path, row(17), row(18)), root=tmp_path / "media")
    # Without map and name nothing says that a folder "0101" is NExT-QA's.
    known = folder or mapped or place == "17.mp4"
    assert found.media == (MediaRef("video", f"{folder}{place}" if known else "17.mp4"),)
    assert missing.media == (MediaRef("video", "1101/18.mp4" if mapped else "18.mp4"),)


@pytest.mark.parametrize("content", ['{"17": 3}', '["17"]', "{", '{"17": null}'])
def test_a_damaged_map_of_videos_is_a_clear_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "map_vid_vidorID.json").write_text(content)
    with pytest.raises(ConfigError, match=r"map_vid_vidorID\.json' is no map of videos.*0101/2909445186.*remove it"):
        kept(NEXTQA, csv_of(tmp_path, row()))


def test_open_ended_rows_are_no_form_of_it(tmp_path: Path) -> None:
    """lmms-lab/NExTQA has them in a folder beside."""
    open_ended = {"video": 17, "question": "what moves", "answer": "bird", "qid": 3, "type": "DC"}
    path = tmp_path / "open.jsonl"
    path.write_text(json.dumps(open_ended))
    with pytest.raises(ConfigError, match="the row has no a0, a1, a2, a3, a4"):
        kept(NEXTQA, path)


def test_odd_rows_are_refused_and_never_a_surprise(tmp_path: Path) -> None:
    (published,) = rows_of(NEXTQA, parquet_of(tmp_path, [row()]))
    assert len(check_odd_rows(NEXTQA, published, added=["mapped"])) > 100
