"""Media found where their own data set put them, and nowhere else: other sets use the same file names."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cached_property
from heapq import nsmallest
from itertools import islice
from pathlib import Path, PurePosixPath

from data_pipelines.engine.dataset import DataSet
from vlm_pg.errors import SampleError, printable
from vlm_pg.media.paths import EXTENSIONS

SUFFIXES = tuple(suffix for suffixes in EXTENSIONS.values() for suffix in suffixes)
EVERYTHING = "**"
ByStem = Mapping[str, list[PurePosixPath]]
# A path below the root and its query: name, folder, and for queries with a folder that of the annotations.
Found = tuple[str, str, str | None, str | None]
# Arguments of ``MediaFinder.path_of``.
Query = tuple[str, str | None, Path | None]
MISSING_MEDIA = "missing_media"
# Files of a media root that are searched for a name; listing so many takes a second or two.
SEARCHED = 200_000
_LISTED = 4
# Other media roots that are tried: each indexes folders of its own.
_MAX_ROOTS = 100


class MediaFinder:
    """Where the media of a data set lie below their root.

    Projects, mirrors and archives keep the same files under different folders. The file name of a row is searched in
    the folders of the data set's description, in one of three ways:

    - in the one folder of the row's files (``Form.folder``);
    - by name, in sets with unique media names (``DataSet.by_name``): in the folders and anything below, where
      ``a/1.mp4`` may be ``1.mp4`` or ``x/a/1.mp4``, never ``b/1.mp4``; then in folders shared with other sets
      (``DataSet.shared``), and in the root itself. Videos are found under other suffixes too: mirrors repackage them;
    - else by path: in the folders that contain its first component; only where none does, in the root itself.

    Args:
        root: the media root.
        dataset: names the folders.
        only_folder: the folder of all rows' files, where there is one: the root may be it under another name.
    """

    def __init__(self, root: Path, dataset: DataSet, only_folder: str | None = None):
        self.root, self.dataset, self.only_folder = root, dataset, only_folder
        self.queries: dict[str, Query] = {}  # by resulting path
        self._found: list[Found] = []
        self._below: dict[Path, PurePosixPath | None] = {}
        self._own_in_folder: dict[PurePosixPath, Callable[[str], bool]] = {}
        self._indexes: dict[tuple[PurePosixPath, str], ByStem] = {}

    def path_of(self, name: str, folder: str | None = None, annotations: Path | None = None) -> str:
        """As ``locate``; the query and its result are remembered."""
        path = self.locate(name, folder, annotations)
        if self._searched(name, folder) is not None:
            self.queries[path] = name, folder, annotations
            self._found.append((path, name, folder, None if folder is None else str(annotations)))
        return path

    def locate(self, name: str, folder: str | None = None, annotations: Path | None = None) -> str:
        """Path below the media root of the file that a row calls ``name``, or where it would be.

        Args:
            name: as the row has it.
            folder: the one with all files of the row, where its form names it.
            annotations: the folder of the row's annotation file.

        Raises SampleError: ``ambiguous_media``: several files match.
        """
        wanted = self._searched(name, folder)
        if wanted is None:
            return name
        if folder is not None:
            return (self._folder_of_row(folder, annotations, wanted) / wanted).as_posix()
        found = self._by_name(wanted) if self.dataset.by_name else self._by_path(wanted)
        if len(found) > 1:
            raise _ambiguous(name, found)
        return found[0].as_posix() if found else name.strip()

    def is_file(self, relative: PurePosixPath | str) -> bool:
        """Whether a path below the root is that of a file."""
        with suppress(OSError, ValueError):  # a name no file system takes
            return (self.root / relative).is_file()
        return False

    def take_found(self) -> tuple[Found, ...]:
        """Queries and results since the last call."""
        found, self._found = tuple(self._found), []
        return found

    def searched_folders(self) -> list[str]:
        """The folders that are searched for rows that name none."""
        groups = [*self._folders, *(folders for folders, _ in self._shared)]
        return [folder.as_posix() for folder in dict.fromkeys(folder for folders in groups for folder in folders)]

    def _searched(self, name: str, folder: str | None) -> PurePosixPath | None:
        """The relative path to search for; None for names that are judged, and mostly refused, where media are read."""
        wanted = wanted_path(name)
        if "://" in name or wanted.is_absolute() or not wanted.parts or (folder is None and ".." in wanted.parts):
            return None
        return wanted

    def _folder_of_row(self, folder: str, annotations: Path | None, wanted: PurePosixPath) -> PurePosixPath:
        """The one folder of a row's files: that of its annotations if it has this name, else one of that name.

        The root may be that folder itself: where it has its name, or holds the annotations, or, in sets with
        ``DataSet.called``, where it has such content, all rows are of this folder, and nothing in it has the name of
        another one.

        Raises SampleError: ``ambiguous_media``: the file is in several folders with spellings of the name.
        """
        if annotations is not None and annotations not in self._below:
            self._below[annotations] = below(annotations, self.root)
        beside = None if annotations is None else self._below[annotations]
        if beside is not None and annotations is not None and name_of(annotations) == folder:
            return beside
        if self._is_folder(PurePosixPath(folder)):
            return PurePosixPath(folder)
        if name_of(self.root) == folder:
            return PurePosixPath()
        spelt = self._spellings(folder, beside)
        if likely := [one for one in spelt if self._is_folder(one / wanted.parts[0])]:
            holding = [one for one in likely if self.is_file(one / wanted)]
            if len(holding) > 1:
                raise _ambiguous(wanted.as_posix(), [one / wanted for one in holding])
            return (holding or likely)[0]
        # A folder with the name of another one holds that one's files.
        if (
            beside is not None
            and not any(
                other != folder and pattern.fullmatch(name_of(self.root / beside))
                for other, pattern in self.dataset.spelt.items()
            )
            and (not beside.parts or self._is_folder(beside / wanted.parts[0]))
        ):
            return beside
        if folder == self.only_folder and not self._has_others and self._is_folder(PurePosixPath(wanted.parts[0])):
            return PurePosixPath()
        return (spelt or [PurePosixPath(folder)])[0]

    def _spellings(self, folder: str, beside: PurePosixPath | None) -> list[PurePosixPath]:
        """The folders with another spelling of the name: that of the annotations, those in the root, the root."""
        pattern = self.dataset.spelt.get(folder)
        if pattern is None:
            return []
        folders = [*([] if beside is None else [beside]), *map(PurePosixPath, self._inner_folders), PurePosixPath()]
        return [one for one in dict.fromkeys(folders) if pattern.fullmatch(name_of(self.root / one))]

    @cached_property
    def _inner_folders(self) -> list[str]:
        with suppress(OSError):
            return sorted(name for name in os.listdir(self.root) if self._is_folder(PurePosixPath(name)))
        return []

    @cached_property
    def _has_others(self) -> bool:
        """Whether the root, or a folder in it, may be that of other rows of the set by its name."""
        called = self.dataset.called
        return called is None or any(called.fullmatch(name) for name in (name_of(self.root), *self._inner_folders))

    def _by_path(self, wanted: PurePosixPath) -> list[PurePosixPath]:
        first, *inner = wanted.parts
        folders = self._by_entry.get(first, [])
        if not folders and (inner or not self._folders):
            return [wanted] if self.is_file(wanted) else []
        # Where it is missing, it would be in the first of these folders: a file in the root does not count.
        paths = [folder / wanted for folder in folders]
        # a video may be a folder of pictures
        found = [*filter(self.is_file, paths)] or [*filter(self._is_folder, paths)]
        return found or [(folders or self._folders[0])[0] / wanted]

    def _by_name(self, wanted: PurePosixPath) -> list[PurePosixPath]:
        for folders, inner in [*((folders, EVERYTHING) for folders in self._folders), *self._shared]:
            exact = filter(self._is_own, (folder / wanted for folder in folders if self.is_file(folder / wanted)))
            if found := list(exact) or self._inside(folders, inner, wanted):
                return found
        if self.is_file(wanted):
            return [wanted]
        in_root = (alike(self._by_stem(folder), wanted) for folder in (wanted.parent, PurePosixPath()))
        return next(filter(None, in_root), [])

    def _inside(self, folders: list[PurePosixPath], inner: str, wanted: PurePosixPath) -> list[PurePosixPath]:
        """Candidates in the folders and their subfolders that share the most parent folders with the wanted path."""
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
        if self.dataset.own_in is None:
            return True
        if folder not in self._own_in_folder:
            beside = self._by_stem(folder).keys()
            self._own_in_folder[folder] = self.dataset.own_in(name_of(self.root) / folder, beside)
        return self._own_in_folder[folder](path.stem)

    @cached_property
    def _folders(self) -> list[list[PurePosixPath]]:
        """Folders below the root, relative to it, of each pattern of ``DataSet.media``."""
        # With unique names, whatever lies below a root with the name of the set's folder is the set's own, too.
        found = (list(folders_of(self.root, pattern, self.dataset.by_name)) for pattern in self.dataset.media or ())
        return [folders for folders in found if folders]

    @cached_property
    def _shared(self) -> list[tuple[list[PurePosixPath], str]]:
        """As ``_folders``, of ``DataSet.shared``, each with the pattern of its subfolders that count."""
        found = ((list(folders_of(self.root, one, True)), inner) for one, inner in self.dataset.shared.items())
        return [(folders, inner) for folders, inner in found if folders]

    @cached_property
    def _by_entry(self) -> Mapping[str, list[PurePosixPath]]:
        """The folders of all patterns, by the names of their entries."""
        found: defaultdict[str, list[PurePosixPath]] = defaultdict(list)
        for folder in dict.fromkeys(folder for folders in self._folders for folder in folders):
            with suppress(OSError):  # no permission
                for name in os.listdir(self.root / folder):
                    found[name].append(folder)
        return found

    def _by_stem(self, folder: PurePosixPath, inner: str = "") -> ByStem:
        """Media in a folder of the root, and in its subfolders (see ``files_in``), by stem."""
        if (folder, inner) not in self._indexes:
            self._indexes[folder, inner] = media_by_stem(files_in(self.root / folder, inner), self.root)
        return self._indexes[folder, inner]

    def _is_folder(self, relative: PurePosixPath) -> bool:
        with suppress(OSError, ValueError):
            return (self.root / relative).is_dir()
        return False


class MissingMedia:
    """Explains a missing medium: where it was searched, and where else a file of its name lies.

    The media root is listed once, for the first missing medium.

    Args:
        finder: of the media root.
    """

    def __init__(self, finder: MediaFinder):
        self._finder, self._root, self._dataset = finder, finder.root, finder.dataset
        self._others: dict[Path, MediaFinder] = {}

    def fault(self, path: str) -> SampleError:
        """The refusal of a question whose medium would be at this ``path`` below the root, a result of the finder."""
        query = self._finder.queries[path]
        wanted = wanted_path(query[0])
        return SampleError(
            MISSING_MEDIA,
            f"Medium '{_shown(path)}' is not there. It was looked for in {self._searched_in(path, wanted, query[1])}. "
            f"{self._advice(path, wanted, query)}",
        )

    def _searched_in(self, path: str, wanted: PurePosixPath, folder: str | None) -> str:
        root = f"the media root '{_shown(str(self._root))}'"
        if folder is not None:
            own = PurePosixPath(*PurePosixPath(path).parts[: -len(wanted.parts)]).as_posix()
            inside = root if own == "." else f"'{_shown(own)}' below {root}"
            return f"{inside} alone, which is to be the folder '{_shown(folder)}' of this row's media"
        folders = self._finder.searched_folders()
        if not folders:
            named = [*(self._dataset.media or ()), *self._dataset.shared]
            return f"{root} itself{f', which has none of the folders {_listed(named)}' if named else ''}"
        return f"{_listed(folders)} below {root}{', and in the root itself' if self._dataset.by_name else ''}"

    def _advice(self, path: str, wanted: PurePosixPath, query: Query) -> str:
        files, is_complete = self._files
        matches = alike(files, wanted) if self._dataset.by_name else self._exact(wanted)
        if not matches:
            searched = "the root" if is_complete else f"the first {SEARCHED} files below the root"
            return f"No file of that name is in {searched}. Fetch it, or correct --media-root."
        roots = [root for match in matches[:_LISTED] if (root := self._root_for(match, query)) is not None]
        remedy = f"give --media-root {_shown(str(roots[0]))}" if roots else f"move it to '{_shown(path)}'"
        found = _listed([match.as_posix() for match in matches])
        return (
            f"Of that name there is {found}, maybe another data set's. Fetch the file; or, where that is the one "
            f"meant, {remedy}."
        )

    def _exact(self, wanted: PurePosixPath) -> list[PurePosixPath]:
        """Files of the whole path; else those of the name, unless it is as common as "1.png"."""
        found = [path for path in self._files[0].get(wanted.stem, []) if path.name == wanted.name]
        whole = [path for path in found if path.parts[-len(wanted.parts) :] == wanted.parts]
        return whole or (found if len(found) <= _LISTED else [])

    def _root_for(self, path: PurePosixPath, query: Query) -> Path | None:
        """The media root with which this file would be found; None without one."""
        for parent in list(path.parents)[:-1]:
            if parent not in self._candidate_roots:
                continue
            root = self._root / parent
            if root not in self._others:
                self._others[root] = MediaFinder(root, self._dataset, self._finder.only_folder)
            with suppress(SampleError):  # several match there
                if parent / self._others[root].locate(*query) == path:
                    return root
        return None

    @cached_property
    def _candidate_roots(self) -> set[PurePosixPath]:
        """The outermost folders that hold media, in an order that does not depend on the queries."""
        holding = {parent for paths in self._files[0].values() for path in paths for parent in path.parents}
        return set(nsmallest(_MAX_ROOTS, holding - {PurePosixPath()}, key=lambda one: (len(one.parts), one.parts)))

    @cached_property
    def _files(self) -> tuple[ByStem, bool]:
        """Media below the root by stem, and whether these are all."""
        files = files_in(self._root, EVERYTHING)
        listed = list(islice(files, SEARCHED))
        return media_by_stem(listed, self._root), len(listed) < SEARCHED or next(files, None) is None


def wanted_path(name: str) -> PurePosixPath:
    """The path of a row's file name; a backslash counts as a separator."""
    return PurePosixPath(name.strip().replace("\\", "/"))


