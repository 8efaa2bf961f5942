"""Which archives were unpacked: a hidden note beside each, with the files that came out of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from vlm_pg.files import replacing


def is_unpacked(archive: Path) -> bool:
    """Whether an archive was unpacked as it is now, and all of its files are there, as large as they were."""
    try:
        with _note(archive).open(encoding="utf-8", newline="\n") as lines:
            if next(lines, "") != _state(archive):
                return False
            files = (line.rstrip("\n").partition(" ") for line in lines)
            return all((archive.parent / name).stat().st_size == int(size) for size, _, name in files)
    except (OSError, ValueError):  # a file is gone; there is no note, or another file in its place
        return False


def note_unpacked(archive: Path, names: Iterable[PurePosixPath]) -> None:
    """Say that these files, below the archive's folder, are all that it holds."""
    with replacing(_note(archive), durable=False) as file:
        file.write(_state(archive).encode())
        for name in names:
            file.write(f"{(archive.parent / name).stat().st_size} {name}\n".encode())


def _note(archive: Path) -> Path:
    return archive.with_name(f".{archive.name}.unpacked")


def _state(archive: Path) -> str:
    found = archive.stat()
    return f"{found.st_size} {found.st_mtime_ns}\n"
