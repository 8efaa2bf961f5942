"""``vlm-pg cache fill``: the frames that a run will ask for, made before it, by as many processes as are started."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

from vlm_pg.config import RunConfig
from vlm_pg.data.prepared_reader import open_records
from vlm_pg.errors import ConfigError, SampleError
from vlm_pg.media.loader import MediaLoader, decoding_pool
from vlm_pg.models.loading import load_config
from vlm_pg.models.registry import family_of
from vlm_pg.types import MediaRef

_LISTED = 20


def fill(config: RunConfig) -> int:
    """Put the frames of all media of the run's records into its cache. Returns how many media could not be used.

    Started by a launcher, each process takes its share. What is there already is read, and so checked, not decoded: a
    fill that was stopped goes on where it was.

    Raises:
        ConfigError: there is no cache, nothing to fill it with, or records that cannot be read.
    """
    if config.cache.folder is None or not config.cache.frames:
        raise ConfigError("cache.folder is not set, or cache.frames is false. A folder to fill is needed. Set them.")
    sets = [*config.data.train_sets.items(), *config.data.eval.items()]
    if not sets:
        raise ConfigError("Neither data.train nor data.eval is set. Records whose media are kept are needed. Set one.")
    model = load_config(config.model.path, config.model)
    factor = family_of(model).pixels(model).token_side
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    pool = decoding_pool(config.media, config.cache)
    faults = 0
    try:
        for name, path in sets:
            loader = MediaLoader(
                config.media,
                config.data.root_for(path, name),
                config.data.allow_remote,
                factor,
                pool,
                config.prompt.subtitles,
                config.cache,
            )
            refs = [ref for place, ref in enumerate(_media_of(path)) if place % world == rank]
            faults += _fill(loader, refs, f"{path}" if world == 1 else f"{path} (process {rank + 1} of {world})")
    finally:
        if pool is not None:
            pool.close()
    return faults


def _media_of(path: Path) -> Iterator[MediaRef]:
    """Each medium that the records ask about, with the part they mean, once."""
    seen: set[MediaRef] = set()
    samples, _ = open_records(path)
    for sample in samples:
        for ref in sample.media:
            if ref not in seen:
                seen.add(ref)
                yield ref


def _fill(loader: MediaLoader, refs: list[MediaRef], name: str) -> int:
    from rich.progress import track

    waiting: deque[tuple[MediaRef, Future[None] | SampleError]] = deque()
    faults = 0

    def finish() -> None:
        nonlocal faults
        ref, found = waiting.popleft()
        try:
            if isinstance(found, SampleError):
                raise found
            found.result()
        except SampleError as fault:
            faults += 1
            if faults <= _LISTED:
                print(f"{ref.path}: {fault.reason}: {fault}")

    for ref in track(refs, description=f"Frames of {name}", disable=not sys.stdout.isatty()):
        waiting.append((ref, loader.keep(ref)))
        if len(waiting) > 4 * loader.workers:
            finish()
    while waiting:
        finish()
    print(f"{name}: {len(refs) - faults:,} of {len(refs):,} media are kept, {faults:,} cannot be used", flush=True)
    return faults
