"""Which code made an entry: no version number has to be thought of when it changes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path


def source_digest(files: Iterable[Path]) -> str:
    """SHA-256 of source files and their names, in whatever order they come and wherever they lie.

    A comment is a change too: entries are then made again, which costs time and no run its bits.

    Raises:
        OSError: one cannot be read, so that nobody knows what runs here.
    """
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda path: path.name):
        content = file.read_bytes()
        digest.update(f"{file.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
