"""Whose a "video_10428.mp4" is: CLEVRER and Perception Test both number their videos, and share 1,600 of the names.

CLEVRER writes five digits, and each split has numbers of its own. Perception Test's 11.6 thousand videos are counted
from 0, without leading zeros.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import PurePosixPath

CLEVRER_SPLITS = {
    "train": range(10_000),
    **dict.fromkeys(("val", "valid", "validation"), range(10_000, 15_000)),
    "test": range(15_000, 20_000),
}
# Only CLEVRER has these: Perception Test's end well below.
_BEYOND = range(12_000, 20_000)
_SHARED = range(10_000, 12_000)
_NUMBERED = re.compile(r"video_([0-9]+)")
_THOUSAND = re.compile(r"video_([0-9]{5})-([0-9]{5})")
_PART = re.compile(r"video_(?:train|validation|test)")
_SPLIT = re.compile(r"(?<![a-z])(train|validation|valid|val|test)(?![a-z])")


def clevrers_in(folder: PurePosixPath, beside: Collection[str]) -> Callable[[str], bool]:
    """Which files of a folder are surely CLEVRER's.

    It is CLEVRER's folder of a thousand videos, or of a split, or in one called "clevrer"; else all that lies there has
    numbers of the folder's split, and of file names that Perception Test has too, there is one that it has not.

    Args:
        folder: from the root's name on.
        beside: names, without ending, of the media in it.

    Returns:
        Says it of a file's name without ending; whatever it has to know of the folder is looked at once.
    """
    if thousand := _THOUSAND.fullmatch(folder.name):
        numbers = range(int(thousand[1]), int(thousand[2]))
        return lambda stem: _is_padded(stem) and _number(stem) in numbers
    split = _SPLIT.search(folder.name.lower())
    known = CLEVRER_SPLITS[split[1]] if split else range(20_000)
    if _is_in_clevrers(folder):
        return lambda stem: _is_padded(stem) and _number(stem) in known
    if not split or not all(_is_padded(name) and _number(name) in known for name in beside):
        return lambda stem: False
    only_clevrers = any(_number(name) in _BEYOND for name in beside)
    return lambda stem: _is_padded(stem) and (only_clevrers or _number(stem) not in _SHARED)


def perception_tests_in(folder: PurePosixPath, beside: Collection[str]) -> Callable[[str], bool]:
    """Which files of a folder nothing says to be CLEVRER's: its name, or, of names that both have, what lies beside.

    Args, Returns: as of ``clevrers_in``.
    """
    if _THOUSAND.fullmatch(folder.name) or _is_in_clevrers(folder):
        return lambda stem: False
    has_clevrers = any(_is_padded(name) and _number(name) not in _SHARED for name in beside)
    return lambda stem: not has_clevrers or _number(stem) not in _SHARED


def _is_in_clevrers(folder: PurePosixPath) -> bool:
    return any(_PART.fullmatch(name) or name.lower().startswith("clevrer") for name in folder.parts)


def _is_padded(stem: str) -> bool:
    """Whether it is written as CLEVRER writes: five digits."""
    return _number(stem) in range(20_000) and len(stem) == len("video_00000")


def _number(stem: str) -> int:
    """Its number; -1 where it has none."""
    found = _NUMBERED.fullmatch(stem)
    return int(found[1]) if found and len(found[1]) <= 5 else -1
