"""``vlm-pg cache fill``: what a run will ask for, made before it by as many processes as are started."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future

from vlm_pg.config import RunConfig
from vlm_pg.errors import ConfigError, SampleError
from vlm_pg.media.loader import MediaLoader, decoding_pool
from vlm_pg.media.pool import WorkerPool
from vlm_pg.models.feature_cache import why_not_kept
from vlm_pg.models.loading import load_config
from vlm_pg.models.lora import adapter_base
from vlm_pg.models.registry import family_of
from vlm_pg.training.feature_fill import LISTED, FeatureFill
from vlm_pg.training.record_sets import RecordSet, left_out, record_sets
from vlm_pg.types import MediaRef, Sample


def fill(config: RunConfig) -> int:
    """Put the frames of all media of the run's records into its cache, and the frozen vision tower's outputs for them.

    Started by a launcher, each process takes its share. What is there already is read, and so checked, not made again:
    a fill that was stopped goes on where it was.

    Returns:
        How many media could not be used.

    Raises:
        ConfigError: there is no cache, nothing to fill it with, or records that cannot be read.
        ModelError: the model cannot be read.
    """
    cache = config.cache
    if cache.folder is None:
        raise ConfigError("cache.folder is not set. A folder to fill is needed. Set it.")
    if not config.data.train_sets and not config.data.eval:
        raise ConfigError("Neither data.train nor data.eval is set. Records whose media are kept are needed. Set one.")
    base = adapter_base(config.model.path) or config.model.path
    model = load_config(str(base), config.model)
    family = family_of(model)
    why = why_not_kept(config.model, family, cache)
    if why is not None and not cache.frames:
        raise ConfigError(
            f"cache.frames is false, and visual features are not kept ({why}). Something to fill the cache with is "
            "needed. Set cache.frames=true."
        )
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    pool = decoding_pool(config.media, cache)
    of_process = "" if world == 1 else f" (process {rank + 1} of {world})"
    faults = 0
    if rank == 0:
        for line in left_out(config):
            print(line, flush=True)
    try:
        if cache.frames:
            factor = family.pixels(model).token_side
            for records in record_sets(config):
                faults += _fill_frames(config, records, factor, pool, (rank, world), f"{records.path}{of_process}")
        if why is not None:
            print(f"visual features: not kept in cache.folder ({why})")
        else:
            features = FeatureFill(config, pool, rank, world)
            refused = sum(features.fill(records, f"{records.path}{of_process}") for records in record_sets(config))
            faults = max(faults, refused)  # the same media again
    finally:
        if pool is not None:
            pool.close()
    return faults


def _fill_frames(
    config: RunConfig, records: RecordSet, factor: int, pool: WorkerPool | None, place: tuple[int, int], name: str
) -> int:
    data, (rank, world) = config.data, place
    media, prompt = config.media, config.prompt
    if records.held is not None:
        media, prompt = records.held.media(config), records.held.prompt(config)
    root = data.root_for(records.path, records.name)
    loader = MediaLoader(media, root, data.allow_remote, factor, pool, prompt.subtitles, config.cache)
    refs = [ref for number, ref in enumerate(_media_of(records.samples)) if number % world == rank]
    return _fill(loader, refs, name)


def _media_of(samples: Iterable[Sample]) -> Iterator[MediaRef]:
    """Each medium that the records ask about, with the part they mean, once."""
    seen: set[MediaRef] = set()
    for sample in samples:
        for ref in sample.media:
            if ref not in seen:
                seen.add(ref)
                yield ref


def _fill(loader: MediaLoader, refs: list[MediaRef], name: str) -> int:
    from rich.progress import track

    waiting: deque[tuple[MediaRef, Future[bool] | SampleError]] = deque()
    faults = not_kept = 0

    def finish() -> None:
        nonlocal faults, not_kept
        ref, found = waiting.popleft()
        try:
            if isinstance(found, SampleError):
                raise found
            not_kept += not found.result()
        except SampleError as fault:
            faults += 1
            if faults <= LISTED:
                print(f"{ref.path}: {fault.reason}: {fault}")

    for ref in track(refs, description=f"Frames of {name}", disable=not sys.stdout.isatty()):
        waiting.append((ref, loader.keep(ref)))
        if len(waiting) > 4 * loader.workers:
            finish()
    while waiting:
        finish()
    kept = len(refs) - faults - not_kept
    print(f"{name}: {kept:,} of {len(refs):,} media are kept, {faults:,} cannot be used", flush=True)
    if not_kept:
        print(
            f"{not_kept:,} are not kept: they are URLs, have no room within cache.max_gb (or none yet, beside what was "
            "used in the day before: fill again), or could not be written"
        )
    return faults
