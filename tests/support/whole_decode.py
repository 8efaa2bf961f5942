"""The oracle of frame selection: all frames of a file, decoded from its start, and those of a part picked by time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from vlm_pg.media.decode_file import resize_frames


@dataclass(frozen=True)
class Whole:
    """Upright pictures, uint8 [height, width, 3], and their times since the first one."""

    pictures: list[np.ndarray]
    seconds: list[float]

    def clip(self, start: float, end: float, count: int, slack: float = 0.0005) -> list[int]:
        """``count`` positions, evenly over the frames from ``start`` to ``end``."""
        inside = [position for position, second in enumerate(self.seconds) if start - slack <= second <= end + slack]
        return torch.linspace(inside[0], inside[-1], count).round().long().tolist()

    def on_display(self, time: float, slack: float = 0.0005) -> int:
        """The position of the frame that a viewer sees at a time."""
        return max(position for position, second in enumerate(self.seconds) if second <= time + slack)

    def resized(self, positions: list[int], height: int, width: int) -> np.ndarray:
        return resize_frames(np.stack([self.pictures[position] for position in positions]), height, width)


@lru_cache(maxsize=1)
def decode_whole(path: Path) -> Whole:
    """Every frame of the best video stream, in the order they are shown."""
    import av

    pictures, pts = [], []
    with av.open(str(path)) as container:
        stream = container.streams.best("video")
        assert stream is not None
        for frame in container.decode(stream):
            pictures.append(np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90) % 4))
            pts.append(float(frame.pts * frame.time_base))
    order = np.argsort(pts, kind="stable")
    return Whole([pictures[position] for position in order], [pts[position] - min(pts) for position in order])
