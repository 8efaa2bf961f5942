"""Video-MME: lmms-lab's Parquet with videos in ``data`` and the subtitles of some in ``subtitle``."""

from __future__ import annotations

from typing import Any

from tests.support.published.case import Published, media, video
from vlm_pg.types import Sample

TABLE, ALONE = "videomme/test-00000-of-00001.parquet", "test-00000-of-00001.parquet"
FIRST, SECOND, THIRD = "fFjv93ACGo8", "-aB_cdEFgh1", "N1cdUjctpG8"
SAID = '1\n00:00:01,000 --> 00:00:02,500\n<font color="white" size=".72c">mind the gap</font>\n'


def row(number: str, file: str, answer: str | None, **changes: Any) -> dict[str, Any]:
    fields = {"video_id": number[:3], "duration": "short", "domain": "Knowledge", "sub_category": "Humanity & History"}
    fields |= {"url": f"https://www.youtube.com/watch?v={file}", "videoID": file, "question_id": number}
    fields |= {"task_type": "Counting Problem", "question": "How many are there?", "answer": answer}
    return fields | {"options": ["A. One.", "B. Two.", "C. Three.", "D. All of the above."]} | changes


ROWS = [
    row("001-1", FIRST, "C"),
    row("001-2", FIRST, "D", task_type="OCR Problems"),
    row("002-1", SECOND, "A", duration="long"),
    row("002-2", SECOND, "E"),
    row("002-3", SECOND, None),
    row("003-1", THIRD, "A"),
    row("003-2", FIRST, "A", options=["A. One.", "C. Two.", "", "D. Four."]),
    row("003-3", FIRST, "B", domain=None),
]


def sample(number: str, path: str, subtitles: str, answer: str, kind: str, duration: str = "short") -> Sample:
    details = {"duration": duration, "domain": "Knowledge", "sub_category": "Humanity & History", "task_type": kind}
    return Sample(
        number,
        "How many are there?",
        video(path, subtitles=subtitles),
        ("A. One.", "B. Two.", "C. Three.", "D. All of the above."),
        answer,
        "multiple_choice",
        "video_mme",
        kind,
        details=details | {"question_id": number, "video_id": number[:3]},
    )


def kept(first: str, second: str, subtitles: str) -> list[Sample]:
    """Of the first three rows: where their videos lie, and the subtitles of the first."""
    return [
        sample("001-1", first, subtitles, "C", "Counting Problem"),
        sample("001-2", first, subtitles, "D", "OCR Problems"),
        sample("002-1", second, "", "A", "Counting Problem", "long"),
    ]


REFUSED = [
    (f"{ALONE}:4", "002-2", "answer_not_in_options"),
    (f"{ALONE}:5", "002-3", "missing_field"),
    (f"{ALONE}:6", "003-1", "missing_media"),
    (f"{ALONE}:7", "003-2", "bad_options"),
    (f"{ALONE}:8", "003-3", "missing_field"),
]

CASES = {
    "as the archives unpack": Published(
        {TABLE: ROWS, f"subtitle/{FIRST}.srt": SAID, **media(f"data/{FIRST}.mp4", f"data/{SECOND}.mkv")},
        (),
        kept(f"data/{FIRST}.mp4", f"data/{SECOND}.mkv", f"subtitle/{FIRST}.srt"),
        REFUSED,
    )
}
