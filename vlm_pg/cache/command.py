"""``vlm-pg cache``: statistics, verification and pruning of a cache."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path

from vlm_pg.cache.eviction import entry_files, prune
from vlm_pg.cache.store import MARK, open_folder, verify
from vlm_pg.errors import ConfigError, printable

_GIB = 2**30


def print_stats(folder: Path) -> None:
    """Entries, bytes and last use of each kind."""
    _check(folder)
    counts: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0, time.time(), 0.0])
    for stored in entry_files(folder):
        found = counts[stored.kind]
        found[0] += 1
        found[1] += stored.size
        found[2], found[3] = min(found[2], stored.used), max(found[3], stored.used)
    for kind, (count, size, oldest, newest) in sorted(counts.items()):
        first, last = (time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) for seconds in (oldest, newest))
        used = f"last used between {first} and {last}"
        print(f"{kind:10} {int(count):9,} entries {size / _GIB:10.3f} GiB, {used}")
    if not counts:
        print(f"{folder} is empty")


def print_verified(folder: Path) -> None:
    """Read every entry and remove the damaged ones."""
    _check(folder)
    whole = damaged = 0
    for stored, is_whole in verify(folder):
        whole, damaged = whole + is_whole, damaged + (not is_whole)
        if not is_whole:
            print(f"damaged, removed: {printable(str(stored.path), 300)}")
        if (whole + damaged) % 1000 == 0:
            print(f"{whole + damaged:,} read", flush=True)
    print(f"{whole:,} entries are as they were written, {damaged:,} were damaged and are removed: they are made again")


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
