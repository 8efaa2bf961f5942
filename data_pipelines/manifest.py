"""The manifest that marks a prepared folder as complete: of what, by which program, and its files' bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from data_pipelines.program import program
from vlm_pg.data.manifest import MANIFEST, read_manifest, sizes_of
from vlm_pg.errors import ConfigError, printable
from vlm_pg.files import write_bytes_atomic

# Beside records, for people and for checks of what was prepared.
REPORT, SUMMARY = "report.json", "summary.html"
# Files are compared by size, and by content as long as that takes no more than a moment.
_COMPARED_BYTES = 256 << 20


def fingerprint(arguments: Mapping[str, Any]) -> str:
    """SHA-256 of arguments that are JSON values: equal exactly when they are equal."""
    return hashlib.sha256(json.dumps(arguments, sort_keys=True).encode()).hexdigest()


def sha256_of(paths: Iterable[Path]) -> str:
    """Of one file its SHA-256 made into another, of several that of all in their order."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(_content(path).digest())
    return digest.hexdigest()


def own_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest, if this program wrote it: its arguments have its fingerprint."""
    written = read_manifest(folder)
    return None if written is None or written["fingerprint"] != fingerprint(written["arguments"]) else written


def find_prepared(folder: Path, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """The manifest of a folder that holds everything these arguments produce; None of one that was not finished.

    The manifest is written last, so a folder that has one was finished. Which program did is told by its ``program``.

    Raises:
        ConfigError: the folder was finished with other arguments, or files of it are gone or not as they were written.
    """
    if not (folder / MANIFEST).exists():
        return None
    written = own_manifest(folder)
    if written is None:
        raise ConfigError(
            f"'{folder / MANIFEST}' is not the manifest of a prepared folder. This program writes that file itself. "
            "Choose another --out, or remove it."
        )
    if written["fingerprint"] != fingerprint(arguments):
        before = {name: value for name, value in written["arguments"].items() if arguments.get(name) != value}
        now = {name: value for name, value in arguments.items() if written["arguments"].get(name) != value}
        raise ConfigError(
            f"Folder '{folder}' was prepared with other arguments: it has {before}, asked for is {now}. A folder holds "
            "one prepared set. Choose another --out, or pass --overwrite."
        )
    missing = [name for name in written["files"] if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"Folder '{folder}' lost {', '.join(missing)} since it was prepared. All files its {MANIFEST} lists are "
            "needed. Pass --overwrite to prepare it again."
        )
    _check_files(folder, written)
    return written


def _check_files(folder: Path, manifest: dict[str, Any]) -> None:
    sizes, left = sizes_of(manifest), _COMPARED_BYTES
    for name in sorted(manifest["files"]):
        path, expected = folder / name, sizes.get(name)
        if expected is None:
            continue
        came = path.stat().st_size
        left -= came
        same = came == expected
        if same and left >= 0:
            same = _content(path).hexdigest() == manifest["written"][name].get("sha256")
        if not same:
            raise ConfigError(
                f"'{printable(str(path), 300)}' is not as it was prepared: it has {came:,} bytes, it had {expected:,}"
                f"{', with another content' if came == expected else ''}. All files its {MANIFEST} lists are needed. "
                "Pass --overwrite to prepare it again, or move what you changed yourself into a folder of its own."
            )


def write_manifest(
    folder: Path,
    arguments: Mapping[str, Any],
    files: Mapping[str, int],
    more: Mapping[str, Any] | None = None,
    beside: Iterable[str] = (),
) -> None:
    """Mark the folder as complete. Call it after everything else is written.

    Args:
        files: name -> number of records of each file that readers need.
        more: what readers may like to know, as JSON values.
        beside: names of further files that were written; they may be changed or removed.
    """
    content = {"fingerprint": fingerprint(arguments), "program": program(), "arguments": dict(arguments)}
    written = {name: _entry(folder / name) for name in (*files, *beside)}
    content |= {"files": dict(files), "written": written, **(more or {})}
    write_bytes_atomic(folder / MANIFEST, (json.dumps(content, indent=2) + "\n").encode())


def _entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _content(path).hexdigest()}


def _content(path: Path) -> Any:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256")