def media_by_stem(files: Iterable[Path], root: Path) -> ByStem:
    """Those of the files with a suffix of media, relative to the root, by stem."""
    found: defaultdict[str, list[PurePosixPath]] = defaultdict(list)
    for file in files:
        if file.suffix.lower() in SUFFIXES:
            found[file.stem].append(PurePosixPath(file.relative_to(root)))
    return dict(found)


def alike(files: ByStem, wanted: PurePosixPath) -> list[PurePosixPath]:
    """The files with the wanted name and suffix, or else with another suffix of the same medium."""
    paths = files.get(wanted.stem, [])
    if wanted.suffix.lower() not in SUFFIXES:
        return [path for path in paths if path.name == wanted.name]
    kind = next(suffixes for suffixes in EXTENSIONS.values() if wanted.suffix.lower() in suffixes)
    exact = [path for path in paths if path.suffix == wanted.suffix]
    return exact or [path for path in paths if path.suffix.lower() in kind]


def files_in(folder: Path, inner: str = "") -> Iterator[Path]:
    """Files in the same order on every machine. Links to folders are not followed: they may form cycles, or lead out.

    Args:
        inner: of which subfolders the files count too: "" none, ``EVERYTHING`` all at any depth, else direct ones whose
            names match this glob pattern.
    """
    for parent, folders, files in os.walk(folder):
        if inner != EVERYTHING:
            below = folders if inner and Path(parent) == folder else []
            folders[:] = [name for name in below if fnmatchcase(name, inner)]
        folders.sort()
        for name in sorted(files):
            yield Path(parent, name)


