"""Charades-STA as published becomes records that ask for a span of time, cut at the end of the video."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from data_pipelines import charades_sta
from data_pipelines.charades_sta import CHARADES_STA
from tests.support.pipeline_rows import check_odd_rows, example, kept, outcomes, rows_of, verdicts
from vlm_pg.errors import ConfigError
from vlm_pg.rewards.gold import gold_faults
from vlm_pg.types import BadSample, MediaRef, Sample

PUBLISHED = "3MSZA 24.3 30.4##person turn a light on."
LENGTHS = {"3MSZA": "30.96", "0A8CF": "11.17"}


def file_of(folder: Path, *lines: str) -> Path:
    path = folder / "charades_sta_test.txt"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def table(path: Path, lengths: dict[str, str]) -> None:
    """With commas and line breaks inside fields, as Charades' own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [f'{video},HR43,Kitchen,6,7,Yes,"A person, tired,\ncooks.",food,"c092 11.90 21.20",{seconds}\n'
            for video, seconds in lengths.items()]  # fmt: skip
    path.write_text("id,subject,scene,quality,relevance,verified,script,objects,actions,length\n" + "".join(rows))


def parquet_of(folder: Path, rows: Sequence[tuple[str, str, list[float]]]) -> Path:
    """As lmms-lab has it: times of half precision. Returns the data set as a pipeline takes it."""
    folder.mkdir(parents=True)
    videos, captions, times = zip(*rows, strict=True)
    halves = pyarrow.array([list(map(np.float16, pair)) for pair in times], pyarrow.list_(pyarrow.float16()))
    columns = {"video": list(videos), "caption": list(captions), "timestamp": halves}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "test-00000-of-00001.parquet")
    return Path(f"{folder}:test")


def test_a_published_line_is_the_example(tmp_path: Path) -> None:
    assert kept(CHARADES_STA, file_of(tmp_path, PUBLISHED)) == [
        Sample(
            "charades_sta_test-1",
            "When does this happen in the video: person turn a light on.",
            (MediaRef("video", "3MSZA.mp4"),),
            (),
            "[24.3, 30.4]",
            "time_span",
            "charades_sta",
            "charades_sta",
            details={"sentence": "person turn a light on."},
        )
    ]
    assert kept(CHARADES_STA, file_of(tmp_path, PUBLISHED)) == [example(charades_sta)]


@pytest.mark.parametrize("place", [".", "Charades", "..", "../Charades"])
def test_spans_are_cut_where_the_video_ends(tmp_path: Path, place: str) -> None:
    (tmp_path / "sta").mkdir()
    table(tmp_path / "sta" / place / "Charades_v1_train.csv", {"3MSZA": LENGTHS["3MSZA"]})
    table(tmp_path / "sta" / place / "Charades_v1_test.csv", {"0A8CF": LENGTHS["0A8CF"]})
    lines = file_of(
        tmp_path / "sta",
        "3MSZA 24.3 30.4##person turn a light on.",
        "3MSZA 24.3 31.9##person turn a light on.",
        "0A8CF 0.0 12.0##a person laughs.",
        "0A8CF 11.2 12.0##a person laughs.",
        "0A8CF 11.17 12.0##a person laughs.",
        "UNKNO 11.2 120.0##a person laughs.",
    )
    assert verdicts(CHARADES_STA, lines) == [
        ("charades_sta_test-1", "[24.3, 30.4]"),
        ("charades_sta_test-2", "[24.3, 30.96]"),
        ("charades_sta_test-3", "[0, 11.17]"),
        ("charades_sta_test-4", "refused: bad_time_span"),
        ("charades_sta_test-5", "refused: bad_time_span"),
        ("charades_sta_test-6", "[11.2, 120]"),
    ]
    assert not any(gold_faults([one for one in outcomes(CHARADES_STA, lines) if isinstance(one, Sample)]))
    _, cut, _, refused, _, unknown = outcomes(CHARADES_STA, lines)
    assert isinstance(cut, Sample) and isinstance(unknown, Sample)
    assert cut.details == {"sentence": "person turn a light on.", "duration": 30.96}
    assert unknown.details == {"sentence": "a person laughs."}
    assert isinstance(refused, BadSample) and "from 11.2 to 11.17 s of a video of 11.17 s" in refused.message


def test_without_the_tables_spans_stay_as_they_are(tmp_path: Path) -> None:
    assert verdicts(CHARADES_STA, file_of(tmp_path, "3MSZA 24.3 31.9##x")) == [("charades_sta_test-1", "[24.3, 31.9]")]


