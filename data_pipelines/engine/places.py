"""Files and folders below a media root: what lies there, what a folder is called."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from vlm_pg.media.paths import EXTENSIONS

SUFFIXES = tuple(suffix for suffixes in EXTENSIONS.values() for suffix in suffixes)
EVERYTHING = "**"
ByStem = Mapping[str, list[PurePosixPath]]


def alike(files: ByStem, wanted: PurePosixPath) -> list[PurePosixPath]:
    """The files that are called as the wanted one, with its ending or else with one of its kind."""
    paths = files.get(wanted.stem, [])
    if wanted.suffix.lower() not in SUFFIXES:
        return [path for path in paths if path.name == wanted.name]
    kind = next(suffixes for suffixes in EXTENSIONS.values() if wanted.suffix.lower() in suffixes)
    exact = [path for path in paths if path.suffix == wanted.suffix]
    return exact or [path for path in paths if path.suffix.lower() in kind]


def files_in(folder: Path, below: str = "") -> Iterator[Path]:
    """In the same order on every machine. Links to folders are not followed: they may lead in circles, or out.

    Args:
        folder: where to look.
        below: of which folders in it the files count too: "" none, ``EVERYTHING`` all, however deep, else those in it
            whose names fit this glob pattern.
    """
    for place, folders, files in os.walk(folder):
        if below != EVERYTHING:
            inner = folders if below and Path(place) == folder else []
            folders[:] = [name for name in inner if fnmatchcase(name, below)]
        folders.sort()
        for name in sorted(files):
            yield Path(place, name)


def folders_of(root: Path, pattern: str, called_so: bool) -> Iterator[PurePosixPath]:
    """The folders below the root, relative to it, that fit a glob pattern, the root itself first.

    Args:
        root: the media root.
        pattern: "." is the root.
        called_so: whether the root may be one of the folders that the pattern names: "videos" the one of
            "validation/videos", or its "validation".
    """
    if pattern == ".":
        yield PurePosixPath()
        return
    found: dict[PurePosixPath, None] = {}
    if called_so:
        parts = PurePosixPath(pattern).parts
        for place in range(len(parts) - 1, -1, -1):
            if not fnmatchcase(name_of(root), parts[place]):
                continue
            if place == len(parts) - 1:
                found[PurePosixPath()] = None
            elif parts[place] != "*":
                found |= dict.fromkeys(_globbed(root, "/".join(parts[place + 1 :])))
    yield from found | dict.fromkeys(_globbed(root, pattern))


def _globbed(root: Path, pattern: str) -> list[PurePosixPath]:
    return [PurePosixPath(path.relative_to(root)) for path in sorted(root.glob(pattern)) if path.is_dir()]


def name_of(folder: Path) -> str:
    """What a folder is called where it is named: "." has a name too; what a link points to does not count."""
    return os.path.basename(os.path.abspath(folder))


def below(folder: Path, root: Path) -> PurePosixPath | None:
    """A folder relative to the root; None if it lies elsewhere."""
    try:
        return PurePosixPath(folder.resolve().relative_to(root.resolve()))
    except (OSError, RuntimeError, ValueError):
        return None