def folders_of(root: Path, pattern: str, root_counts: bool) -> Iterator[PurePosixPath]:
    """The folders below the root, relative to it, that match a glob pattern, the root itself (".") first.

    Args:
        root_counts: whether the root may be one of the folders in the pattern: "videos" the one of
            "validation/videos", or its "validation".
    """
    if pattern == ".":
        yield PurePosixPath()
        return

    def globbed(pattern: str) -> dict[PurePosixPath, None]:
        return {PurePosixPath(path.relative_to(root)): None for path in sorted(root.glob(pattern)) if path.is_dir()}

    found: dict[PurePosixPath, None] = {}
    parts = PurePosixPath(pattern).parts
    for number in range(len(parts) - 1, -1, -1) if root_counts else ():
        if not fnmatchcase(name_of(root), parts[number]):
            continue
        if number == len(parts) - 1:
            found[PurePosixPath()] = None
        elif parts[number] != "*":
            found |= globbed("/".join(parts[number + 1 :]))
    yield from found | globbed(pattern)


def name_of(folder: Path) -> str:
    """The name of a folder as written: "." has a name too; links are not resolved."""
    return os.path.basename(os.path.abspath(folder))


def below(folder: Path, root: Path) -> PurePosixPath | None:
    """A folder relative to the root; None if it lies elsewhere."""
    try:
        return PurePosixPath(folder.resolve().relative_to(root.resolve()))
    except (OSError, RuntimeError, ValueError):
        return None


def _ambiguous(name: str, found: Sequence[PurePosixPath]) -> SampleError:
    return SampleError(
        "ambiguous_media",
        f"'{printable(name, 200)}' may be {', '.join(printable(str(path), 200) for path in found[:3])}"
        f"{' ...' if len(found) > 3 else ''}. One file of that name below the media root is expected. Name "
        "a media root that holds one of them, or move the others away.",
    )


def _listed(names: Sequence[str]) -> str:
    few = ", ".join(f"'{_shown(name)}'" for name in names[:_LISTED])
    return few if len(names) <= _LISTED else f"{few} and {len(names) - _LISTED} more"


def _shown(text: str) -> str:
    return printable(text, 200)