@pytest.mark.parametrize("cell", ["", "long", "nan"])
def test_a_damaged_table_is_a_clear_error(tmp_path: Path, cell: str) -> None:
    table(tmp_path / "Charades_v1_test.csv", {"3MSZA": cell})
    with pytest.raises(ConfigError, match=r"Charades_v1_test\.csv:3' has no length of a video.*or remove it"):
        verdicts(CHARADES_STA, file_of(tmp_path, PUBLISHED))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("3MSZA 24.3##person turn a light on.", "bad_line"),
        ("3MSZA 24.3 30.4 person turn a light on.", "bad_line"),
        ("3MSZA 24,3 30,4##person turn a light on.", "bad_line"),
        ("3MSZA -1.0 30.4##person turn a light on.", "bad_line"),
        ("3MSZA 1e1 30.4##person turn a light on.", "bad_line"),
        ("##person turn a light on.", "bad_line"),
        ("3MSZA 30.4 24.3##person turn a light on.", "bad_time_span"),
        ("3MSZA 30.4 30.4##person turn a light on.", "bad_time_span"),
        ("3MSZA 30.4 30.4001##person turn a light on.", "bad_time_span"),
        ("3MSZA 24.3 30.4## ", "empty_question"),
        ("3MSZA 24.3 30.4##turn <|video_pad|> on.", "media_token_in_text"),
    ],
)
def test_lines_are_refused_one_by_one(tmp_path: Path, line: str, reason: str) -> None:
    found = verdicts(CHARADES_STA, file_of(tmp_path, PUBLISHED, "", line, PUBLISHED))
    assert found == [
        ("charades_sta_test-1", "[24.3, 30.4]"),
        ("charades_sta_test-3", f"refused: {reason}"),
        ("charades_sta_test-4", "[24.3, 30.4]"),
    ]


def test_times_of_half_precision_are_the_tenths_they_were(tmp_path: Path) -> None:
    """All of a video's first two minutes, where no two tenths are one number."""
    rows = [("3MSZA.mp4", "person turn a light on", [tenth / 10, tenth / 10 + 5]) for tenth in range(1230)]
    rows.append(("3MSZA", "as rows without an ending", [24.3, 30.4]))
    rows.append(("3MSZA.mp4", "a hundredth", [24.28125, 30.4]))
    samples = kept(CHARADES_STA, parquet_of(tmp_path / "charades_sta" / "data", rows))
    written = [one.answer for one in samples]
    tenths = [f"{tenth / 10:.1f}".removesuffix(".0") for tenth in range(1280)]
    assert written == [*(f"[{tenths[n]}, {tenths[n + 50]}]" for n in range(1230)), "[24.3, 30.4]", "[24.28, 30.4]"]
    assert {one.media for one in samples} == {(MediaRef("video", "3MSZA.mp4"),)}
    assert samples[0].sample_id == "data-test-1"


def test_rows_of_the_parquet_are_cut_and_refused_too(tmp_path: Path) -> None:
    table(tmp_path / "charades_sta" / "Charades_v1_test.csv", LENGTHS)
    rows = [("3MSZA.mp4", "a", [24.3, 33.0]), ("3MSZA.mp4", "b", [31.0, 33.0]), ("3MSZA.mp4", "c", [31.0])]
    rows += [("3MSZA.mp4", "d", []), ("3MSZA.mp4", "e", [1.0, 2.0, 3.0]), ("3MSZA.mp4", "", [1.0, 2.0])]
    found = verdicts(CHARADES_STA, parquet_of(tmp_path / "charades_sta" / "data", rows))
    assert [verdict for _, verdict in found] == [
        "[24.3, 30.96]",
        *["refused: bad_time_span"] * 4,
        "refused: missing_field",
    ]


def test_odd_rows_are_refused_and_never_a_surprise(tmp_path: Path) -> None:
    paths = [
        file_of(tmp_path, PUBLISHED),
        parquet_of(tmp_path / "data", [("3MSZA.mp4", "person turn a light on", [24.3, 30.4])]),
    ]
    rows = [row for path in paths for row in rows_of(CHARADES_STA, path)]
    found = [check_odd_rows(CHARADES_STA, row, form, ["length"]) for form, row in enumerate(rows)]
    assert len(rows) == 2 and sum(map(len, found)) > 60
