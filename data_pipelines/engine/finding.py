"""Media found where their own data set put them, and nowhere else: other sets call other videos the same."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from data_pipelines.engine.dataset import DataSet
from data_pipelines.engine.places import EVERYTHING, SUFFIXES, ByStem, alike, below, files_in, folders_of, name_of
from vlm_pg.errors import SampleError, printable

# A path below the root, and what it was found by: name, folder, and where the folder counts that of the annotations.
Found = tuple[str, str, str | None, str | None]


@dataclass(frozen=True)
class Asked:
    """What ``MediaFinder.path_of`` is asked for."""

    name: str
    folder: str | None
    annotations: Path | None


class MediaFinder:
    """Where the media of a data set lie below their root.

    Projects, mirrors and archives keep the same files under different folders. What a row calls a file is looked for
    in the folders that the data set's description names, in one of three ways:

    - in the one folder that a row's files are in (``Form.folder``);
    - by name, in sets whose media have names of their own (``DataSet.by_name``): in the folders and anything below,
      where ``a/1.mp4`` may be ``1.mp4`` or ``x/a/1.mp4``, never ``b/1.mp4``; then in those that other sets have too
      (``DataSet.shared``), and in the root itself. Videos are found under another ending too, because mirrors
      repackage them;
    - else by path: in the folders that have its first folder; only where none has, in the root itself.

    Args:
        root: the media root.
        dataset: names the folders.
        only_folder: the one that all rows' files are in, where there is one: the root may be it under another name.
    """

    def __init__(self, root: Path, dataset: DataSet, only_folder: str | None = None):
        self._root, self._dataset, self._only_folder = root, dataset, only_folder
        self._by_name = dataset.by_name
        self._below: dict[Path, PurePosixPath | None] = {}
        self._own_in_folder: dict[PurePosixPath, Callable[[str], bool]] = {}
        self._indexes: dict[tuple[PurePosixPath, str], ByStem] = {}
        self.asked: dict[str, Asked] = {}  # by the paths that were found, for whoever finds that nothing is there
        self._latest: list[Found] = []

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
        if "://" in name or wanted.is_absolute() or not wanted.parts or (folder is None and ".." in wanted.parts):
            return name  # judged, and mostly refused, where media are read
        if folder is not None:
            path = (self._own(folder, annotations, wanted) / wanted).as_posix()
        else:
            path = self._found(name, wanted)
        self.asked[path] = Asked(name, folder, annotations)
        self._latest.append((path, name, folder, None if folder is None else str(annotations)))
        return path

    def is_there(self, path: str) -> bool:
        """Whether a path that was found is that of a file."""
        return self._is_file(PurePosixPath(path))

    def latest(self) -> tuple[Found, ...]:
        """What was asked and found since this was called before."""
        latest, self._latest = tuple(self._latest), []
        return latest

    def looked_in(self) -> list[str]:
        """The folders that files are looked for in, where rows name none."""
        groups = [*self._folders, *(folders for folders, _ in self._shared)]
        return [folder.as_posix() for folder in dict.fromkeys(folder for folders in groups for folder in folders)]

    def _found(self, name: str, wanted: PurePosixPath) -> str:
        found = self._named(wanted) if self._by_name else self._placed(wanted)
        if len(found) > 1:
            raise _ambiguous(name, found)
        return found[0].as_posix() if found else name.strip()

    def _own(self, folder: str, annotations: Path | None, wanted: PurePosixPath) -> PurePosixPath:
        """The one folder of a row's files: that of its annotations if it is called so, else one of that name.

        The root may be that folder itself, where it is called so, or holds the annotations, or, in sets that say what
        all such folders are called, where it looks like it, no row is of another folder, and nothing there is called
        like one of the others.

        Raises:
            SampleError: ``ambiguous_media``: the file is in several folders that are called nearly so.
        """
        if annotations is not None and annotations not in self._below:
            self._below[annotations] = below(annotations, self._root)
        beside = None if annotations is None else self._below[annotations]
        if beside is not None and annotations is not None and name_of(annotations) == folder:
            return beside
        if self._is_folder(PurePosixPath(folder)):
            return PurePosixPath(folder)
        if name_of(self._root) == folder:
            return PurePosixPath()
        spelt = self._spelt(folder, beside)
        if likely := [place for place in spelt if self._is_folder(place / wanted.parts[0])]:
            holding = [place for place in likely if self._is_file(place / wanted)]
            if len(holding) > 1:
                raise _ambiguous(wanted.as_posix(), [place / wanted for place in holding])
            return (holding or likely)[0]
        # One that is called like another's folder holds that one's files.
        own = beside is not None and not self._is_anothers(name_of(self._root / beside), folder)
        if beside is not None and own and (not beside.parts or self._is_folder(beside / wanted.parts[0])):
            return beside
        if folder == self._only_folder and not self._has_others and self._is_folder(PurePosixPath(wanted.parts[0])):
            return PurePosixPath()
        return (spelt or [PurePosixPath(folder)])[0]

    def _spelt(self, folder: str, beside: PurePosixPath | None) -> list[PurePosixPath]:
        """The folders that are called nearly as ``folder``: that of the annotations, those in the root, the root."""
        pattern = self._dataset.spelt.get(folder)
        if pattern is None:
            return []
        places = [PurePosixPath(name) for name in self._inner_folders]
        places = [*([] if beside is None else [beside]), *places, PurePosixPath()]
        return [one for one in dict.fromkeys(places) if pattern.fullmatch(name_of(self._root / one))]

    def _is_anothers(self, name: str, folder: str) -> bool:
        return any(other != folder and pattern.fullmatch(name) for other, pattern in self._dataset.spelt.items())

    @cached_property
    def _inner_folders(self) -> list[str]:
        with suppress(OSError):
            return sorted(name for name in os.listdir(self._root) if self._is_folder(PurePosixPath(name)))
        return []

    @cached_property
    def _has_others(self) -> bool:
        """Whether the root, or a folder in it, is called as a folder that other rows of the set have may be."""
        called = self._dataset.called
        return called is None or any(called.fullmatch(name) for name in (name_of(self._root), *self._inner_folders))

    def _placed(self, wanted: PurePosixPath) -> list[PurePosixPath]:
        first, *inner = wanted.parts
        folders = self._holders.get(first, [])
        if not folders and (inner or not self._folders):
            return [wanted] if self._is_file(wanted) else []
        # Where it is missing, it would be in the first of these folders: a file of the root is none of theirs.
        places = [folder / wanted for folder in folders]
        # a video may be a folder of pictures
        found = [*filter(self._is_file, places)] or [*filter(self._is_folder, places)]
        return found or [(folders or self._folders[0])[0] / wanted]

    def _named(self, wanted: PurePosixPath) -> list[PurePosixPath]:
        for folders in self._folders:
            if found := self._own_in(folders, EVERYTHING, wanted):
                return found
        for folders, inner in self._shared:
            if found := self._own_in(folders, inner, wanted):
                return found
        if self._is_file(wanted):
            return [wanted]
        in_root = (alike(self._by_stem(place), wanted) for place in (wanted.parent, PurePosixPath()))
        return next(filter(None, in_root), [])

    def _own_in(self, folders: list[PurePosixPath], inner: str, wanted: PurePosixPath) -> list[PurePosixPath]:
        """The set's own files in the folders that may be the wanted one."""
        found = filter(self._is_own, (folder / wanted for folder in folders if self._is_file(folder / wanted)))
        return list(found) or self._inside(folders, inner, wanted)

    def _inside(self, folders: list[PurePosixPath], inner: str, wanted: PurePosixPath) -> list[PurePosixPath]:
        """Those in the folders and in folders below that may be the wanted one, and share most folders with it."""
        shared: dict[PurePosixPath, int] = {}
        for folder in folders:
            for path in filter(self._is_own, alike(self._by_stem(folder, inner), wanted)):
                within, outer = path.relative_to(folder).parts[:-1], wanted.parts[:-1]
                number = min(len(within), len(outer))
                if within[len(within) - number :] == outer[len(outer) - number :]:
                    shared[path] = number
        return [path for path, number in shared.items() if number == max(shared.values())]

    def _is_own(self, path: PurePosixPath) -> bool:
        folder = path.parent
        if self._dataset.own_in is None:
            return True
        if folder not in self._own_in_folder:
            beside = self._by_stem(folder).keys()
            self._own_in_folder[folder] = self._dataset.own_in(name_of(self._root) / folder, beside)
        return self._own_in_folder[folder](path.stem)

    @cached_property
    def _folders(self) -> list[list[PurePosixPath]]:
        """Below the root, relative to it: those of each pattern."""
        # A set's names are its own: whatever lies below a root that is called like its folder is its own, too.
        named = (list(folders_of(self._root, pattern, self._by_name)) for pattern in self._dataset.media or ())
        return [folders for folders in named if folders]

    @cached_property
    def _shared(self) -> list[tuple[list[PurePosixPath], str]]:
        """As ``_folders``, of those that other sets have too, each with the pattern of the folders in it that count."""
        named = ((list(folders_of(self._root, one, True)), inner) for one, inner in self._dataset.shared.items())
        return [(folders, inner) for folders, inner in named if folders]

    @cached_property
    def _holders(self) -> Mapping[str, list[PurePosixPath]]:
        """The folders of all patterns, by what lies in them."""
        found: defaultdict[str, list[PurePosixPath]] = defaultdict(list)
        for folder in dict.fromkeys(folder for folders in self._folders for folder in folders):
            with suppress(OSError):  # one that may not be entered has nothing
                for name in os.listdir(self._root / folder):
                    found[name].append(folder)
        return found

    def _by_stem(self, folder: PurePosixPath, inner: str = "") -> ByStem:
        """Media in a folder of the root, and in folders in it (see ``files_in``), by their names without ending."""
        if (folder, inner) not in self._indexes:
            found: defaultdict[str, list[PurePosixPath]] = defaultdict(list)
            for path in files_in(self._root / folder, inner):
                if path.suffix.lower() in SUFFIXES:
                    found[path.stem].append(PurePosixPath(path.relative_to(self._root)))
            self._indexes[folder, inner] = dict(found)
        return self._indexes[folder, inner]

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


def _ambiguous(name: str, found: Sequence[PurePosixPath]) -> SampleError:
    return SampleError(
        "ambiguous_media",
        f"'{printable(name, 200)}' may be {', '.join(printable(str(path), 200) for path in found[:3])}"
        f"{' ...' if len(found) > 3 else ''}. One file of that name below the media root is expected. Name "
        "a media root that holds one of them, or move the others away.",
    )
