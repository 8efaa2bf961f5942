"""``vlm-pg cache``: statistics, verification and pruning of a cache."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path

from vlm_pg.cache.eviction import places, prune
from vlm_pg.cache.store import MARK, open_folder, verify
from vlm_pg.errors import ConfigError, printable

_GIB = 2**30


def print_stats(folder: Path) -> None:
    """Entries, bytes and last use of each kind."""
    _check(folder)
    counts: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0, time.time(), 0.0])
    for place in places(folder):
        found = counts[place.kind]
        found[0] += 1
        found[1] += place.size
        found[2], found[3] = min(found[2], place.used), max(found[3], place.used)
    for kind, (count, size, oldest, newest) in sorted(counts.items()):
        used = f"last used between {_when(oldest)} and {_when(newest)}"
        print(f"{kind:10} {int(count):9,} entries {size / _GIB:10.3f} GiB, {used}")
    if not counts:
        print(f"{folder} is empty")


def print_verified(folder: Path) -> int:
    """Read every entry and remove the damaged ones. Returns their number."""
    _check(folder)
    whole = damaged = 0
    for place, well in verify(folder):
        whole, damaged = whole + well, damaged + (not well)
        if not well:
            print(f"damaged, removed: {printable(str(place.path), 300)}")
        if (whole + damaged) % 1000 == 0:
            print(f"{whole + damaged:,} read", flush=True)
    print(f"{whole:,} entries are as they were written, {damaged:,} were damaged and are removed: they are made again")
    return damaged


def print_pruned(folder: Path, max_gb: float) -> None:
    """Evict the least recently used entries."""
    _check(folder)
    pruned = prune(folder, int(max_gb * _GIB))
    if pruned is None:
        raise ConfigError(
            f"Another process throws out entries of '{printable(str(folder), 300)}' at this moment. Nothing was done. "
            "Try again."
        )
    print(f"{pruned.count:,} entries evicted, {pruned.freed / _GIB:.3f} GiB freed")


def _check(folder: Path) -> None:
    if not (folder / MARK).is_file():
        raise ConfigError(
            f"'{printable(str(folder), 300)}' is no cache. The folder that cache.folder names is expected. Correct it."
        )
    open_folder(folder)


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
