"""Writing files so that a killed process leaves the old file or the new one, never half of one."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vlm_pg.errors import VlmPgError


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """Write ``data`` to a temporary file beside ``path``, fsync it, and rename it into place."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            _give_usual_permissions(file.fileno())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def _give_usual_permissions(descriptor: int) -> None:
    """mkstemp makes files only their owner can read; give them what an ordinary open() would have given."""
    mask = os.umask(0)
    os.umask(mask)
    os.fchmod(descriptor, 0o666 & ~mask)


def sync_path(path: Path) -> None:
    """fsync a file's content, or a folder so that a rename in it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json_atomic(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON. Raises VlmPgError naming the key when a number in it is NaN or infinite."""
    key = find_non_finite(value)
    if key is not None:
        raise VlmPgError(
            f"{path.name}: the value of '{key}' is not a finite number. JSON holds finite numbers and null only; "
            "write null for a value that does not exist, or find out where the number came from."
        )
    write_bytes_atomic(path, json_line(value, indent=2))


def json_line(value: Any, indent: int | None = None) -> bytes:
    """``value`` as JSON in UTF-8 with a closing newline; a lone surrogate stays an escape, which JSON allows."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent) + "\n"
    return text.encode("utf-8", "backslashreplace")


def find_non_finite(value: Any, key: str = "") -> str | None:
    """The dotted key of the first NaN or infinity inside ``value``; None when all numbers are finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return key or "the value itself"
    children: Iterator[tuple[str, Any]] = iter(())
    if isinstance(value, Mapping):
        children = ((str(name), child) for name, child in value.items())
    elif isinstance(value, list | tuple):
        children = ((str(index), child) for index, child in enumerate(value))
    for name, child in children:
        found = find_non_finite(child, f"{key}.{name}" if key else name)
        if found is not None:
            return found
    return None


def keep_json_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> tuple[int, int]:
    """Rewrite a JSONL file with the lines that ``keep`` accepts; returns (lines dropped, lines that were no JSON).

    The file is only rewritten when something is dropped, in one piece, so a crash here loses nothing. Lines that
    are not JSON (a process killed in the middle of a write leaves one) are moved to ``<name>.damaged``.
    """
    if not path.exists():
        return 0, 0
    kept: list[bytes] = []
    damaged: list[bytes] = []
    dropped = 0
    with path.open("rb") as file:
        for line in file:
            record = parse_json_line(line)
            if record is None:
                damaged.append(line if line.endswith(b"\n") else line + b"\n")
            elif keep(record):
                kept.append(line if line.endswith(b"\n") else line + b"\n")
            else:
                dropped += 1
    if damaged:
        with path.with_name(path.name + ".damaged").open("ab") as file:
            file.writelines(damaged)
    if damaged or dropped:
        write_bytes_atomic(path, b"".join(kept))
    return dropped, len(damaged)


def parse_json_line(line: bytes) -> dict[str, Any] | None:
    """The JSON object on one line, or None if the line is not a JSON object."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
