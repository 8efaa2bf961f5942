"""Digests of the records of a run, and how they differ from those in a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from vlm_pg.data.files import files_of
from vlm_pg.data.sampled import SAMPLES
from vlm_pg.data.settings import DataSettings
from vlm_pg.errors import ConfigError


def data_digests(data: DataSettings, usable: Mapping[str, int] | None = None) -> dict[str, dict[str, Any]]:
    """Path and SHA-256 of all existing record files, by their setting, without media; of several files that of theirs.

    ``usable``: number of usable records of each training set, which versions of this program may see differently.
    """
    paths = {_train(name): path for name, path in data.train_sets.items()}
    paths |= {f"data.eval.{name}": path for name, path in data.eval.items()}
    if data.difficulty is not None:
        samples = data.difficulty.file
        paths["data.difficulty.file"] = samples / SAMPLES if samples.is_dir() else samples
    digests: dict[str, dict[str, Any]] = {}
    for key, path in paths.items():
        try:
            files = files_of(path)
        except ConfigError:  # reading the records raises it, on every rank
            continue
        if not all(file.is_file() for file in files):
            continue
        hashes = []
        for one in files:
            with one.open("rb") as file:
                hashes.append(hashlib.file_digest(file, "sha256").hexdigest())
        whole = hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()
        digests[key] = {"path": str(path), "sha256": whole}
    for name, count in (usable or {}).items():
        digests.get(_train(name), {})["usable"] = count
    return digests


def changed_data(before: Any, now: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each set of records that was changed, added, removed or renamed since the checkpoint was written, or
    has another number of usable records. The same records at another path are equal.

    Args:
        before: the digests in the checkpoint; older ones have none.
    """
    if not isinstance(before, dict):
        return []
    then = {key: entry for key, entry in before.items() if isinstance(entry, dict) and "sha256" in entry}
    lost = {key: entry for key, entry in then.items() if key not in now}
    lines = []
    for key, entry in now.items():
        known, change = then.get(key), ""
        if known is not None and known["sha256"] != entry["sha256"]:
            where = "" if known.get("path") == entry["path"] else f" (it was {known.get('path')})"
            change = f"has another content than when the checkpoint was written{where}"
        elif known is not None and known.get("usable", entry.get("usable")) != entry.get("usable", known.get("usable")):
            change = f"has {entry['usable']} usable records; it had {known['usable']} when the checkpoint was written"
        elif key not in before:
            equal = (old for old in lost if _kind(old) == _kind(key) and lost[old]["sha256"] == entry["sha256"])
            other = next(equal, None)
            change = "was not there" if other is None else f"was called {other}"
            change += " when the checkpoint was written"
            lost.pop(other or "", None)
        if change:
            lines.append(f"{key}={entry['path']} {change}: {_consequence(key)}")
    for key, entry in lost.items():
        lines.append(f"{key}={entry.get('path')} of when the checkpoint was written is not there: {_consequence(key)}")
    return lines


def _train(name: str) -> str:
    """The setting of a training set."""
    return "data.train" + (f".{name}" if name else "")


def _kind(key: str) -> str:
    """ "data.train" or "data.eval"."""
    return ".".join(key.split(".")[:2])


def _consequence(key: str) -> str:
    if _kind(key) == "data.eval":
        return "scores of before and after it are not of the same questions"
    return "the questions of further steps, and their order, are not those the run would have had"
