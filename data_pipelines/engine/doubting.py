"""Which verdicts of a run that was killed may be others now, because media came or went meanwhile."""

from __future__ import annotations

import stat
from pathlib import Path

from data_pipelines.engine.judging import Verdict
from data_pipelines.engine.missing import REASON
from vlm_pg.media.paths import is_url

# Why a question was refused, where it is the files below the media root that decide, not the row.
_OF_FILES = (REASON, "ambiguous_media", "outside_root")


class Doubt:
    """Whether a verdict may be another one now. What a look at media said is the ``MediaBook``'s to doubt.

    Args:
        root: the media root.
    """

    def __init__(self, root: Path):
        self._root = root

    def __call__(self, verdict: Verdict) -> bool:
        if verdict.refused is not None:
            return verdict.refused.reason in _OF_FILES
        media = () if verdict.sample is None else verdict.sample.media
        # A file that was moved may be found in its new place.
        return any(not self._is_there(path) for ref in media for path in (ref.path, ref.subtitles) if path)

    def _is_there(self, path: str) -> bool:
        """Not one that is empty: after a power cut media that stood inside rows may be."""
        if is_url(path):
            return True
        try:
            found = (self._root / path.removeprefix("file://")).stat()
            return stat.S_ISREG(found.st_mode) and found.st_size > 0
        except (OSError, ValueError):  # a name that no file system takes
            return False
