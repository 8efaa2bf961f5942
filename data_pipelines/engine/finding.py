"""Media found where their own data set put them, and nowhere else: other sets call other videos the same."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path, PurePosixPath

from data_pipelines.engine.dataset import DataSet
from vlm_pg.errors import SampleError, printable
from vlm_pg.media.paths import EXTENSIONS

_SUFFIXES = tuple(suffix for suffixes in EXTENSIONS.values() for suffix in suffixes)
_ByStem = Mapping[str, list[PurePosixPath]]


class MediaFinder:
    """Where the media of a data set lie below their root.

    Projects, mirrors and archives keep the same files under different folders. What a row calls a file is looked for
    in the folders that the data set's description names, in one of three ways:

    - in the one folder that a row's files are in (``Form.folder``);
    - by name, in sets whose media have names of their own (``DataSet.by_name``): in the folders and anything below,
      where ``a/1.mp4`` may be ``1.mp4`` or ``x/a/1.mp4``, never ``b/1.mp4``; then in the root itself. Videos are found
      under another ending too, because mirrors repackage them;
    - else by path: in the folders that have its first folder; only where none has, in the root itself.

    Args:
        root: the media root.
        dataset: names the folders.
    """

    def __init__(self, root: Path, dataset: DataSet):
        self._root, self._patterns, self._by_name = root, dataset.media or (), dataset.by_name
        self._indexes: dict[tuple[PurePosixPath, bool], _ByStem] = {}

    def path_of(self, name: str, folder: str | None = None, annotations: Path | None = None) -> str:
        """Path below the media root of the file that a row calls ``name``, or where it would be.

        Args:
            name: as the row has it.
            folder: the one that all files of the row are in, where its form names it.
            annotations: the folder of the row's annotation file.

        Raises:
            SampleError: ``ambiguous_media``: several files might be meant.
        """
        wanted = PurePosixPath(name.strip().replace("\\", "/"))
        if "://" in name or wanted.is_absolute() or not wanted.parts:
            return name  # judged, and mostly refused, where media are read
        if folder is not None:
            return (self._own(folder, annotations, wanted) / wanted).as_posix()
        if ".." in wanted.parts:
            return name
        found = self._named(wanted) if self._by_name else self._placed(wanted)
        if len(found) > 1:
            raise SampleError(
                "ambiguous_media",
                f"'{printable(name, 200)}' may be {', '.join(printable(str(path), 200) for path in found[:3])}"
                f"{' ...' if len(found) > 3 else ''}. One file of that name below the media root is expected. Name "
                "a media root that holds one of them, or move the others away.",
            )
        return found[0].as_posix() if found else name.strip()

    def _own(self, folder: str, annotations: Path | None, wanted: PurePosixPath) -> PurePosixPath:
        """The one folder of a row's files: that of its annotations if it is called so, else one of that name.

        The root may be that folder itself, where it is called so, or holds the annotations.
        """
        beside = None if annotations is None else _below(annotations, self._root)
        if beside is not None and annotations is not None and _name(annotations) == folder:
            return beside
        if self._is_folder(PurePosixPath(folder)):
            return PurePosixPath(folder)
        if _name(self._root) == folder:
            return PurePosixPath()
        if beside is not None and (not beside.parts or self._is_folder(beside / wanted.parts[0])):
            return beside
        return PurePosixPath(folder)

    def _placed(self, wanted: PurePosixPath) -> list[PurePosixPath]:
        first, *inner = wanted.parts
        folders = self._holders.get(first, [])
        if not folders and (inner or not self._folders):
            return [wanted] if self._is_file(wanted) else []
        # Where it is missing, it would be in the first of these folders: a file of the root is none of theirs.
        found = [folder / wanted for folder in folders if self._is_file(folder / wanted)]
        return found or [(folders or self._folders[0])[0] / wanted]

    def _named(self, wanted: PurePosixPath) -> list[PurePosixPath]:
        for folders in self._folders:
            found = [folder / wanted for folder in folders if self._is_file(folder / wanted)]
            if found := found or self._inside(folders, wanted):
                return found
        if self._is_file(wanted):
            return [wanted]
        in_root = (_alike(self._by_stem(place, deep=False), wanted) for place in (wanted.parent, PurePosixPath()))
        return next(filter(None, in_root), [])

    def _inside(self, folders: list[PurePosixPath], wanted: PurePosixPath) -> list[PurePosixPath]:
        """Files in the folders, however deep, that may be the wanted one; those that share most folders with it."""
        shared: dict[PurePosixPath, int] = {}
        for folder in folders:
            for path in _alike(self._by_stem(folder, deep=True), wanted):
                inner, outer = path.relative_to(folder).parts[:-1], wanted.parts[:-1]
                number = min(len(inner), len(outer))
                if inner[len(inner) - number :] == outer[len(outer) - number :]:
                    shared[path] = number
        return [path for path, number in shared.items() if number == max(shared.values())]

    @cached_property
    def _folders(self) -> list[list[PurePosixPath]]:
        """Below the root, relative to it: those of each pattern."""
        return [folders for pattern in self._patterns if (folders := list(self._matching(pattern)))]

    def _matching(self, pattern: str) -> Iterator[PurePosixPath]:
        # A set's names are its own: whatever lies below a root that is called like its folder is its own, too.
        if pattern == "." or (self._by_name and fnmatchcase(_name(self._root), PurePosixPath(pattern).name)):
            yield PurePosixPath()
        if pattern != ".":
            for path in sorted(self._root.glob(pattern)):
                if path.is_dir():
                    yield PurePosixPath(path.relative_to(self._root))

    @cached_property
    def _holders(self) -> Mapping[str, list[PurePosixPath]]:
        """The folders of all patterns, by what lies in them."""
        found: defaultdict[str, list[PurePosixPath]] = defaultdict(list)
        for folder in dict.fromkeys(folder for folders in self._folders for folder in folders):
            with suppress(OSError):  # one that may not be entered has nothing
                for name in os.listdir(self._root / folder):
                    found[name].append(folder)
        return found

    def _by_stem(self, folder: PurePosixPath, deep: bool) -> _ByStem:
        """Media in a folder of the root, and, if ``deep``, in those below it, by their names without ending."""
        if (folder, deep) not in self._indexes:
            found: defaultdict[str, list[PurePosixPath]] = defaultdict(list)
            for path in _files_in(self._root / folder, deep):
                if path.suffix.lower() in _SUFFIXES:
                    found[path.stem].append(PurePosixPath(path.relative_to(self._root)))
            self._indexes[folder, deep] = dict(found)
        return self._indexes[folder, deep]

    def _is_file(self, relative: PurePosixPath) -> bool:
        try:
            return (self._root / relative).is_file()
        except (OSError, ValueError):  # a name no file system takes
            return False

    def _is_folder(self, relative: PurePosixPath) -> bool:
        try:
            return (self._root / relative).is_dir()
        except (OSError, ValueError):
            return False


def _alike(files: _ByStem, wanted: PurePosixPath) -> list[PurePosixPath]:
    """The files that are called as the wanted one, with its ending or else with one of its kind."""
    paths = files.get(wanted.stem, [])
    if wanted.suffix.lower() not in _SUFFIXES:
        return [path for path in paths if path.name == wanted.name]
    kind = next(suffixes for suffixes in EXTENSIONS.values() if wanted.suffix.lower() in suffixes)
    exact = [path for path in paths if path.suffix == wanted.suffix]
    return exact or [path for path in paths if path.suffix.lower() in kind]


def _files_in(folder: Path, deep: bool) -> Iterator[Path]:
    """In the same order on every machine. Links to folders are not followed: they may lead in circles, or out."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(folders) if deep else []
        for name in sorted(files):
            yield Path(place, name)


def _name(folder: Path) -> str:
    """What a folder is called where it is named: "." has a name too; what a link points to does not count."""
    return os.path.basename(os.path.abspath(folder))


def _below(folder: Path, root: Path) -> PurePosixPath | None:
    """A folder relative to the root; None if it lies elsewhere."""
    try:
        return PurePosixPath(folder.resolve().relative_to(root.resolve()))
    except (OSError, RuntimeError, ValueError):
        return None
