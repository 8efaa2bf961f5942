"""Atomic checkpoints: an interrupted save is never mistaken for one.

All files are written into a temporary folder and fsynced; a manifest with size and SHA-256 of every file comes last;
then the folder is renamed. Only a folder with a manifest whose sizes hold counts as a checkpoint; loading checks the
hashes too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ValidationError

from vlm_pg.files import sync_path
from vlm_pg.observe.run_folder import free_name

MANIFEST = "manifest.json"
STATE = "trainer_state.json"
_NAME = re.compile(r"step-(\d{6,18})", re.ASCII)
# Read by transformers, peft and DeepSpeed: files of these kinds that were added later would be read too.
_READ_BY_LOADERS = frozenset((".json", ".jinja", ".safetensors", ".bin", ".pt", ".pth", ".py", ".model", ".txt"))


def checkpoint_path(folder: Path, step: int) -> Path:
    """``checkpoints/step-000120`` for step 120."""
    return folder / f"step-{step:06d}"


def begin(folder: Path, step: int) -> Path:
    """An empty temporary folder for the checkpoint of ``step``; leftovers of killed saves are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for entry in sorted(folder.glob(".tmp-*")):
        with suppress(OSError):  # another program may still read one that was removed
            _remove(entry)
    temporary = folder / f".tmp-step-{step:06d}"
    temporary.mkdir()
    return temporary


def commit(temporary: Path, step: int, state: dict[str, Any]) -> Path:
    """Turn a fully written temporary folder into the checkpoint of ``step``, replacing an earlier one of that step."""
    (temporary / STATE).write_text(json.dumps({"step": step, **state}, indent=2))
    files = sorted(path for path in temporary.rglob("*") if path.is_file())
    entries = {}
    for path in files:
        sync_path(path)
        entries[str(path.relative_to(temporary))] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    for directory in {path.parent for path in files}:
        sync_path(directory)
    manifest = temporary / MANIFEST
    manifest.write_text(json.dumps({"step": step, "files": entries}, indent=2))
    sync_path(manifest)
    sync_path(temporary)
    final = checkpoint_path(temporary.parent, step)
    if os.path.lexists(final):  # unusable, or this step would not be saved
        os.rename(final, free_name(final, f"{datetime.now():%Y%m%d-%H%M%S}", ".damaged-"))
    os.rename(temporary, final)
    sync_path(final.parent)
    return final


def candidates(folder: Path) -> list[tuple[int, Path]]:
    """Everything that is named like a checkpoint, whole or not, oldest first; empty where there is no such folder.

    Raises:
        OSError: the folder cannot be read.
    """
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return []
    named = [(_NAME.fullmatch(entry.name), entry.name) for entry in entries]
    return sorted((int(match[1]), folder / name) for match, name in named if match)


def find_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints, oldest first. Raises OSError: the folder cannot be read."""
    return [(step, path) for step, path in candidates(folder) if problem_with(path) is None]


def problem_with(path: Path, check_hashes: bool = False) -> str | None:
    """Why ``path`` is not a complete checkpoint, or None if it is."""
    try:
        return _problem_with(path, check_hashes)
    except OSError as error:
        return f"{error.filename or path} cannot be read ({error.strerror or error})"


def _problem_with(path: Path, check_hashes: bool) -> str | None:
    if not path.is_dir():
        return "it is no folder" if os.path.lexists(path) else "it is not there"
    if not os.path.lexists(path / MANIFEST):
        return f"it has no {MANIFEST}, so it was never finished"
    if not (path / MANIFEST).is_file():
        return f"its {MANIFEST} is no file"
    try:
        manifest = _Manifest.model_validate_json((path / MANIFEST).read_bytes())
    except ValidationError:
        return f"its {MANIFEST} is damaged"
    entries = manifest.files
    if STATE not in entries or not all(map(_lies_below, entries)):
        return f"its {MANIFEST} is damaged"
    match = _NAME.fullmatch(path.name)
    if match and manifest.step != int(match[1]):
        return f"its {MANIFEST} is of step {manifest.step!r}"
    for name, entry in entries.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry.bytes:
            return f"{name} has {file.stat().st_size} bytes instead of {entry.bytes}"
        if check_hashes and _sha256(file) != entry.sha256:
            return f"{name} does not have the content that was saved"
    if not check_hashes:
        return None
    found = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.suffix in _READ_BY_LOADERS)
    added = [name for name in found if name not in entries and name != MANIFEST]
    return f"{added[0]} was put there after it was saved" if added else None


class _Entry(BaseModel, strict=True):
    bytes: int
    sha256: str


class _Manifest(BaseModel):
    step: Any = None
    files: dict[str, _Entry]


def _lies_below(name: str) -> bool:
    """Whether it names a file below the checkpoint's folder."""
    path = PurePosixPath(name)
    return bool(name) and "\0" not in name and not path.is_absolute() and ".." not in path.parts


