"""Which verdicts of a run that was killed may be others now, because media came or went meanwhile."""

from __future__ import annotations

import stat
from pathlib import Path

from data_pipelines.engine.finding import Found, MediaFinder
from data_pipelines.engine.judging import Verdict
from data_pipelines.engine.missing import REASON
from vlm_pg.errors import SampleError
from vlm_pg.media.paths import is_url

# Why a question was refused, where it is the files below the media root that decide, not the row.
_OF_FILES = (REASON, "ambiguous_media", "outside_root")


class Doubt:
    """Whether a verdict may be another one now. What a look at media said is the ``MediaBook``'s to doubt.

    Args:
        root: the media root.
        finder: finds media as a run that begins now would.
    """

    def __init__(self, root: Path, finder: MediaFinder):
        self._root, self._finder = root, finder

    def __call__(self, verdict: Verdict) -> bool:
        if verdict.refused is not None and verdict.refused.reason in _OF_FILES:
            return True
        # One that was fetched or moved meanwhile may be preferred, or leave it open which is meant.
        if not all(map(self._lies_there, verdict.found)):
            return True
        if verdict.sample is not None:
            media = verdict.sample.media
            folders = {ref.path for ref in media if ref.folder_fps is not None}
            paths = [path for ref in media for path in (ref.path, ref.subtitles) if path]
            # Subtitles that were not there: the record does without.
            if any(self._is_there(path) for path, *_ in verdict.found if path not in paths):
                return True
        else:  # refused after its media were there: of one that is gone that is said first
            paths, folders = [path for path, *_ in verdict.found] if verdict.keys else [], set()
        return any(not self._is_there(path, path in folders) for path in paths)

    def _lies_there(self, found: Found) -> bool:
        path, name, folder, annotations = found
        try:
            return self._finder.path_of(name, folder, None if annotations is None else Path(annotations)) == path
        except SampleError:  # several may be meant now
            return False
        finally:
            self._finder.asked.clear()
            self._finder.latest()

    def _is_there(self, path: str, is_folder: bool = False) -> bool:
        """Not one that is empty: after a power cut media that stood inside rows may be."""
        if is_url(path):
            return True
        try:
            found = (self._root / path.removeprefix("file://")).stat()
            if is_folder:
                return stat.S_ISDIR(found.st_mode)
            return stat.S_ISREG(found.st_mode) and found.st_size > 0
        except (OSError, ValueError):  # a name that no file system takes
            return False
