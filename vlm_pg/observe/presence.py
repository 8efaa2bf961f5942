"""Whether a run's folder is still the one the run began in."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

from vlm_pg.errors import VlmPgError
from vlm_pg.observe.run_folder import free_name


class FolderGone(VlmPgError):
    """The run's folder was removed, or another one stands in its place."""


class Presence:
    """Remembers a folder by its place on disk: open files of a removed folder can be written without an error."""

    def __init__(self, path: Path):
        self._path = path
        self._known = os.stat(path)

    def check(self) -> None:
        """Raise FolderGone if the path does not lead to the folder any more.

        Raises:
            FolderGone: see there.
        """
        if not self._is_here():
            state = "is another folder now" if self._path.exists() else "is not there any more"
            raise FolderGone(
                f"The run's folder {self._path} {state}: it was moved or removed while the run was going on, and what "
                "the run writes would be lost. Move it back and resume with run.resume=auto, or begin again in another "
                "run.dir."
            )

    def refuge(self) -> Path:
        """Where finished work can still be saved: the path itself, unless something else is there."""
        if self._is_here() or not os.path.lexists(self._path):
            return self._path
        return free_name(self._path, f"{datetime.now():%Y%m%d-%H%M%S}", ".rescued-")

    def _is_here(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), self._known)
        except OSError:
            return False
