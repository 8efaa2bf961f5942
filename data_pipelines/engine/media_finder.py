"""Media found where their own data set put them, and nowhere else: other sets call other videos the same."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from heapq import nsmallest
from itertools import islice
from pathlib import Path, PurePosixPath

from data_pipelines.engine.dataset import DataSet
from vlm_pg.errors import SampleError, printable
from vlm_pg.media.paths import EXTENSIONS

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


# Files of a media root that are searched for a name; a listing of so many takes a second or two.
SEARCHED = 200_000
REASON = "missing_media"
_FEW = 4
# Other roots that are tried: each looks through folders of its own.
_ROOTS = 100


class Missing:
    """Says where media are not, and where they may be.

    The media root is searched through once, when the first medium is missing.

    Args:
        root: the media root.
        dataset: the set.
        only_folder: as of ``MediaFinder``.
        searched: how many files are looked at.
    """

    def __init__(self, root: Path, dataset: DataSet, only_folder: str | None = None, searched: int = SEARCHED):
        self._root, self._dataset, self._only_folder, self._searched = root, dataset, only_folder, searched
        self._others: dict[Path, MediaFinder] = {}

    def fault(self, path: str, asked: Asked, looked: Sequence[str]) -> SampleError:
        """The refusal of a question with such a medium.

        Args:
            path: where it would be, below the root.
            asked: how its row asks for it.
            looked: the folders below the root that it was looked for in.
        """
        wanted = PurePosixPath(asked.name.strip().replace("\\", "/"))
        return SampleError(
            REASON,
            f"Medium '{_shown(path)}' is not there. It was looked for in {self._told(path, wanted, asked, looked)}. "
            f"{self._advice(path, wanted, asked)}",
        )

    def _told(self, path: str, wanted: PurePosixPath, asked: Asked, looked: Sequence[str]) -> str:
        root = f"the media root '{_shown(str(self._root))}'"
        if asked.folder is not None:
            own = PurePosixPath(*PurePosixPath(path).parts[: -len(wanted.parts)]).as_posix()
            where = root if own == "." else f"'{_shown(own)}' below {root}"
            return f"{where} alone, which is to be the folder '{_shown(asked.folder)}' of this row's media"
        if not looked:
            named = [*(self._dataset.media or ()), *self._dataset.shared]
            return f"{root} itself{f', which has none of the folders {_listed(named)}' if named else ''}"
        return f"{_listed(looked)} below {root}{', and in the root itself' if self._dataset.by_name else ''}"

    def _advice(self, path: str, wanted: PurePosixPath, asked: Asked) -> str:
        files, is_whole = self._files
        places = alike(files, wanted) if self._dataset.by_name else self._exact(wanted)
        if not places:
            searched = "the root" if is_whole else f"the first {self._searched} files below the root"
            return f"No file of that name is in {searched}. Fetch it, or correct --media-root."
        lies = f"Of that name there is {_listed([place.as_posix() for place in places])}, maybe another data set's"
        roots = [root for place in places[:_FEW] if (root := self._root_for(place, asked)) is not None]
        if roots:
            remedy = f"give --media-root {_shown(str(roots[0]))}"
        else:
            remedy = self._renaming(places, wanted, asked) or f"move it to '{_shown(path)}'"
        return f"{lies}. Fetch the file; or, where that is the one meant, {remedy}."

    def _renaming(self, places: Sequence[PurePosixPath], wanted: PurePosixPath, asked: Asked) -> str:
        """What to call the folder of a row's media that it is in under another name."""
        holding = [place.parents[len(wanted.parts) - 1] for place in places if place.parts[-len(wanted.parts) :]
                   == wanted.parts]  # fmt: skip
        if asked.folder is None or asked.folder not in self._dataset.spelt or not holding:
            return ""
        folder = Path(os.path.abspath(self._root / holding[0]))
        called = folder.with_name(asked.folder)
        return f"call '{_shown(str(folder))}' '{_shown(asked.folder)}' and give --media-root {_shown(str(called))}"

    def _exact(self, wanted: PurePosixPath) -> list[PurePosixPath]:
        """Files of the whole path; else those of the name, unless it is as common as "1.png"."""
        found = [path for path in self._files[0].get(wanted.stem, []) if path.name == wanted.name]
        whole = [path for path in found if path.parts[-len(wanted.parts) :] == wanted.parts]
        return whole or (found if len(found) <= _FEW else [])

    def _root_for(self, path: PurePosixPath, asked: Asked) -> Path | None:
        """The media root with which this file would be found; None where there is none."""
        for parent in list(path.parents)[:-1]:
            if parent not in self._tried:
                continue
            root = self._root / parent
            if root not in self._others:
                self._others[root] = MediaFinder(root, self._dataset, self._only_folder)
            finder = self._others[root]
            with suppress(SampleError):  # several are of that name there
                found = finder.path_of(asked.name, asked.folder, asked.annotations)
                finder.asked.clear()
                finder.latest()
                if parent / found == path:
                    return root
        return None

    @cached_property
    def _tried(self) -> set[PurePosixPath]:
        """The folders that are tried as roots: the outermost that hold media, whichever rows were asked for before."""
        holding = {parent for paths in self._files[0].values() for path in paths for parent in path.parents}
        return set(nsmallest(_ROOTS, holding - {PurePosixPath()}, key=lambda one: (len(one.parts), one.parts)))

    @cached_property
    def _files(self) -> tuple[ByStem, bool]:
        """Media below the root, by their names without ending, and whether these are all."""
        found: defaultdict[str, list[PurePosixPath]] = defaultdict(list)
        files, number = files_in(self._root, EVERYTHING), 0
        for file in islice(files, self._searched):
            number += 1
            if file.suffix.lower() in SUFFIXES:
                found[file.stem].append(PurePosixPath(file.relative_to(self._root)))
        return dict(found), number < self._searched or next(files, None) is None


def _listed(names: Sequence[str]) -> str:
    few = ", ".join(f"'{_shown(name)}'" for name in names[:_FEW])
    return few if len(names) <= _FEW else f"{few} and {len(names) - _FEW} more"


def _shown(text: str) -> str:
    return printable(text, 200)
