"""The numbers of a language model that its arithmetic depends on, and those of public models.

Source of the public numbers: ``config.json`` of the checkpoint of that name under https://huggingface.co/Qwen (for
Qwen3.5-9B they are also transformers' defaults for ``Qwen3_5TextConfig``).
"""

from __future__ import annotations

from dataclasses import dataclass

# Of Qwen2.5-VL's tower: numbers of a patch (14 x 14 pixels, two frames, three colours), patches of a window, and
# patches that become one visual token.
PATCH_PIXELS, WINDOW_PATCHES, MERGED_PATCHES = 2 * 3 * 14 * 14, 64, 4


@dataclass(frozen=True)
class LinearAttention:
    """Layers of gated linear attention (Gated DeltaNet): one state [key_dim, value_dim] per value head."""

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int


@dataclass(frozen=True)
class LanguageShape:
    """One language model.

    ``layers`` counts all layers; those of ``linear`` are among them, the rest attend to all earlier tokens.
    ``gated_query``: the query projection also makes a gate of the same width (Qwen3.5).
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    gated_query: bool = False
    linear: LinearAttention | None = None

    @property
    def full_layers(self) -> int:
        """Layers with softmax attention."""
        return self.layers - (self.linear.layers if self.linear else 0)


@dataclass(frozen=True)
class TowerShape:
    """One vision tower of Qwen2.5-VL's kind: two frames of 14 x 14 pixels a patch, 2 x 2 patches a visual token.

    ``whole_frame_layers``: those in which a patch attends to its whole frame; in the others to a window of 8 x 8.
    """

    hidden: int
    layers: int
    heads: int
    intermediate: int
    whole_frame_layers: tuple[int, ...]


PUBLISHED: dict[str, LanguageShape] = {
    "Qwen2.5-VL-3B": LanguageShape(2048, 36, 16, 2, 128, 11008, 151936, tied=True),
    "Qwen2.5-VL-7B": LanguageShape(3584, 28, 28, 4, 128, 18944, 152064),
    "Qwen2.5-VL-32B": LanguageShape(5120, 64, 40, 8, 128, 27648, 152064),
    "Qwen2.5-VL-72B": LanguageShape(8192, 80, 64, 8, 128, 29568, 152064),
    "Qwen3-VL-8B": LanguageShape(4096, 36, 32, 8, 128, 12288, 151936),
    "Qwen3.5-9B": LanguageShape(
        4096, 32, 16, 4, 256, 12288, 248320, gated_query=True, linear=LinearAttention(24, 16, 32, 128, 128, 4)
    ),
}

# What `bench step`, `bench rollout` and `bench eval` build with random weights. The first two are for CPUs.
SIZES: dict[str, LanguageShape] = {
    "small": LanguageShape(256, 4, 4, 2, 64, 704, 4096),
    "mid": LanguageShape(512, 6, 8, 2, 64, 1408, 4096),
    "3b": PUBLISHED["Qwen2.5-VL-3B"],
    "7b": PUBLISHED["Qwen2.5-VL-7B"],
    # Dimensions of Qwen3-VL-8B's language model in Qwen2.5-VL's classes: without the norms of queries and keys.
    "8b": PUBLISHED["Qwen3-VL-8B"],
}

# The towers that `bench eval` gives them: published ones, and for the first two as small in proportion as the 7B's.
_PUBLISHED_TOWER = TowerShape(1280, 32, 16, 3420, (7, 15, 23, 31))
TOWERS: dict[str, TowerShape] = {
    "small": TowerShape(80, 2, 2, 216, (1,)),
    "mid": TowerShape(160, 4, 2, 428, (3,)),
    "3b": _PUBLISHED_TOWER,
    "7b": _PUBLISHED_TOWER,
    "8b": _PUBLISHED_TOWER,
}
