"""NExT-QA, multiple choice: its CSV files (or Parquet) of questions about videos to checked records.

    python -m data_pipelines.nextqa --train train.csv --eval val.csv --media-root NExTVideo --out data/nextqa

The video of a row is ``VIDEO.mp4`` below the media root; rows whose video is not there are refused. Writes
``train.jsonl`` and ``eval.jsonl``; refused rows go to ``refused.jsonl`` with their reason, and ``report.json`` counts
everything. No video is in both files. Evaluation reports by the type of question (CW, CH, TN, TC, TP, DC, DL, DO).
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from data_pipelines.common import run
from data_pipelines.published import PublishedSet, Row, prepare
from vlm_pg.errors import SampleError

_OPTIONS = ("a0", "a1", "a2", "a3", "a4")


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the set, or do nothing if it is there already. Returns the exit code."""
    return prepare(NEXTQA, __doc__ or "", argv)


def to_record(row: Row, name: str) -> dict[str, Any]:
    """One row as a record; ``qid`` counts the questions of a video.

    Raises:
        SampleError: ``answer_not_in_options``.
    """
    letters = dict(zip(map(str, range(len(_OPTIONS))), string.ascii_uppercase, strict=False))
    index = str(row["answer"]).strip()
    if index not in letters:
        raise SampleError(
            "answer_not_in_options",
            f"'answer' is '{index[:80]}'. The number of an option, {', '.join(letters)}, is expected. Correct it, or "
            "remove the row.",
        )
    return {
        "problem_id": f"{row['video']}_{row['qid']}",
        "problem": row["question"],
        "data_type": "video",
        "problem_type": "multiple choice",
        "options": [f"{letter}. {row[key]}" for letter, key in zip(letters.values(), _OPTIONS, strict=True)],
        "solution": f"<answer>{letters[index]}</answer>",
        "path": f"{row['video']}.mp4",
        "data_source": "nextqa",
        "category": row["type"],
    }


NEXTQA = PublishedSet("nextqa", ("video", "question", "answer", "qid", "type", *_OPTIONS), to_record, has_media=True)

if __name__ == "__main__":
    raise SystemExit(run(main))
