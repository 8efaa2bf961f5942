"""Files of a data set found where they lie: annotation files by their form's patterns, media by what rows call them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath

from vlm_pg.errors import SampleError, printable
from vlm_pg.media.paths import EXTENSIONS

_SUFFIXES = tuple(suffix for suffixes in EXTENSIONS.values() for suffix in suffixes)


class MediaFinder:
    """Where the media of a data set lie below their root.

    Projects, mirrors and archives keep the same files under different folders. A name is looked for below the root and
    the folders that the data set's description names, pattern by pattern, of which each may lead to one; then a file of
    that name anywhere below the root is taken, if there is one alone. Videos are found under another ending too:
    mirrors repackage them.

    Args:
        root: the media root.
        folders: glob patterns below it.
        by_name: whether to look anywhere below the root (``DataSet.by_name``).
    """

    def __init__(self, root: Path, folders: Sequence[str] = (), by_name: bool = True):
        self._root, self._patterns, self._by_name = root, folders, by_name

    def path_of(self, name: str) -> str:
        """Path below the media root of the file that a row calls ``name``; the name itself where there is none.

        Raises:
            SampleError: ``ambiguous_media``: several files might be meant.
        """
        wanted = PurePosixPath(name.strip().replace("\\", "/"))
        if "://" in name or wanted.is_absolute() or ".." in wanted.parts:
            return name  # judged, and mostly refused, where media are read
        groups = ([folder / wanted for folder in folders] for folders in self._folders)
        placed = ([path.as_posix() for path in paths if self._is_file(path)] for paths in groups)
        found = next(filter(None, placed), []) or (self._best(wanted) if self._by_name else [])
        if len(found) > 1:
            raise SampleError(
                "ambiguous_media",
                f"'{printable(name, 200)}' may be {', '.join(printable(path, 200) for path in found[:3])}"
                f"{' ...' if len(found) > 3 else ''}. One file of that name below the media root is expected. Name "
                "a media root that holds one of them, or move the others away.",
            )
        return found[0] if found else name.strip()

    @cached_property
    def _folders(self) -> list[list[Path]]:
        """Below the root, relative to it: the root itself, then those of each pattern, of which none comes first."""
        below = [[path for path in sorted(self._root.glob(one)) if path.is_dir()] for one in self._patterns]
        return [[Path()], *([path.relative_to(self._root) for path in some] for some in below)]

    def _is_file(self, relative: Path) -> bool:
        try:
            return (self._root / relative).is_file()
        except (OSError, ValueError):  # a name no file system takes
            return False

    def _best(self, wanted: PurePosixPath) -> list[str]:
        """The files whose paths end as the wanted one does, in as many parts as possible."""
        same_name = self._by_stem.get(wanted.stem, ())
        if wanted.suffix.lower() in _SUFFIXES:
            kind = next(suffixes for suffixes in EXTENSIONS.values() if wanted.suffix.lower() in suffixes)
            exact = [path for path in same_name if PurePosixPath(path).suffix == wanted.suffix]
            same_name = exact or [path for path in same_name if PurePosixPath(path).suffix.lower() in kind]
        else:
            same_name = [path for path in same_name if PurePosixPath(path).name == wanted.name]
        scores = {path: _common_end(PurePosixPath(path), wanted) for path in same_name}
        return [path for path in same_name if scores[path] == max(scores.values())]

    @cached_property
    def _by_stem(self) -> dict[str, list[str]]:
        """Relative paths of all media below the root, by their names without ending."""
        found: defaultdict[str, list[str]] = defaultdict(list)
        for path in _files_below(self._root):
            if path.suffix.lower() in _SUFFIXES:
                found[path.stem].append(path.relative_to(self._root).as_posix())
        return dict(found)


def _files_below(root: Path) -> Iterator[Path]:
    """In the same order on every machine. Links to folders are not followed: they may lead in circles, or out."""
    for folder, folders, files in os.walk(root):
        folders.sort()
        for name in sorted(files):
            yield Path(folder, name)


def _common_end(path: PurePosixPath, wanted: PurePosixPath) -> int:
    """How many folders before the name are the same."""
    same = 0
    for one, other in zip(reversed(path.parts[:-1]), reversed(wanted.parts[:-1]), strict=False):
        if one != other:
            break
        same += 1
    return same
