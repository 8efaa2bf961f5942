"""The vision tower, run once per prompt and version of its weights."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, count, pairwise
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from vlm_pg.distributed import SINGLE_SP_RANK, SequenceGroup
from vlm_pg.memory import tensor_bytes
from vlm_pg.models.feature_store import FeatureStore
from vlm_pg.models.tower import Grid, PixelGeometry, VisionPiece, shares
from vlm_pg.types import Prompt, VisualFeatures

# Of all encoders of this process: equal versions mean one encoder and the same weights.
_VERSIONS = count()


class VisionEncoder:
    """Runs the tower and caches its outputs.

    A frozen tower's outputs stay in a least-recently-used cache of ``cache_bytes`` over the whole run; a trained
    tower's outputs stay, graph included, until its weights change. Equal media (by content key) share one output.
    With a ``store`` (``feature_cache``) a frozen tower's outputs are on disk besides, and it runs on what is not there.

    Args:
        run_tower: (pixel_values [patches, dim], grid_thw [media, 3] on the host) -> [M, D], or [M, 1 + E, D] for a
            family with DeepStack (``Family.encode_vision``). Where processes share media it also gets the parts of all.
        pixels: how the tower reads them.
        device: where the tower is now.
        share: False: nothing is cached, and equal media are encoded once for each prompt.
    """

    def __init__(
        self,
        run_tower: Callable[..., Tensor],
        pixels: PixelGeometry,
        trains: bool,
        cache_bytes: int,
        device: Callable[[], torch.device],
        share: bool = True,
    ):
        self._run_tower, self._pixels, self._share = run_tower, pixels, share
        self._device, self._trains = device, trains
        self._cache: OrderedDict[str, VisualFeatures] = OrderedDict()
        self._cache_bytes, self._used_bytes = cache_bytes, 0
        # Outputs that are still referenced, also beyond the cache: a step's own videos are never encoded twice.
        self._in_use: WeakValueDictionary[str, VisualFeatures] = WeakValueDictionary()
        self.store: FeatureStore | None = None
        self.version = next(_VERSIONS)
        self.patches_run = 0

    @property
    def trains(self) -> bool:
        return self._trains

    def weights_changed(self, trains: bool | None = None) -> None:
        """Call after every optimizer step. A frozen tower's version, and so its cache, outlives the step.

        ``trains``: whether the tower trains from now on, where that may have changed. A tower that trained before or
        does so now has another output than it had.
        """
        if self._trains or trains:
            self.version = next(_VERSIONS)
            self.forget()
            self.store = None  # it has the output of other weights
        self._trains = self._trains if trains is None else trains

    def is_current(self, features: VisualFeatures | None) -> bool:
        """Whether this tower, with the weights it has now, made these features."""
        return features is not None and features.weights_version == self.version

    def forget(self) -> None:
        """Drop all cached features."""
        self._cache.clear()
        self._in_use.clear()
        self._used_bytes = 0

    def encode(
        self,
        prompts: Sequence[Prompt],
        with_graph: bool = False,
        keep_graph: bool = False,
        sequence: SequenceGroup = SINGLE_SP_RANK,
    ) -> list[VisualFeatures]:
        """Features of each prompt; only what is not cached goes through the tower.

        Where all processes enter a trained tower together, ``encode_together`` gives each of them as much to do.

        With ``with_graph`` (a trained tower) all new prompts go through in one call and stay attached to its graph.
        ``keep_graph``: until the weights change, later calls get these outputs and their graph again; without it a
        graph belongs to one caller and one backward. Without ``with_graph`` each prompt goes through alone, so that its
        features do not depend on what else is in the batch.

        ``sequence``: processes that need the same prompts at the same time. They divide the frames among themselves,
        and all get all features; what one of them has not cached is encoded by all.
        """
        if with_graph and not self.trains:
            raise ValueError(
                "Features with a graph were requested of a frozen vision tower; name tower or merger in model.train."
            )
        keys = self._keys(prompts)
        # References until the end: an output that is freed meanwhile would be missing on this process alone.
        cached = {key: self._cache.get(key) or self._in_use.get(key) for key in keys}
        missing_here = {key for key, item in cached.items() if item is None or (with_graph and not item.carries_graph)}
        missing: set[str] = set().union(*sequence.gather(missing_here))
        results: dict[str, VisualFeatures] = {}
        new: dict[str, Prompt] = {}
        for key, prompt in zip(keys, prompts, strict=True):
            item = cached[key]
            if prompt.pixel_values is None:
                continue
            if item is None or key in missing:
                new[key] = prompt
                continue
            results[key] = item
            if key in self._cache:
                self._cache.move_to_end(key)
        with torch.set_grad_enabled(with_graph):
            if with_graph and new:
                outputs = self._encoded(*_media(list(new.values())), sequence)
                results |= self._split(outputs, new, with_graph, keep_graph)
            for key, prompt in () if with_graph else new.items():
                results |= self._split(self._encoded_alone(prompt, sequence), {key: prompt}, with_graph, keep_graph)
        return self._in_order(prompts, keys, results)

    def encode_together(
        self, prompts: Sequence[Prompt], sequence: SequenceGroup, everyone: SequenceGroup
    ) -> tuple[list[VisualFeatures], Tensor]:
        """As ``encode`` with ``keep_graph``, called by all of ``everyone`` at the same time. A collective.

        Each process runs the tower on an equal part of all frames, of any process: pixels go there, features come back,
        and their gradients take the same way. Nothing is taken from the cache, so that all processes are in this one
        graph.

        Returns:
            The features, and a zero whose backward enters the tower with no gradient of its own. All processes must
            reach it in one backward, those without media too.
        """
        keys = self._keys(prompts)
        new = {key: prompt for key, prompt in zip(keys, prompts, strict=True) if prompt.pixel_values is not None}
        no_media = (part[:0] for part in self._pixels.empty_token(torch.device("cpu")))
        pixels, grids = _media(list(new.values())) if new else no_media
        with torch.enable_grad():
            outputs = self._encoded(pixels, grids, sequence, everyone)
            results = self._split(outputs, new, with_graph=True, keep_graph=True)
            return self._in_order(prompts, keys, results), outputs.sum() * 0.0

    def _in_order(
        self, prompts: Sequence[Prompt], keys: Sequence[str], results: Mapping[str, VisualFeatures]
    ) -> list[VisualFeatures]:
        nothing = VisualFeatures(None, self.version, carries_graph=False)
        return [
            nothing if prompt.pixel_values is None else results[key] for key, prompt in zip(keys, prompts, strict=True)
        ]

    def _keys(self, prompts: Sequence[Prompt]) -> list[str]:
        """By which features are cached and shared."""
        for prompt in prompts:
            if prompt.pixel_values is not None and not prompt.content_key:
                raise ValueError(
                    f"Prompt {prompt.sample_id!r} has pixels but no content_key, by which features are cached. Build "
                    "it with prompt_from_processor, or set content_key(pixel_values, grid_thw)."
                )
        if self._share:
            return [prompt.content_key for prompt in prompts]
        return [f"{index}:{prompt.content_key}" for index, prompt in enumerate(prompts)]

    def _split(
        self, outputs: Tensor, batch: Mapping[str, Prompt], with_graph: bool, keep_graph: bool
    ) -> dict[str, VisualFeatures]:
        """``outputs`` [M, ...] of a batch by the keys of its prompts, cached."""
        results = {}
        sizes = [int(_grids(prompt).prod(-1).sum()) // self._pixels.patches_per_token for prompt in batch.values()]
        for key, features in zip(batch, outputs.split(sizes) if sizes else (), strict=True):
            results[key] = VisualFeatures(features, self.version, carries_graph=with_graph)
            if self._share and (keep_graph or not with_graph):
                self._in_use[key] = results[key]
                self._add(key, results[key])
        return results

    def _add(self, key: str, features: VisualFeatures) -> None:
        size = tensor_bytes(features.features)
        if features.carries_graph:
            # Needed again by this step's backward; the next weights_changed() drops it.
            self._cache[key] = features
        elif not self.trains and size <= self._cache_bytes:
            self._cache[key] = features
            self._used_bytes += size
            while self._used_bytes > self._cache_bytes:
                _, oldest = self._cache.popitem(last=False)
                self._used_bytes -= tensor_bytes(oldest.features)

    def _encoded_alone(self, prompt: Prompt, sequence: SequenceGroup) -> Tensor:
        """[M, ...] of one prompt without a graph: from disk if all of ``sequence`` find it there, else by the tower.

        The bits are the same. All of ``sequence`` run the tower or none of them, and one of them writes.
        """
        if self.store is None:
            return self._encoded(*_media([prompt]), sequence)
        hosts = sequence.gather(self.store.host)
        stored = self.store.read(prompt, hosts)
        if all(sequence.gather(stored is not None)) and stored is not None:
            return stored.to(self._device(), non_blocking=True)
        features = self._encoded(*_media([prompt]), sequence)
        if sequence.rank == 0:
            self.store.write(prompt, features, hosts)
        return features

    def _encoded(
        self, pixels: Tensor, grids: Tensor, sequence: SequenceGroup, everyone: SequenceGroup = SINGLE_SP_RANK
    ) -> Tensor:
        """[M, ...] of all media; each process of ``sequence``, or of ``everyone``, runs the tower on some frames."""
        if sequence.size == everyone.size == 1:
            return self._run(pixels, grids)
        parts = shares(grids.tolist(), sequence.size)
        mine = parts[sequence.rank]
        own = pixels[mine.start : mine.stop]
        if everyone.size > 1:
            features = self._run_evenly(own, mine.grids, everyone)
        else:
            features = self._run_part(own, mine, parts)
        if sequence.size == 1:
            return features
        return sequence.gather_rows(
            features, [part.patches // self._pixels.patches_per_token for part in parts], reduce=True
        )

    def _run_evenly(self, pixels: Tensor, grids: Sequence[Grid], everyone: SequenceGroup) -> Tensor:
        """[M, ...] of this process's media, after all have run the tower on equal parts of all frames."""
        of_ranks = everyone.gather(tuple(grids))
        parts = shares([grid for of_rank in of_ranks for grid in of_rank], everyone.size)
        ends = list(accumulate(sum(t * h * w for t, h, w in of_rank) for of_rank in of_ranks))
        owned = list(pairwise([0, *ends]))
        mine, here = parts[everyone.rank], owned[everyone.rank]
        there = [_overlap(here, (part.start, part.stop)) for part in parts]
        theirs = [_overlap(of_rank, (mine.start, mine.stop)) for of_rank in owned]
        # Of one dtype on all processes, as prompts have them.
        arrived = everyone.send(pixels.to(self._device(), torch.float32, non_blocking=True), there, theirs)
        features = self._run_part(arrived, mine, parts)
        back, wanted = ([rows // self._pixels.patches_per_token for rows in counts] for counts in (theirs, there))
        return everyone.exchange(features, back, wanted)

    def _run_part(self, pixels: Tensor, part: VisionPiece, parts: Sequence[VisionPiece]) -> Tensor:
        """[M, ...] of one of several parts that processes run at the same time."""
        if part.patches:
            return self._run(pixels, part.grid_thw(), parts)
        # The tower's weights may be gathered, and its gradients reduced, by all ranks together.
        return self._run(*self._pixels.empty_token(self._device()), parts)[:0]

    def _run(self, pixels: Tensor, grids: Tensor, parts: Sequence[VisionPiece] = ()) -> Tensor:
        self.patches_run += len(pixels)
        # Grids stay on the host, which makes of them what the tower needs (``tower_inputs``).
        moved = pixels.to(self._device(), non_blocking=True)
        return self._run_tower(moved, grids, *([parts] if parts else []))


def _media(batch: Sequence[Prompt]) -> tuple[Tensor, Tensor]:
    """Pixels [patches, dim] and grids [media, 3] of all prompts."""
    pixels = [prompt.pixel_values for prompt in batch if prompt.pixel_values is not None]
    return torch.cat(pixels), torch.cat([_grids(prompt) for prompt in batch])


def _grids(prompt: Prompt) -> Tensor:
    assert prompt.grid_thw is not None
    return prompt.grid_thw


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> int:
    """Length of what two runs (from, to) have in common."""
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))
