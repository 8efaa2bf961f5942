"""The manifest of a prepared set, by which readers refuse truncated or changed files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from vlm_pg.errors import ConfigError, printable

MANIFEST = "manifest.json"
# Manifests have some hundred bytes for a file of fifty thousand records.
_MOST_BYTES = 64 << 20


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a prepared folder; None where there is none, or another file of that name."""
    path = folder / MANIFEST
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:  # a pipe would never end
            return None
        written = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(written, dict) or not isinstance(written.get("fingerprint"), str):
        return None
    return written if all(isinstance(written.get(name), dict) for name in ("arguments", "files")) else None


def sizes_of(manifest: dict[str, Any]) -> dict[str, int]:
    """Sizes in bytes by file name, as far as a manifest has them."""
    written = manifest.get("written")
    entries = written.items() if isinstance(written, dict) else ()
    return {name: one["bytes"] for name, one in entries if isinstance(one, dict) and isinstance(one.get("bytes"), int)}


def check_sizes(files: Iterable[Path]) -> None:
    """Refuse files of another size than in the manifest beside them; files that it does not list are accepted.

    Early manifests have only the number of rows of Parquet files, which is compared then.

    Raises:
        ConfigError: a file is not as it was written.
    """
    manifests: dict[Path, dict[str, Any]] = {}
    for file in files:
        folder = file.parent
        if folder not in manifests:
            manifests[folder] = read_manifest(folder) or {"files": {}}
        expected, rows = sizes_of(manifests[folder]).get(file.name), manifests[folder]["files"].get(file.name)
        if (expected is None and rows is None) or not file.is_file():
            continue
        unit, actual = "bytes", file.stat().st_size
        if expected is None and isinstance(rows, int) and file.suffix == ".parquet":
            import pyarrow.parquet

            unit, actual = "rows", rows
            with suppress(Exception):  # of a damaged file: reading it raises the error
                actual = pyarrow.parquet.read_metadata(file).num_rows
            expected = rows
        if expected is not None and actual != expected:
            raise ConfigError(
                f"Data file '{printable(str(file), 300)}' has {actual:,} {unit}; it had {expected:,} when it was "
                f"prepared, as the {MANIFEST} beside it says. It is read as it was written. Prepare the data set again "
                "with --overwrite; a file that you changed yourself goes into a folder of its own."
            )
