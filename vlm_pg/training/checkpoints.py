"""Checkpoints that a killed save can never be mistaken for.

Everything is written into a temporary folder and fsynced; a manifest with the size and SHA-256 of every file comes
last; then the folder is renamed. Only a folder with a manifest whose sizes hold counts as a checkpoint, and loading
checks the hashes too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vlm_pg.observe.files import sync_path

MANIFEST = "manifest.json"
STATE = "trainer_state.json"
_NAME = re.compile(r"step-(\d{6,})")


def checkpoint_path(folder: Path, step: int) -> Path:
    """``checkpoints/step-000120`` for step 120."""
    return folder / f"step-{step:06d}"


def begin(folder: Path, step: int) -> Path:
    """An empty temporary folder to write the checkpoint of ``step`` into; leftovers of killed saves are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    never_finished = [path for path in folder.glob("step-*") if not (path / MANIFEST).exists()]
    for leftover in (*folder.glob(".tmp-*"), *never_finished):
        shutil.rmtree(leftover)
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
    if final.exists():
        shutil.rmtree(final)
    os.rename(temporary, final)
    sync_path(final.parent)
    return final


def find_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints, oldest first."""
    found = []
    for path in folder.glob("step-*"):
        match = _NAME.fullmatch(path.name)
        if match and problem_with(path) is None:
            found.append((int(match[1]), path))
    return sorted(found)


def problem_with(path: Path, check_hashes: bool = False) -> str | None:
    """Why ``path`` is not a complete checkpoint, or None if it is."""
    try:
        entries = json.loads((path / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        return "it has no manifest, so it was never finished"
    except (ValueError, KeyError, TypeError):
        return "its manifest is damaged"
    for name, entry in entries.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry["bytes"]:
            return f"{name} has {file.stat().st_size} bytes instead of {entry['bytes']}"
        if check_hashes and _sha256(file) != entry["sha256"]:
            return f"{name} does not have the content that was saved"
    return None


def read_state(path: Path) -> dict[str, Any]:
    """The trainer's state of a checkpoint whose files have been verified."""
    return json.loads((path / STATE).read_text())


def prune(folder: Path, keep: int, log: Callable[[str], None] = lambda line: None) -> None:
    """Remove all but the ``keep`` newest complete checkpoints."""
    for step, path in find_checkpoints(folder)[:-keep]:
        # Without its manifest it is no checkpoint any more, whatever a kill leaves of it.
        (path / MANIFEST).unlink()
        shutil.rmtree(path)
        log(f"removed checkpoint of step {step} ({path})")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
