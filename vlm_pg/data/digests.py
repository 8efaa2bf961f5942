"""Digests of the records of a run, and how they differ from those in a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlm_pg.data.files import files_of
from vlm_pg.data.settings import DataSettings
from vlm_pg.errors import ConfigError


def data_digests(data: DataSettings, usable: Mapping[str, int] | None = None) -> dict[str, dict[str, Any]]:
    """Path and SHA-256 of all existing record files, by their setting, without media.

    ``usable``: number of usable records of each training set, which versions of this program may see differently.
    """
    names = {_train(name): name for name in data.train_sets}
    paths = {key: data.train_sets[name] for key, name in names.items()}
    paths |= {f"data.eval.{name}": path for name, path in data.eval.items()}
    files = {key: _files(path) for key, path in paths.items()}
    digests: dict[str, dict[str, Any]] = {
        key: {"path": str(paths[key]), "sha256": _sha256(found)} for key, found in files.items() if found
    }
    for name, count in (usable or {}).items():
        digests.get(_train(name), {})["usable"] = count
    return digests


def changed_data(before: Any, now: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each set of records that was changed, added, removed or renamed since the checkpoint was written, or
    has another number of usable records. The same records at another path are equal.

    Args:
        before: the digests in the checkpoint; older ones have none.
    """
    if not isinstance(before, dict):
        return []
    then = {key: entry for key, entry in before.items() if isinstance(entry, dict) and "sha256" in entry}
    lines, lost = [], {key: entry for key, entry in then.items() if key not in now}
    for key, entry in now.items():
        known = then.get(key)
        shown = f"{key}={entry['path']}"
        if known is not None:
            if known["sha256"] != entry["sha256"]:
                where = "" if known.get("path") == entry["path"] else f" (it was {known.get('path')})"
                lines.append(f"{shown} has another content than when the checkpoint was written{where}: {_so(key)}")
            elif known.get("usable", entry.get("usable")) != entry.get("usable", known.get("usable")):
                lines.append(
                    f"{shown} has {entry['usable']} usable records; it had {known['usable']} when the checkpoint was "
                    f"written: {_so(key)}"
                )
        elif key not in before:
            other = next((old for old in lost if _part(old) == _part(key) and _same(lost[old], entry)), None)
            if other is not None:
                del lost[other]
                lines.append(f"{shown} was called {other} when the checkpoint was written: {_so(key)}")
            else:
                lines.append(f"{shown} was not there when the checkpoint was written: {_so(key)}")
    for key, entry in lost.items():
        lines.append(f"{key}={entry.get('path')} of when the checkpoint was written is not there: {_so(key)}")
    return lines


def _train(name: str) -> str:
    """The setting of a training set."""
    return "data.train" + (f".{name}" if name else "")


def _part(key: str) -> str:
    """ "data.train" or "data.eval"."""
    return ".".join(key.split(".")[:2])


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one["sha256"] == other["sha256"]


def _so(key: str) -> str:
    """The consequence of a change."""
    if _part(key) == "data.eval":
        return "scores of before and after it are not of the same questions"
    return "the questions of further steps, and their order, are not those the run would have had"


def _files(path: Path) -> tuple[Path, ...]:
    """() for an unreadable set: reading its records raises the error, on every rank."""
    try:
        found = files_of(path)
    except ConfigError:
        return ()
    return found if all(file.is_file() for file in found) else ()


def _sha256(files: Sequence[Path]) -> str:
    """SHA-256 of a file's content; of several files, of their digests in order."""
    digests = []
    for path in files:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()
