"""The vision tower, run once per prompt and version of its weights."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from weakref import WeakValueDictionary

import torch

from vlm_pg.distributed import BY_ITSELF, SequenceGroup
from vlm_pg.memory import tensor_bytes
from vlm_pg.models.pixels import PixelGeometry
from vlm_pg.models.vision_pieces import VisionPiece, shares
from vlm_pg.types import Prompt, VisualFeatures


class VisionEncoder:
    """Runs the tower and remembers what it said.

    A frozen tower's outputs are kept in a least-recently-used cache of ``cache_bytes`` over the whole run; a trained
    tower's outputs are kept, graph included, until its weights change. Equal media (by content key) share one output.

    Args:
        run_tower: (pixel_values [patches, dim], grid_thw [media, 3]) -> [M, D], or [M, 1 + E, D] for a family with
            DeepStack (``Family.encode_vision``). Where processes share media it is also given the parts of all.
        pixels: how the tower reads them.
        share: False: nothing is kept and equal media are encoded as often as they are asked for.
    """

    def __init__(
        self,
        run_tower: Callable[..., torch.Tensor],
        pixels: PixelGeometry,
        trains: bool,
        cache_bytes: int,
        device: torch.device,
        share: bool = True,
    ):
        self._share = share
        self._run_tower = run_tower
        self._merged_patches = pixels.merge_size**2
        self._pixels = pixels
        self._cache_bytes = cache_bytes
        self._device = device
        self._kept: OrderedDict[str, VisualFeatures] = OrderedDict()
        self._kept_bytes = 0
        # Outputs somebody still holds, whatever the cache has room for: a step's own videos are never encoded twice.
        self._in_use: WeakValueDictionary[str, VisualFeatures] = WeakValueDictionary()
        self._trains = trains
        self.version = 0
        self.prompts_encoded = 0

    @property
    def trains(self) -> bool:
        return self._trains

    def weights_changed(self, trains: bool | None = None) -> None:
        """Call after every optimizer step. A frozen tower's version, and so its cache, outlives the step.

        ``trains``: whether the tower trains from now on, where that may have changed. A tower that trained before or
        does so now has another output than it had.
        """
        if self._trains or trains:
            self.version += 1
            self.forget()
        self._trains = self._trains if trains is None else trains

    def forget(self) -> None:
        """Let go of everything that is kept."""
        self._kept.clear()
        self._in_use.clear()
        self._kept_bytes = 0

    def encode(
        self,
        prompts: Sequence[Prompt],
        with_graph: bool = False,
        keep_graph: bool = False,
        sequence: SequenceGroup = BY_ITSELF,
    ) -> list[VisualFeatures]:
        """Features of each prompt; only what is not kept already goes through the tower.

        With ``with_graph`` (a trained tower) all new prompts go through in one call and stay attached to its graph.
        ``keep_graph``: until the weights change, later calls get these outputs and their graph again; without it a
        graph belongs to one caller and one backward. Without ``with_graph`` each prompt goes through alone, so that its
        features do not depend on what else is in the batch.

        ``sequence``: processes that ask for the same prompts at the same time. They divide the frames among themselves,
        and all get all features; what one of them has not kept is encoded by all.
        """
        if with_graph and not self.trains:
            raise ValueError(
                "Features with a graph were asked of a frozen vision tower; name tower or merger in model.train."
            )
        results: dict[str, VisualFeatures] = {}
        missing: dict[str, Prompt] = {}
        keys = self._keys(prompts)
        # Held until the end: what somebody else lets go of meanwhile would be missing on this process alone.
        found = {key: self._kept.get(key) or self._in_use.get(key) for key in keys}
        missing_here = {key for key, kept in found.items() if kept is None or (with_graph and not kept.carries_graph)}
        missing_somewhere: set[str] = set().union(*sequence.gather(missing_here))
        for key, prompt in zip(keys, prompts, strict=True):
            if prompt.pixel_values is None:
                continue
            if not prompt.content_key:
                raise ValueError(
                    f"Prompt {prompt.sample_id!r} has pixels but no content_key, by which features are kept. Build it "
                    "with prompt_from_processor, or set content_key(pixel_values, grid_thw)."
                )
            kept = found[key]
            if kept is not None and key not in missing_somewhere:
                if key in self._kept:
                    self._kept.move_to_end(key)
                results[key] = kept
            else:
                missing[key] = prompt
        results.update(self._encode_missing(missing, with_graph, keep_graph, sequence))
        nothing = VisualFeatures(None, self.version, carries_graph=False)
        return [
            nothing if prompt.pixel_values is None else results[key] for key, prompt in zip(keys, prompts, strict=True)
        ]

    def _keys(self, prompts: Sequence[Prompt]) -> list[str]:
        """By which features are kept and shared."""
        if self._share:
            return [prompt.content_key for prompt in prompts]
        return [f"{place}:{prompt.content_key}" for place, prompt in enumerate(prompts)]

    def _encode_missing(
        self, missing: Mapping[str, Prompt], with_graph: bool, keep_graph: bool, sequence: SequenceGroup
    ) -> dict[str, VisualFeatures]:
        results = {}
        names, prompts = list(missing), list(missing.values())
        for keys, batch in [(names, prompts)] if with_graph else [([k], [p]) for k, p in missing.items()]:
            if not batch:
                continue
            with torch.set_grad_enabled(with_graph):
                pixels = torch.cat([_pixels(prompt) for prompt in batch])
                grids = torch.cat([_grids(prompt) for prompt in batch])
                sizes = [int(_grids(prompt).prod(-1).sum()) // self._merged_patches for prompt in batch]
                outputs = self._encoded(pixels, grids, sequence).split(sizes)
            self.prompts_encoded += len(batch)
            for key, features in zip(keys, outputs, strict=True):
                results[key] = VisualFeatures(features, self.version, carries_graph=with_graph)
                if self._share and (keep_graph or not with_graph):
                    self._in_use[key] = results[key]
                    self._keep(key, results[key])
        return results

    def _encoded(self, pixels: torch.Tensor, grids: torch.Tensor, sequence: SequenceGroup) -> torch.Tensor:
        """[M, ...] of all media; each process of ``sequence`` runs the tower on some of their frames."""
        if sequence.size == 1:
            return self._run(pixels, grids)
        parts = shares(grids.tolist(), sequence.size)
        mine = parts[sequence.rank]
        if mine.patches:
            own = self._run(pixels[mine.start : mine.stop], torch.tensor(mine.grids), parts)
        else:
            # The tower's weights may be gathered, and its gradients reduced, by all ranks together.
            own = self._run(*self._pixels.empty_token(self._device), parts)[:0]
        return sequence.gather_rows(own, [part.patches // self._merged_patches for part in parts], reduce=True)

    def _run(self, pixels: torch.Tensor, grids: torch.Tensor, parts: Sequence[VisionPiece] = ()) -> torch.Tensor:
        moved = (each.to(self._device, non_blocking=True) for each in (pixels, grids))
        return self._run_tower(*moved, *([parts] if parts else []))

    def _keep(self, key: str, features: VisualFeatures) -> None:
        size = tensor_bytes(features.features)
        if features.carries_graph:
            # Needed again by this step's backward; the next weights_changed() lets it go.
            self._kept[key] = features
            return
        if self.trains or size > self._cache_bytes:
            return
        self._kept[key] = features
        self._kept_bytes += size
        while self._kept_bytes > self._cache_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= tensor_bytes(oldest.features)


def _pixels(prompt: Prompt) -> torch.Tensor:
    assert prompt.pixel_values is not None
    return prompt.pixel_values


def _grids(prompt: Prompt) -> torch.Tensor:
    assert prompt.grid_thw is not None
    return prompt.grid_thw
