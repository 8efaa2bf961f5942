"""LongVideoBench's rows become evaluation records; its subtitles are cut to the clip that a row is about."""

from __future__ import annotations

from typing import Any

import pytest

from data_pipelines import longvideobench
from data_pipelines.longvideobench import LONGVIDEOBENCH, cues_of
from tests.support.pipeline_rows import check_example, check_odd_rows, one_row
from tests.support.published.longvideobench import COLUMNS, row, with_columns
from vlm_pg.errors import SampleError
from vlm_pg.types import Cue, Sample

PUBLISHED: dict[str, Any] = row(
    "9PD3ciudpIE_0",
    0,
    question="What color is the woman's clothing?",
    question_wo_referring_query="What color is it?",
    candidates=["yellow", "green", "blue", "red"],
    duration_group=600,
    duration=467.92,
    position=[3068],
    starting_timestamp_for_subtitles=0,
)


def clocked(start: Any, end: Any, text: Any = "it") -> dict[str, Any]:
    return {"start": start, "end": end, "line": text}


def timed(start: Any, end: Any, text: Any = "it") -> dict[str, Any]:
    return {"timestamp": [start, end], "text": text}


def test_the_example_is_what_becomes_of_the_published_row() -> None:
    check_example(longvideobench, PUBLISHED)


@pytest.mark.parametrize(
    ("said", "start", "end"),
    [
        (clocked("00:16:41.500", "00:16:43"), 1.5, 3.0),  # 1001.5 - 1000, 1003 - 1000
        (clocked("0:16:40.0", "0:16:50.0"), 0.0, 10.0),
        (timed(1002, 1003.25), 2.0, 3.25),
        (timed(999.0, 1000.5), 0.0, 0.5),  # it began before the clip
        (timed(1059.0, 1070.0), 59.0, 70.0),  # it goes on after it
        (timed(1030.0, None), 30.0, 60.0),  # to the clip's end
    ],
)
def test_times_are_those_of_the_clip(said: dict[str, Any], start: float, end: float) -> None:
    """Of a clip of one minute that begins 1,000 seconds into its video."""
    assert list(cues_of([said], 1000.0, 60.0)) == [Cue(start, end, "it")]


@pytest.mark.parametrize(
    "said", [timed(900.0, 1000.0), timed(1060.0, 1061.0), timed(1061.0, None), clocked("00:00:01.000", "00:00:02.000")]
)
def test_what_is_said_outside_of_the_clip_is_left_out(said: dict[str, Any]) -> None:
    assert list(cues_of([said], 1000.0, 60.0)) == []


@pytest.mark.parametrize(
    "said",
    [
        timed(2.0, 1.0), timed(None, 2.0), timed("1", 2.0), timed(True, 2.0), timed(1.0, float("nan")),
        timed(0, 10**400), timed(1.0, 2.0, None), clocked("1.5", "2.5"), clocked("00:00:01", None),
        clocked("00:00:02", "00:00:01"),
        clocked("00:00:01", "00:00:02", 7), clocked(1, 2), {"timestamp": [1.0], "text": "it"}, {"timestamp": 1.0}, {},
        None, "it", [1.0, 2.0],
    ],
)  # fmt: skip
def test_subtitles_of_another_form_are_refused(said: Any) -> None:
    with pytest.raises(SampleError) as caught:
        list(cues_of([timed(0.0, 1.0), said], 0.0, 60.0))
    assert caught.value.reason == "bad_subtitles"


@pytest.mark.parametrize(
    ("texts", "options"),
    [
        (("a", "b", "N/A", "N/A", "N/A"), ("A. a", "B. b")),
        (("a", "b", "c", "d", "e"), ("A. a", "B. b", "C. c", "D. d", "E. e")),
    ],
)
def test_columns_without_an_option_are_none(texts: tuple[str, ...], options: tuple[str, ...]) -> None:
    (sample,) = one_row(LONGVIDEOBENCH, with_columns(PUBLISHED, *texts), form=1)
    assert isinstance(sample, Sample) and sample.options == options


@pytest.mark.parametrize(("form", "published"), [(0, PUBLISHED), (1, with_columns(PUBLISHED, *"abcde"))])
def test_odd_rows_are_refused_and_never_a_surprise(form: int, published: dict[str, Any]) -> None:
    refused = dict(check_odd_rows(LONGVIDEOBENCH, published, form))
    assert refused["correct_choice=-1"].reason == "answer_not_in_options"
    assert len(refused) > 100 and (form == 0 or f"without {COLUMNS[2]}" in refused)
