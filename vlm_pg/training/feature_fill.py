"""The visual features that a run will ask for, made before it by the vision tower alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from vlm_pg.config import RunConfig
from vlm_pg.distributed import local_device
from vlm_pg.media.pool import WorkerPool
from vlm_pg.memory import tensor_bytes
from vlm_pg.models.feature_cache import keep_features
from vlm_pg.models.loading import load_policy
from vlm_pg.models.policy import Policy
from vlm_pg.models.vision_pieces import shares
from vlm_pg.observe.console import quiet_libraries
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.prompts.prompt_source import PromptSource
from vlm_pg.prompts.source_pool import SourcePool
from vlm_pg.threads import use_threads
from vlm_pg.training.record_sets import RecordSet
from vlm_pg.types import BadSample, MediaRef, Prompt, Sample

LISTED = 20
_GIB = 2**30


@dataclass
class _Count:
    """``size``: bytes of all features, found or made."""

    made: int = 0
    lost: int = 0
    faults: int = 0
    size: int = 0


class FeatureFill:
    """Puts features of record sets into a run's cache. Each of ``world`` processes makes its share.

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
        self._sources = SourcePool(
            builder, config.data, config.media, self._policy.pixel_factor, self._check, pool, config.cache
        )
        self._ahead = 4 * max(1, config.media.workers)

    def _check(self, prompt: Prompt) -> None:
        self._policy.check_length(prompt, self._config.rollout.max_new_tokens)

    def fill(self, records: RecordSet, name: str) -> int:
        """Features of all media of a set that can be used; how many cannot. What is there is read, and so checked."""
        from rich.progress import track

        asked = list(_asked(records.samples))[self._rank :: self._world]
        asking = None if records.held is None else records.held.asking(self._config, self._policy)
        source, count = self._sources.for_records(records.path, records.name, asking=asking), _Count()
        shown = track(range(len(asked)), description=f"Features of {name}", disable=not sys.stdout.isatty())
        for number in shown:
            source.expect([records.samples[places[0]] for places in asked[number : number + self._ahead]])
            self._one([records.samples[place] for place in asked[number]], source, records.processes, count)
        self._report(name, len(asked), count)
        return count.faults

    def _one(self, samples: Sequence[Sample], source: PromptSource, processes: int, count: _Count) -> None:
        """Questions with the same media, of which the first that can be used is enough."""
        faults: list[BadSample] = []
        for sample in samples:
            good, bad = source.load([sample])
            faults += bad
            for _, prompt in good:
                self._keep(prompt, processes, count)
                return
        count.faults += 1
        if count.faults <= LISTED:
            print(f"{faults[0].sample_id}: {faults[0].reason}: {faults[0].message}")

    def _keep(self, prompt: Prompt, processes: int, count: _Count) -> None:
        kept = self._policy.vision.kept
        assert kept is not None
        hosts = [kept.host] * processes
        features = kept.read(prompt, hosts)
        if features is None:
            written = kept.store.uses.written
            features = _made_by(self._policy, prompt, processes)
            kept.write(prompt, features, hosts)
            count.made += 1
            count.lost += kept.store.uses.written == written
        count.size += tensor_bytes(features)

    def _report(self, name: str, asked: int, count: _Count) -> None:
        there = asked - count.faults - count.lost
        print(
            f"{name}: features of {there:,} of {asked:,} media are kept ({count.size / _GIB:.3f} GiB), "
            f"{count.made - count.lost:,} of them made now, {count.faults:,} cannot be used",
            flush=True,
        )
        if count.lost:
            print(
                f"{count.lost:,} have no room within cache.max_gb={self._config.cache.max_gb:g}, or could not be "
                "written: every run computes them. Raise cache.max_gb, or set cache.features=false"
            )


def _asked(samples: Sequence[Sample]) -> Iterator[list[int]]:
    """Places of the questions, those with the same media together, in the order of the first; none without media."""
    found: dict[tuple[MediaRef, ...], list[int]] = {}
    for place, sample in enumerate(samples):
        if sample.media:
            found.setdefault(tuple(sample.media), []).append(place)
    yield from found.values()


@torch.no_grad()
def _made_by(policy: Policy, prompt: Prompt, processes: int) -> torch.Tensor:
    """[M, ...] as so many processes make them together: the same calls of the tower, here one after the other."""
    assert prompt.pixel_values is not None and prompt.grid_thw is not None
    pixels, device = prompt.pixel_values, policy.device
    return torch.cat(
        [
            policy.run_tower(pixels[part.start : part.stop].to(device), torch.tensor(part.grids))
            for part in shares(prompt.grid_thw.tolist(), processes)
            if part.patches
        ]
    )
