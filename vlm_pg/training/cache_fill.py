"""``vlm-pg cache fill``: frames and visual features of a run, computed before it by any number of processes."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from vlm_pg.config import RunConfig
from vlm_pg.data.sample_sets import check_weights, open_records, used_samples
from vlm_pg.distributed import local_device
from vlm_pg.errors import ConfigError, SampleError
from vlm_pg.eval.eval_set import EvalSet
from vlm_pg.media.loader import MediaLoader, decoding_pool
from vlm_pg.media.pool import WorkerPool
from vlm_pg.memory import GIB, tensor_bytes
from vlm_pg.models.feature_cache import keep_features, why_not_cached
from vlm_pg.models.loading import load_config, load_policy
from vlm_pg.models.lora import adapter_base
from vlm_pg.models.policy import Policy
from vlm_pg.models.registry import family_of
from vlm_pg.models.tower import shares
from vlm_pg.observe.console import quiet_libraries
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.prompts.prompt_source import PromptSource, SourcePool
from vlm_pg.threads import use_threads
from vlm_pg.types import BadSample, MediaRef, Prompt, Sample

MOST_LISTED = 20


@dataclass(frozen=True)
class RecordSet:
    """``name``: the set's, if any. ``samples``: those that are used. ``processes``: how many share a tower run.

    ``held``: an evaluation set, which determines media and prompts; None: a training set.
    """

    name: str
    path: Path
    samples: Sequence[Sample]
    processes: int = 1
    held: EvalSet | None = None


def record_sets(config: RunConfig) -> Iterator[RecordSet]:
    """Training questions with a weight in ``data.mixture``, then those of each chosen evaluation set.

    Of a set with a protocol: its questions, with its media.

    Raises:
        ConfigError: records that cannot be read, or weights that are not those of their sources.
    """
    data = config.data
    if data.mixture and isinstance(data.train, dict):
        check_weights(list(data.train_sets), data.mixture)
    for name, path in data.used_sets.items():
        samples = open_records(path)[0][: data.limit]
        if samples and not name:
            samples = used_samples(samples, data.mixture)
        # The frames of a step's prompts are divided over sequence ranks, those of an evaluation's are not.
        yield RecordSet(name, path, samples, config.training.sequence_parallel)
    for name in config.eval.chosen_sets(list(data.eval)):
        path, protocol = data.eval[name], config.eval.protocol_of(name)
        samples = open_records(path)[0]
        if protocol is not None:
            samples = config.eval.reported_questions(name, samples)
        held = EvalSet(name, path, (), protocol=protocol)
        yield RecordSet(name, path, samples[: config.eval.limit], held=held)


def left_out(config: RunConfig) -> list[str]:
    """Lines about the records that ``record_sets`` leaves out."""
    return [*config.data.left_out(), *config.eval.left_out(list(config.data.eval))]


def fill(config: RunConfig) -> int:
    """Cache the frames of all media of the run's records, and the frozen vision tower's outputs.

    Started by a launcher, each process does its share. Existing entries are read, and so checked, not made again: an
    interrupted fill can be repeated.

    Returns:
        Number of unusable media.

    Raises:
        ConfigError: there is no cache, nothing to fill it with, or records that cannot be read.
        ModelError: the model cannot be read.
    """
    cache = config.cache
    if cache.folder is None:
        raise ConfigError("cache.folder is not set. A folder to fill is needed. Set it.")
    if not config.data.train_sets and not config.data.eval:
        raise ConfigError("Neither data.train nor data.eval is set. Records whose media are kept are needed. Set one.")
    model = load_config(str(adapter_base(config.model.path) or config.model.path), config.model)
    family = family_of(model)
    why = why_not_cached(config.model, family, cache)
    if why is not None and not cache.frames:
        raise ConfigError(
            f"cache.frames is false, and visual features are not kept ({why}). Something to fill the cache with is "
            "needed. Set cache.frames=true."
        )
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    pool = decoding_pool(config.media, cache)
    process = "" if world == 1 else f" (process {rank + 1} of {world})"
    faults = 0
    for line in left_out(config) if rank == 0 else ():
        print(line, flush=True)
    try:
        if cache.frames:
            factor = family.pixels(model).token_side
            for records in record_sets(config):
                # Each medium with the part of it that is shown, once.
                refs = list(dict.fromkeys(ref for sample in records.samples for ref in sample.media))[rank::world]
                faults += _fill_frames(_loader(config, records, factor, pool), refs, f"{records.path}{process}")
        if why is not None:
            print(f"visual features: not kept in cache.folder ({why})")
        else:
            features = _FeatureFill(config, pool, rank, world)
            unusable = sum(features.fill(records, f"{records.path}{process}") for records in record_sets(config))
            faults = max(faults, unusable)  # the same media again
    finally:
        if pool is not None:
            pool.close()
    return faults


def _loader(config: RunConfig, records: RecordSet, factor: int, pool: WorkerPool | None) -> MediaLoader:
    data, media, prompt = config.data, config.media, config.prompt
    if records.held is not None:
        media, prompt = records.held.media(config), records.held.prompt(config)
    root = data.root_for(records.path, records.name)
    return MediaLoader(media, root, data.allow_remote, factor, pool, prompt.subtitles, config.cache)


def _fill_frames(loader: MediaLoader, refs: Sequence[MediaRef], name: str) -> int:
    """Number of unusable media."""
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
            if faults <= MOST_LISTED:
                print(f"{ref.path}: {fault.reason}: {fault}")

    for ref in track(refs, description=f"Frames of {name}", disable=not sys.stdout.isatty()):
        waiting.append((ref, loader.store(ref)))
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


@dataclass
class _Count:
    """Of one set: features ``made`` now, of them ``lost`` without room, ``faults``, and ``size``: bytes of all."""

    made: int = 0
    lost: int = 0
    faults: int = 0
    size: int = 0


class _FeatureFill:
    """Writes features of record sets into a run's cache; each of ``world`` processes its share.

    Raises:
        ConfigError: the cache cannot be used.
        ModelError: the tower cannot be loaded.
    """

    def __init__(self, config: RunConfig, pool: WorkerPool | None, rank: int, world: int):
        quiet_libraries()
        use_threads(config.training.torch_threads)  # as in the run: bits may depend on it
        self._config, self._rank, self._world = config, rank, world
        self._policy = load_policy(
            config.model.path, device=local_device(), settings=config.model, vision_alone=True
        ).requires_grad_(False)
        print(keep_features(self._policy, config.cache), flush=True)
        if len(self._policy.language_model.layers):
            print("the adapter in model.path reaches into the vision tower, so the whole model is loaded")
        if config.model.vision_piece_tokens == "auto":
            print(
                "media go through the vision tower whole (model.vision_piece_tokens=auto). A run that finds too little "
                "memory for that cuts some, says so, and makes their features itself; to fill for such a run, set "
                "model.vision_piece_tokens to what it says"
            )
        builder = PromptBuilder(self._policy.processor, config.prompt, self._policy.positions)
        check = partial(self._policy.check_length, response_tokens=config.rollout.max_new_tokens)
        factor = self._policy.pixel_factor
        self._sources = SourcePool(builder, config.data, config.media, factor, check, pool, config.cache)
        self._ahead = 4 * max(1, config.media.workers)

    def fill(self, records: RecordSet, name: str) -> int:
        """Cache features of all usable media of a set; the number of unusable ones."""
        from rich.progress import track

        by_media: dict[tuple[MediaRef, ...], list[Sample]] = {}
        for sample in records.samples:
            if sample.media:
                by_media.setdefault(tuple(sample.media), []).append(sample)
        questions = list(by_media.values())[self._rank :: self._world]
        asking = None if records.held is None else records.held.asking(self._config, self._policy)
        source, count = self._sources.for_records(records.path, records.name, options=asking), _Count()
        shown = track(range(len(questions)), description=f"Features of {name}", disable=not sys.stdout.isatty())
        for number in shown:
            source.expect([samples[0] for samples in questions[number : number + self._ahead]])
            self._fill_one(questions[number], source, records.processes, count)
        there = len(questions) - count.faults - count.lost
        print(
            f"{name}: features of {there:,} of {len(questions):,} media are kept ({count.size / GIB:.3f} GiB), "
            f"{count.made - count.lost:,} of them made now, {count.faults:,} cannot be used",
            flush=True,
        )
        if count.lost:
            print(
                f"{count.lost:,} have no room within cache.max_gb={self._config.cache.max_gb:g}, or could not be "
                "written: every run computes them. Raise cache.max_gb, or set cache.features=false"
            )
        return count.faults

    def _fill_one(self, samples: Sequence[Sample], source: PromptSource, processes: int, count: _Count) -> None:
        """Of questions with the same media the first usable one suffices."""
        faults: list[BadSample] = []
        for sample in samples:
            good, bad = source.load([sample])
            faults += bad
            for _, prompt in good:
                self._keep(prompt, processes, count)
                return
        count.faults += 1
        if count.faults <= MOST_LISTED:
            print(f"{faults[0].sample_id}: {faults[0].reason}: {faults[0].message}")

    def _keep(self, prompt: Prompt, processes: int, count: _Count) -> None:
        kept = self._policy.vision.store
        assert kept is not None
        hosts = [kept.host] * processes
        features = kept.read(prompt, hosts)
        if features is None:
            written = kept.store.uses.written
            features = _features(self._policy, prompt, processes)
            kept.write(prompt, features, hosts)
            count.made += 1
            count.lost += kept.store.uses.written == written
        count.size += tensor_bytes(features)


@torch.no_grad()
def _features(policy: Policy, prompt: Prompt, processes: int) -> torch.Tensor:
    """[M, ...] with the calls of the tower that so many processes make together, one after the other."""
    assert prompt.pixel_values is not None and prompt.grid_thw is not None
    pixels, device = prompt.pixel_values, policy.device
    return torch.cat(
        [
            policy.run_tower(pixels[part.start : part.stop].to(device), torch.tensor(part.grids))
            for part in shares(prompt.grid_thw.tolist(), processes)
            if part.patches
        ]
    )
