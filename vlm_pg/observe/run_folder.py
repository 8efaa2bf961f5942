"""The folder of one run: its files, a new one without losing an old one, and whether it still exists."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from vlm_pg.errors import ConfigError, VlmPgError
from vlm_pg.files import write_bytes_atomic, write_json_atomic
from vlm_pg.observe.run_lock import LOCK

_DATA_FILES = ("bad_samples.jsonl", "metrics.jsonl", "rollouts.jsonl", "curves.json", "trace.json", "trace.before.json")
_FILES = (*_DATA_FILES, "config.yaml", "summary.json", "report.html")
_FOLDERS = ("checkpoints", "served", "tensorboard", "thumbnails", "trackers")


class _Inside:
    """The path of this name in a run's folder."""

    def __init__(self, name: str):
        self._name = name

    def __get__(self, folder: RunFolder, owner: object) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run's files. Making the object touches nothing on disk; ``RunFolder.create`` does.

    RunFolder(Path("runs/embedded")).metrics == Path("runs/embedded/metrics.jsonl")
    """

    path: Path

    config = _Inside("config.yaml")  # the resolved configuration
    metrics = _Inside("metrics.jsonl")  # a line per step and phase
    curves = _Inside("curves.json")  # how each metric is drawn
    rollouts = _Inside("rollouts.jsonl")  # a line per logged rollout
    bad_samples = _Inside("bad_samples.jsonl")  # a line per sample that could not be used
    summary = _Inside("summary.json")  # accuracy before and after, seconds per phase, versions
    report = _Inside("report.html")  # self-contained HTML
    trace = _Inside("trace.json")  # the phases of each rank over time, for Perfetto
    trace_before = _Inside("trace.before.json")  # the time before that, after rotation
    checkpoints = _Inside("checkpoints")
    tensorboard = _Inside("tensorboard")  # event files
    thumbnails = _Inside("thumbnails")  # picture strips, one per logged question
    trackers = _Inside("trackers")  # progress and errors of each tracker, runs written offline

    @classmethod
    def create(cls, path: Path, resume: bool, announce: Callable[[str], None] = print) -> RunFolder:
        """Create or prepare the folder of a run.

        With ``resume`` an existing folder is kept. Without, an existing run is moved aside to
        ``<name>.old-<timestamp>`` and ``announce`` gets one line about it. Raises ConfigError when ``path`` holds
        something that is not a run, or is the current directory or one above it.
        """
        folder = cls(Path(path))
        refuse_no_run_folder(folder.path)
        if not resume and folder.path.is_dir() and any(entry.name != LOCK for entry in folder.path.iterdir()):
            aside = free_name(folder.path, datetime.now().strftime("%Y%m%d-%H%M%S"))
            folder.path.rename(aside)
            announce(f"{folder.path} holds an earlier run: moved it to {aside} (run.resume=auto would continue it)")
        try:
            for needed in (folder.path, folder.checkpoints):
                needed.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"run.dir '{path}' cannot be made: {error}. Choose a folder that can be written."
            ) from None
        for entry in folder.path.iterdir():
            if entry.name.startswith(".") and entry.name.endswith(".tmp") and not entry.is_dir():  # of a killed process
                entry.unlink()
        return folder

    def write_config(self, yaml_text: str) -> None:
        """Write config.yaml in one piece."""
        write_bytes_atomic(self.config, yaml_text.encode())

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json in one piece; a NaN or infinity in it is refused with its key."""
        write_json_atomic(self.summary, dict(summary))


def refuse_no_run_folder(path: Path) -> None:
    """Raise ConfigError when ``path`` is something whose content must not be moved or written to."""
    advice = "Point run.dir at a new folder or at the folder of an earlier run, e.g. run.dir=runs/mine."
    if path.exists() and not path.is_dir():
        raise ConfigError(f"run.dir '{path}' is a file. A run needs a folder. {advice}")
    resolved, current = path.resolve(), Path.cwd().resolve()
    if resolved == current or resolved in current.parents:
        raise ConfigError(
            f"run.dir '{path}' is the current directory or one above it. A run needs a folder of its own. {advice}"
        )
    if not path.is_dir():
        return
    names = {entry.name for entry in path.iterdir()}
    for name in sorted(names & (set(_FILES) - {"report.html"})):
        if not (path / name).is_file():
            raise ConfigError(
                f"{path / name} is no file: a folder, a pipe or a link to nothing has its name. Move it away, "
                "or choose another run.dir."
            )
    is_run = "config.yaml" in names and names & {"metrics.jsonl", "checkpoints"}
    foreign = sorted(
        name
        for name in names - {*_FILES, *_FOLDERS, LOCK}
        if not name.startswith(("eval_", "eval-"))
        and not name.endswith((".damaged", ".abandoned"))
        and not (name.startswith(".") and name.endswith(".tmp"))
        and ".jsonl.begun-again-" not in name
    )
    if foreign and not is_run:
        raise ConfigError(
            f"run.dir '{path}' holds files that are not a run's ({', '.join(foreign[:3])}). "
            f"Only an empty folder or an earlier run's folder is used. {advice}"
        )


def free_name(path: Path, timestamp: str, between: str = ".old-") -> Path:
    """``<name>.old-<timestamp>``, with a number when two folders are moved within one second."""
    names = (f"{path.name}{between}{timestamp}{f'-{number}' if number > 1 else ''}" for number in count(1))
    return next(free for name in names if not os.path.lexists(free := path.with_name(name)))


class FolderGone(VlmPgError):
    """The run's folder was removed, or another one has its path."""


class Presence:
    """Recognizes the run's folder by its inode: open files of a removed folder can be written without an error."""

    def __init__(self, path: Path):
        self._path = path
        self._known = os.stat(path)

    def check(self) -> None:
        """Raise FolderGone if the path no longer leads to the folder."""
        if not self._is_here():
            state = "is another folder now" if self._path.exists() else "is not there any more"
            raise FolderGone(
                f"The run's folder {self._path} {state}: it was moved or removed while the run was going on, and what "
                "the run writes would be lost. Move it back and resume with run.resume=auto, or begin again in another "
                "run.dir."
            )

    def refuge(self) -> Path:
        """A path where finished work can still be saved: the folder's own, unless something else has it."""
        if self._is_here() or not os.path.lexists(self._path):
            return self._path
        return free_name(self._path, f"{datetime.now():%Y%m%d-%H%M%S}", ".rescued-")

    def _is_here(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), self._known)
        except OSError:
            return False
