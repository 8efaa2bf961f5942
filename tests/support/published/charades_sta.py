"""Charades-STA: jiyanggao/TALL's lines, with and without the tables of Charades; lmms-lab/charades_sta's Parquet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow

from tests.support.published.case import Published, media, video
from vlm_pg.types import Sample

TRAIN = """\
3MSZA 24.3 30.4##person turn a light on.
3MSZA 0.0 32.9##person sits,  then stands##again.
AO8RW 31.0 35.0##the person laughs.

AO8RW 5.0##the person laughs.
AO8RW 7.0 7.0##the person laughs.
AO8RW 7.0 9.5##
"""
TEST = "0A8CF 1.5 12##a person cooks.\nGONE1 1.5 12##a person cooks.\n"
HEADER = "id,subject,scene,quality,relevance,verified,script,objects,actions,length\n"


def lengths(**seconds: str) -> str:
    """A table of Charades: commas and line breaks stand in its fields."""
    lines = (
        f'{name},HR43,Kitchen,6,7,Yes,"A person, tired,\ncooks.",food;cup,c092 11.90 21.20;c147 0.00 12.60,{length}\n'
        for name, length in seconds.items()
    )
    return HEADER + "".join(lines)


TABLES = {
    "Charades_v1_train.csv": lengths(**{"3MSZA": "30.96", "AO8RW": "30.5"}),
    "Charades_v1_test.csv": lengths(**{"0A8CF": "11.17"}),
}
VIDEOS = media(*(f"Charades_v1_480/{name}.mp4" for name in ("3MSZA", "AO8RW", "0A8CF")))


def sample(name: str, caption: str, path: str, answer: str, duration: float | None = None) -> Sample:
    question = f"When does this happen in the video: {caption}"
    details = {"sentence": caption} | ({} if duration is None else {"duration": duration})
    return Sample(name, question, video(path), (), answer, "time_span", "charades_sta", "charades_sta", details=details)


def of_lines(end: str, last: str, *, known: bool) -> tuple[list[Sample], list[Sample]]:
    """What stays of both files; spans that go beyond their videos end at ``end`` and ``last``.

    ``known``: whether tables say how long the videos are.
    """
    first, other = (30.96, 11.17) if known else (None, None)
    folder = "Charades_v1_480"
    return [
        sample("charades_sta_train-1", "person turn a light on.", f"{folder}/3MSZA.mp4", "[24.3, 30.4]", first),
        sample(
            "charades_sta_train-2", "person sits,  then stands##again.", f"{folder}/3MSZA.mp4", f"[0, {end}]", first
        ),
    ], [sample("charades_sta_test-1", "a person cooks.", f"{folder}/0A8CF.mp4", f"[1.5, {last}]", other)]


REFUSED = [
    ("charades_sta_train.txt:3", "charades_sta_train-3", "bad_time_span"),
    ("charades_sta_train.txt:5", "charades_sta_train-5", "bad_line"),
    ("charades_sta_train.txt:6", "charades_sta_train-6", "bad_time_span"),
    ("charades_sta_train.txt:7", "charades_sta_train-7", "empty_question"),
    ("charades_sta_test.txt:2", "charades_sta_test-2", "missing_media"),
]
LINES = {"charades_sta_train.txt": TRAIN, "charades_sta_test.txt": TEST}
UNCUT_TRAIN, UNCUT_TEST = of_lines("32.9", "12", known=False)
LATE = sample("charades_sta_train-3", "the person laughs.", "Charades_v1_480/AO8RW.mp4", "[31, 35]")


def halves(*rows: tuple[str, str, list[float]]) -> Any:
    """As lmms-lab has it: times of half precision."""
    videos, captions, times = zip(*rows, strict=True)
    spans = pyarrow.array([list(map(np.float16, span)) for span in times], pyarrow.list_(pyarrow.float16()))
    return pyarrow.table({"video": list(videos), "caption": list(captions), "timestamp": spans})


SHARD = "test-00000-of-00001.parquet"
PARQUET = halves(
    ("3MSZA.mp4", "person turn a light on.", [24.3, 30.4]),
    ("AO8RW.mp4", "the person laughs.", [0.1, 33.3]),
    ("AO8RW.mp4", "the person laughs.", [33.3, 35.1]),
    ("AO8RW.mp4", "the person laughs.", [9.0, 7.7]),
    ("AO8RW.mp4", "", [7.7, 9.0]),
)


def turns_on(duration: float | None = None) -> Sample:
    return sample("data-test-1", "person turn a light on.", "Charades_v1_480/3MSZA.mp4", "[24.3, 30.4]", duration)


def laughs(number: int, answer: str, duration: float | None = None) -> Sample:
    return sample(f"data-test-{number}", "the person laughs.", "Charades_v1_480/AO8RW.mp4", answer, duration)


BAD_ROWS = [(f"{SHARD}:4", "data-test-4", "bad_time_span"), (f"{SHARD}:5", "data-test-5", "missing_field")]

CASES = {
    "lines and tables": Published({**LINES, **TABLES, **VIDEOS}, *of_lines("30.96", "11.17", known=True), REFUSED),
    "lines in a folder, tables beside it": Published(
        {
            **{f"sta/{name}": text for name, text in LINES.items()},
            **{f"Charades/{name}": text for name, text in TABLES.items()},
            **VIDEOS,
        },
        *of_lines("30.96", "11.17", known=True),
        REFUSED,
    ),
    "lines without tables": Published({**LINES, **VIDEOS}, [*UNCUT_TRAIN, LATE], UNCUT_TEST, REFUSED[1:]),
    "Parquet": Published(
        {f"data/{SHARD}": PARQUET, **VIDEOS},
        (),
        [turns_on(), laughs(2, "[0.1, 33.3]"), laughs(3, "[33.3, 35.1]")],
        BAD_ROWS,
        forms=(1,),
    ),
    "Parquet and tables": Published(
        {f"data/{SHARD}": PARQUET, **TABLES, **VIDEOS},
        (),
        [turns_on(30.96), laughs(2, "[0.1, 30.5]", 30.5)],
        [(f"{SHARD}:3", "data-test-3", "bad_time_span"), *BAD_ROWS],
        forms=(1,),
    ),
}
