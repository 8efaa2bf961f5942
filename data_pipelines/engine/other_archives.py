"""Archives that are not unpacked here, so that nobody waits for what is in them: other kinds, and parts of one."""

from __future__ import annotations

import os
import re
from pathlib import Path

from data_pipelines.engine.archives import SUFFIXES
from vlm_pg.errors import printable

_KINDS = r"t?xz|t?zst|t?lz4|t?lzma|t?lz|tbz2?|gz|bz2|7z|rar"
# split(1) counts aa, ab, ...; no further than fz, as "md" and "py" are something else.
_COUNTS = r"(?:\d{1,4}|[a-f][a-z])"
_NAMES = re.compile(
    rf".+\.(?:{_KINDS}|[rz]\d\d)"
    rf"|.+\.(?:{_KINDS}|tar|tgz|zip)[._-]?(?:part)?[._-]?{_COUNTS}"
    rf"|(?:.*[._-])?part[._-]?{_COUNTS}",
    re.IGNORECASE,
)
_LISTED = 12


def others_below(folder: Path) -> list[Path]:
    """Files in a folder and its folders that are called as such archives are."""
    found = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
    return sorted(path for path in found if _is_other(path.name))


def told(others: list[Path]) -> str:
    """What is said of them."""
    shown = ", ".join(printable(str(path), 300) for path in others[:_LISTED]) + (" ..." if others[_LISTED:] else "")
    return (
        f"Not unpacked: {shown}. Unpacked are {', '.join(SUFFIXES)}, each in one piece. Unpack others by hand, if what "
        "is in them is not there yet; parts are joined first, as in cat x.tar.part_* > x.tar."
    )


def _is_other(name: str) -> bool:
    return not name.lower().endswith(SUFFIXES) and _NAMES.fullmatch(name) is not None
