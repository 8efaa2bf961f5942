"""Layouts and positions recorded from Qwen's published code (``tests/recordings/record_positions.py``)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vlm_pg.models.positions import TOKEN_TYPES
from vlm_pg.models.registry import FAMILIES
from vlm_pg.prompts.processor_outputs import prompt_from_processor
from vlm_pg.types import Prompt

RECORDING = Path(__file__).parents[1] / "recordings" / "positions.npz"


@dataclass(frozen=True)
class Recorded:
    """A layout, the positions int64 [3, P] recorded for it, and the position of the first response token."""

    layout: dict[str, Any]
    positions: torch.Tensor
    following: int

    @property
    def inputs(self) -> dict[str, Any]:
        """What a processor would return, with patches of one number."""
        layout = self.layout
        types = torch.tensor([code for code, length in layout["runs"] for _ in range(length)])[None]
        inputs: dict[str, Any] = {"input_ids": torch.zeros_like(types), "mm_token_type_ids": types}
        names = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
        for kind, (pixels, grids) in names.items():
            of_kind = [grid for k, grid in zip(layout["kinds"], layout["grids"], strict=True) if k == kind]
            if of_kind:
                inputs[grids] = torch.tensor(of_kind)
                inputs[pixels] = torch.zeros(int(inputs[grids].prod(-1).sum()), 1)
        return inputs | ({"second_per_grid_ts": layout["seconds"]} if layout["seconds"] else {})

    def prompt(self, rule: str, family: str | None = None, model: Any = None) -> Prompt:
        """The prompt as a family counts it, by default the recorded one."""
        model = model or bare_model(self.layout["tokens_per_second"])
        of_family: Any = FAMILIES[family or self.layout["family"]]
        return prompt_from_processor(self.inputs, lambda *args: of_family.positions(rule, model, *args))

    @property
    def is_past_its_space(self) -> bool:
        """Whether the time of a video reaches beyond its rows and columns."""
        return bool((self.positions[0] > self.positions[1:].max(0).values).any())

    @property
    def ends_in_a_medium(self) -> bool:
        return self.layout["runs"][-1][0] in TOKEN_TYPES.values()


def bare_model(tokens_per_second: int | None) -> Any:
    """All that counting by Qwen's rule reads of a model."""
    vision = SimpleNamespace(
        patch_size=14, spatial_merge_size=2, temporal_patch_size=2, in_channels=3, tokens_per_second=tokens_per_second
    )
    return SimpleNamespace(config=SimpleNamespace(vision_config=vision))


@lru_cache(maxsize=1)
def recorded_layouts() -> tuple[Recorded, ...]:
    with np.load(RECORDING) as file:
        layouts = [json.loads(line) for line in file["layouts"].tobytes().decode().splitlines()]
        differences = torch.from_numpy(file["differences"].astype(np.int64))
    lengths = [sum(length for _, length in layout["runs"]) for layout in layouts]
    parts = differences.split(lengths, dim=1)
    return tuple(Recorded(a, part.cumsum(1), a["next"]) for a, part in zip(layouts, parts, strict=True))