def read_state(path: Path) -> dict[str, Any]:
    """The trainer's state of a checkpoint whose files have been verified."""
    return json.loads((path / STATE).read_text())


def prune(folder: Path, keep: int, spare: Path | None, log: Callable[[str], None] = lambda line: None) -> None:
    """Remove all but the ``keep`` newest complete checkpoints and ``spare``."""
    for step, path in find_checkpoints(folder)[:-keep]:
        if path == spare:
            continue
        # Rename first, so that a partly removed folder is never mistaken for a checkpoint.
        leaving = path.with_name(f".tmp-removed-{path.name}")
        try:
            os.rename(path, leaving)
            _remove(leaving)
        except OSError as error:
            log(f"the checkpoint of step {step} could not be removed whole ({error}); the next save tries again")
            continue
        log(f"removed checkpoint of step {step} ({path})")


def _remove(path: Path) -> None:
    """A folder with its content; of a link the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


LINK = "best"
SCORE = "score"  # key in a checkpoint's state


class RunningScore:
    """The mean of one metric over the steps since the last checkpoint.

    Args:
        metric: its name; None: no checkpoint gets a score.
        latest: value of the last step instead of the mean, for metrics of the present weights.
    """

    def __init__(self, metric: str | None, latest: bool = False):
        self._metric, self._latest = metric, latest
        self._values: list[float] = []

    def add(self, values: Mapping[str, float | None]) -> None:
        """Called after every step; steps without a value of the metric do not count."""
        if self._latest:
            self._values = []
        value = None if self._metric is None else values.get(self._metric)
        if value is not None:
            self._values.append(value)

    def entry(self) -> dict[str, Any]:
        """Entry of the checkpoint's state; empty without a score."""
        if not self._values:
            return {}
        mean = sum(self._values) / len(self._values)
        return {SCORE: {"metric": self._metric, "mean": mean, "steps": len(self._values)}}

    def reset(self) -> None:
        """Called after every checkpoint."""
        self._values = []


def find_best(folder: Path, metric: str | None) -> Path | None:
    """The complete checkpoint with the highest score in ``metric``, of equals the newest; None if none has one."""
    scored = [(_score(path, metric), step, path) for step, path in find_checkpoints(folder)]
    return max(((score, step, path) for score, step, path in scored if score is not None), default=(0, 0, None))[2]


def _score(path: Path, metric: str | None) -> float | None:
    try:
        score = read_state(path)[SCORE]
        return float(score["mean"]) if metric is not None and score["metric"] == metric else None
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None


def point_to_best(folder: Path, metric: str | None, warn: Callable[[str], None] = print) -> Path | None:
    """Link ``folder``/best to the best checkpoint, which is returned; a dangling link is removed."""
    best, link = find_best(folder, metric), folder / LINK
    try:
        if best is None and link.is_symlink() and not link.exists():
            link.unlink()
        elif best is not None and not (link.is_symlink() and os.readlink(link) == best.name):
            temporary = folder / f".tmp-{LINK}"
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(best.name)
            temporary.replace(link)
    except OSError as error:
        warn(f"{link} could not be made to lead to {best} ({error}); that checkpoint is kept all the same")
    return best
