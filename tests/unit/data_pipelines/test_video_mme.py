"""Video-MME's rows become evaluation records with the subtitles that are there; others are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_pipelines import video_mme
from data_pipelines.engine.media_finder import MediaFinder
from data_pipelines.engine.rows import RowReader
from data_pipelines.video_mme import VIDEO_MME
from tests.support.pipeline_rows import check_example, check_odd_rows, empty_files, one_row
from tests.support.published.case import lay_out
from tests.support.published.video_mme import CASES, FIRST, ROWS, TABLE, row
from tests.unit.data_pipelines.test_prepare_resumed import killed
from vlm_pg.data.sample_sets import open_records
from vlm_pg.types import BadSample, Sample

PUBLISHED: dict[str, Any] = row(
    "001-1",
    FIRST,
    "C",
    question="What is shown first in the video?",
    task_type="Temporal Perception",
    options=["A. Apples.", "B. Candles.", "C. Berries.", "D. Stars."],
)


def test_the_example_is_what_becomes_of_the_published_row() -> None:
    check_example(video_mme, PUBLISHED)


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (f"subtitle/{FIRST}.srt", f"subtitle/{FIRST}.srt"),
        (f"Video-MME/subtitle/{FIRST}.srt", f"Video-MME/subtitle/{FIRST}.srt"),
        (f"videomme/subtitle/{FIRST}.srt", f"videomme/subtitle/{FIRST}.srt"),
        ("subtitle/other.srt", ""),
        (f"data/{FIRST}.mp4", ""),
    ],
)
def test_a_record_names_the_subtitles_of_its_video_where_they_are_there(there: str, said: str, tmp_path: Path) -> None:
    empty_files(tmp_path, there)
    reader = RowReader(VIDEO_MME.forms[0], MediaFinder(tmp_path, VIDEO_MME))
    (sample,) = reader.samples(PUBLISHED, "1", "1")
    assert isinstance(sample, Sample) and sample.media[0].subtitles == said


def test_the_report_counts_records_without_subtitles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of the three that are kept is about a video without."""
    lay_out(tmp_path / "raw", CASES["as the archives unpack"].files)
    assert video_mme.main([str(tmp_path / "raw"), "--out", str(tmp_path / "out"), "--workers", "1"]) == 0
    assert json.loads((tmp_path / "out" / "report.json").read_text())["without_subtitles"] == 1
    assert "kept          1  of them have no subtitles" in capsys.readouterr().out


def test_subtitles_that_were_fetched_after_a_killed_run_are_taken(tmp_path: Path) -> None:
    """Nothing else of the run is in doubt: all videos are there."""
    files = dict(CASES["as the archives unpack"].files) | {TABLE: ROWS[:3]}
    said = f"subtitle/{FIRST}.srt"
    lay_out(tmp_path / "raw", {name: content for name, content in files.items() if name != said})
    arguments = [str(tmp_path / "raw"), "--out", str(tmp_path / "out"), "--workers", "1"]
    killed(video_mme.main, arguments)
    lay_out(tmp_path / "raw", {said: files[said]})
    assert video_mme.main(arguments) == 0
    samples = list(open_records(Path(f"{tmp_path / 'out'}:eval"))[0])
    assert [one.media[0].subtitles for one in samples] == [said, said, ""]


def test_odd_rows_are_refused_and_never_a_surprise() -> None:
    refused = dict(check_odd_rows(VIDEO_MME, PUBLISHED, added=("url",)))
    assert refused["answer='odd'"].reason == "answer_not_in_options"
    assert refused["without duration"].reason == "missing_field"
    assert len(refused) > 100


def test_a_row_without_a_question_id_keeps_the_name_of_its_place_until_it_is_refused() -> None:
    (bad,) = one_row(VIDEO_MME, PUBLISHED | {"question_id": None})
    assert isinstance(bad, BadSample) and (bad.sample_id, bad.reason) == ("rows-1", "missing_field")
