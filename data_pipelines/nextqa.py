"""NExT-QA, multiple choice: its CSV files (or Parquet) of questions about videos to checked records.

    python -m data_pipelines.nextqa --train train.csv --eval val.csv --media-root NExTVideo --out data/nextqa

The video of a row is ``VIDEO.mp4`` below the media root or, as NExTVideo.zip unpacks, in a folder of it that
``map_vid_vidorID.json`` names (beside the CSV files or in the media root; without that file the folders are looked
through). Rows whose video is not there are refused, and so are those whose gold text stands under two letters. Writes
``train.jsonl`` and ``eval.jsonl``; refused rows go to ``refused.jsonl`` with their reason, and ``report.json`` counts
everything. No video is in both files. Evaluation reports by the type of question (CW, CH, TN, TC, TP, DC, DL, DO).
"""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_pipelines.common import run
from data_pipelines.published import PublishedSet, Row, prepare
from vlm_pg.data.folders import root_of
from vlm_pg.errors import ConfigError, SampleError

_MAP, _FOLDER, _SUFFIX = "map_vid_vidorID.json", "NExTVideo", ".mp4"
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
        "path": f"{row['video']}{_SUFFIX}",
        "data_source": "nextqa",
        "category": row["type"],
    }


class VideoFolders:
    """Where the videos lie: flat below the media root, or in its folders, with ``NExTVideo/`` between or without.

    Raises:
        ConfigError: ``map_vid_vidorID.json`` is there and does not map names of videos to paths.
    """

    def __init__(self, annotations: Sequence[Path], media_root: Path):
        self._root = media_root
        places = [*map(root_of, annotations), media_root, media_root / _FOLDER, media_root.parent]
        self.files = [path for path in dict.fromkeys(place / _MAP for place in places) if path.is_file()][:1]
        self._map = _read_map(self.files[0]) if self.files else self._look()

    def path_of(self, name: str) -> str:
        video = name.removesuffix(_SUFFIX)
        mapped = self._map.get(video, video) + _SUFFIX
        candidates = (name, mapped, f"{_FOLDER}/{name}", f"{_FOLDER}/{mapped}")
        return next((path for path in candidates if (self._root / path).is_file()), mapped)

    def _look(self) -> dict[str, str]:
        """Videos one folder down, where nothing maps them."""
        found = {}
        for base in (self._root / _FOLDER, self._root):
            for path in sorted(base.glob(f"*/*{_SUFFIX}")):
                found[path.stem] = str(path.relative_to(base).with_suffix(""))
        return found


def _read_map(path: Path) -> dict[str, str]:
    try:
        mapped = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(mapped, dict) and all(isinstance(value, str) for value in mapped.values()):
            return mapped
    except (OSError, ValueError, RecursionError):
        pass  # falls through to the one message for all of these
    raise ConfigError(
        f'\'{path}\' is no map of videos. An object such as {{"2909445186": "0101/2909445186"}} is expected. Copy the '
        "file from NExT-QA's project again, or remove it: the folders are looked through then."
    )


NEXTQA = PublishedSet(
    "nextqa",
    ("video", "question", "answer", "qid", "type", *_OPTIONS),
    to_record,
    has_media=True,
    layout=VideoFolders,
)

if __name__ == "__main__":
    raise SystemExit(run(main))
