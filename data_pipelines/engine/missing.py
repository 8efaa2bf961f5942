"""What is said of a medium that is not there: where it was looked for, and where else a file of its name lies."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from heapq import nsmallest
from itertools import islice
from pathlib import Path, PurePosixPath

from data_pipelines.engine.dataset import DataSet
from data_pipelines.engine.finding import Asked, MediaFinder
from data_pipelines.engine.places import EVERYTHING, SUFFIXES, ByStem, alike, files_in
from vlm_pg.errors import SampleError, printable

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
