"""Which files of an output folder may be replaced: those that this program put there, and no other.

They are listed by the folder's manifest; until there is one, by ``.placing.json``, which is written before they are.
Beside parts of a run that wrote no set, the list of missing media is that run's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from data_pipelines.manifest import REPORT, SUMMARY, own_manifest
from vlm_pg.data.manifest import MANIFEST
from vlm_pg.errors import ConfigError, printable
from vlm_pg.files import sync_path, write_bytes_atomic

MISSING = "missing_media.txt"
PARTS, IDENTITY = ".parts", "identity.json"  # of what was judged; what these parts depend on
_PLACING = ".placing.json"
_LISTED = 6


def owned(out: Path) -> set[str]:
    """Names in the folder that this program wrote, or was about to write when it was killed."""
    manifest = own_manifest(out)
    names: set[str] = set(_placing(out))
    if manifest is not None:
        written = manifest.get("written")
        names |= {MANIFEST, REPORT, SUMMARY, *manifest["files"], *(written if isinstance(written, dict) else ())}
    elif (out / PARTS / IDENTITY).is_file() and not _is_there(out / MANIFEST):
        names.add(MISSING)
    return names


def refuse_foreign(out: Path, names: Iterable[str]) -> None:
    """Refuse to replace what somebody else put there.

    Raises:
        ConfigError: one of these names in the folder is not this program's.
    """
    ours = owned(out)
    foreign = sorted({name for name in names if name not in ours and _is_there(out / name)})
    if foreign:
        shown = ", ".join(printable(name, 100) for name in foreign[:_LISTED]) + (" ..." if foreign[_LISTED:] else "")
        raise ConfigError(
            f"--out '{printable(str(out), 300)}' holds {shown}, which no {MANIFEST} of this program's lists: somebody "
            "else's files are not replaced. A folder of its own is expected. Choose another --out, or move them away."
        )


def claim(out: Path, names: Iterable[str]) -> None:
    """Say that these names will be this program's, before they are written.

    Raises:
        ConfigError: as ``refuse_foreign``.
    """
    names = set(names)
    refuse_foreign(out, names)
    adopt(out, names)


def adopt(out: Path, names: Iterable[str]) -> None:
    """As ``claim``, of names that are known to be this program's though no manifest lists them."""
    listed = sorted({*names, *_placing(out)})
    write_bytes_atomic(out / _PLACING, json.dumps(listed).encode())


def settle(out: Path) -> None:
    """The manifest is there, and lists what is this program's."""
    (out / _PLACING).unlink(missing_ok=True)


def place(written: Path, out: Path) -> list[str]:
    """Put the files of a folder in the place of those of an earlier run. Returns their names.

    Killed in between it leaves no manifest, and what it left may be replaced. After a power cut files are whole where
    the manifest that follows is.

    Raises:
        ConfigError: as ``refuse_foreign``.
    """
    names = sorted(path.name for path in written.iterdir())
    earlier = {name for name in owned(out) if Path(name).name == name}  # in this folder
    claim(out, {*names, *earlier} - {MANIFEST})
    for name in (MANIFEST, *sorted(earlier - {MANIFEST})) if earlier else ():
        if not (out / name).is_dir():
            (out / name).unlink(missing_ok=True)
    for name in names:
        sync_path(written / name)
        (written / name).replace(out / name)
    sync_path(out)
    return names


def _placing(out: Path) -> list[str]:
    try:
        names = json.loads((out / _PLACING).read_bytes())
    except (OSError, ValueError):
        return []
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _is_there(path: Path) -> bool:
    return path.is_symlink() or path.exists()
