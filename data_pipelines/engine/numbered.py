"""Whose a "video_10428.mp4" is: CLEVRER and Perception Test both number their videos, and share 1,600 of the names.

CLEVRER writes five digits, and each split has numbers of its own. Perception Test's 11.6 thousand videos are counted
from 0, without leading zeros.
"""

from __future__ import annotations

import re
from collections.abc import Collection
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


def is_clevrers(path: PurePosixPath, beside: Collection[str]) -> bool:
    """Whether a file is surely one of CLEVRER's.

    It is in a folder of CLEVRER's name for a thousand videos, for a split, or "clevrer"; else all that lies beside it
    has numbers of the folder's split, and where Perception Test has the file's name too, one that it has not.

    Args:
        path: of the file, from the root's name on.
        beside: names, without ending, of the media in its folder.
    """
    if not _is_padded(path.stem):
        return False
    if thousand := _THOUSAND.fullmatch(path.parent.name):
        return int(thousand[1]) <= _number(path.stem) < int(thousand[2])
    split = _SPLIT.search(path.parent.name.lower())
    known = CLEVRER_SPLITS[split[1]] if split else range(20_000)
    if _is_in_clevrers(path):
        return _number(path.stem) in known
    if not split or not all(_is_padded(name) and _number(name) in known for name in beside):
        return False
    return _number(path.stem) not in _SHARED or any(_number(name) in _BEYOND for name in beside)


def is_perception_tests(path: PurePosixPath, beside: Collection[str]) -> bool:
    """Whether nothing says that a file is CLEVRER's: its folders, or, of a name that both have, what lies beside it.

    Args:
        path, beside: as of ``is_clevrers``.
    """
    if _THOUSAND.fullmatch(path.parent.name) or _is_in_clevrers(path):
        return False
    if _number(path.stem) not in _SHARED:
        return True
    return not any(_is_padded(name) and _number(name) not in _SHARED for name in beside)


def _is_in_clevrers(path: PurePosixPath) -> bool:
    return any(_PART.fullmatch(name) or name.lower().startswith("clevrer") for name in path.parts[:-1])


def _is_padded(stem: str) -> bool:
    """Whether it is written as CLEVRER writes: five digits."""
    return _number(stem) in range(20_000) and len(stem) == len("video_00000")


def _number(stem: str) -> int:
    """Its number; -1 where it has none."""
    found = _NUMBERED.fullmatch(stem)
    return int(found[1]) if found and len(found[1]) <= 5 else -1
