"""Thumbnails of what the model sees, for people."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vlm_pg.types import DecodedMedia

MAX_THUMBNAILS = 8
LONGEST_SIDE = 128


def preview_frames(media: Sequence[DecodedMedia]) -> tuple[tuple[np.ndarray, ...], tuple[float, ...]]:
    """Up to eight frames, spread evenly over all media in order, and their times in seconds.

    Returns:
        Thumbnails uint8 [height, width, 3] with no side above 128 pixels, and one time for each.
    """
    frames = [(frame, second) for item in media for frame, second in zip(item.frames, item.frame_seconds, strict=True)]
    count = min(len(frames), MAX_THUMBNAILS)
    chosen = np.linspace(0, len(frames) - 1, count).round().astype(int) if count else ()
    picked = [frames[index] for index in chosen]
    return tuple(_thumbnail(frame) for frame, _ in picked), tuple(second for _, second in picked)


def _thumbnail(frame: np.ndarray) -> np.ndarray:
    """uint8 [3, H, W] to uint8 [height, width, 3]; never scaled up."""
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(frame.transpose(1, 2, 0)))
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.BICUBIC)
    return np.asarray(image)
