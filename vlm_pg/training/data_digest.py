"""Whether the records of a resumed run are those it was trained on so far."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlm_pg.data.folders import files_of
from vlm_pg.data.settings import DataSettings
from vlm_pg.errors import ConfigError


def data_digests(data: DataSettings) -> dict[str, dict[str, str]]:
    """Path and SHA-256 of all records that are there, by their setting; the media they name are not read."""
    paths = {"data.train" + (f".{name}" if name else ""): path for name, path in data.train_sets.items()}
    paths |= {f"data.eval.{name}": path for name, path in data.eval.items()}
    files = {key: _files(path) for key, path in paths.items()}
    return {key: {"path": str(paths[key]), "sha256": _sha256(found)} for key, found in files.items() if found}


def changed_data(before: Any, now: Mapping[str, Mapping[str, str]]) -> list[str]:
    """A line for each file that has another content than when the checkpoint was written.

    Args:
        before: what the checkpoint says; older ones say nothing.
    """
    if not isinstance(before, dict):
        return []
    lines = []
    for key, entry in now.items():
        known = before.get(key)
        if isinstance(known, dict) and known.get("path") == entry["path"] and known.get("sha256") != entry["sha256"]:
            lines.append(
                f"{key}={entry['path']} has another content than when the checkpoint was written: the questions of "
                "further steps, and their order, are not those the run would have had"
            )
    return lines


def _files(path: Path) -> tuple[Path, ...]:
    """None where something is wrong: whoever reads the records says so, on every rank."""
    try:
        found = files_of(path)
    except ConfigError:
        return ()
    return found if all(file.is_file() for file in found) else ()


def _sha256(files: Sequence[Path]) -> str:
    """Of a file's content; of several, of their digests in order."""
    digests = []
    for path in files:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()
