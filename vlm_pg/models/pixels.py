"""How a vision tower reads pixels: in patches, of which a square makes one visual token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class PixelGeometry:
    """``patch_size`` in pixels a side, ``merge_size`` in patches a side, ``temporal_patch_size`` in frames.

    All are 1 for a model without a tower.
    """

    patch_size: int = 1
    merge_size: int = 1
    temporal_patch_size: int = 1
    channels: int = 1

    @classmethod
    def of(cls, config: Any) -> PixelGeometry:
        """As the config of Qwen's models says."""
        vision = getattr(config, "vision_config", None)
        if vision is None:
            return cls()
        return cls(vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size, vision.in_channels)

    @property
    def token_side(self) -> int:
        """Pixels per side of one visual token."""
        return self.patch_size * self.merge_size

    @property
    def patches_per_token(self) -> int:
        return self.merge_size**2

    def empty_token(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """One visual token of zeros: pixel_values [patches, dim] on the device, and grid_thw [1, 3] on the host."""
        dim = self.channels * self.temporal_patch_size * self.patch_size**2
        grid = torch.tensor([[1, self.merge_size, self.merge_size]])
        return torch.zeros(self.patches_per_token, dim, device=device), grid
