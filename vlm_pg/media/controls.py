"""Control inputs that take the temporal evidence away: frames in a wrong order, one moment repeated.

Both work on runs of ``unit`` frames, one temporal patch of the vision tower, and are fixed by a key, so that a control
can be evaluated again. Times are kept: the tower gets the same seconds, only the pictures move.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np

from vlm_pg.errors import SampleError
from vlm_pg.types import DecodedMedia


def shuffle_frames(media: DecodedMedia, seed_key: str, unit: int = 2) -> DecodedMedia:
    """The video with its runs of frames in another order, never the original one; an image as it is.

    Raises:
        SampleError: ``too_few_frames`` when there is only one run.
    """
    if media.kind == "image":
        return media
    runs = _runs(media, unit)
    if len(runs) < 2:
        raise SampleError(
            "too_few_frames",
            f"a video of {len(media.frames)} frames cannot be shuffled in runs of {unit}. At least two runs are "
            "needed. Raise media.min_frames, or leave the video out of this control.",
        )
    identity = list(range(len(runs)))
    order, attempt = identity, 0
    while order == identity:
        order = sorted(identity, key=lambda run: _number(f"{seed_key}/shuffle/{attempt}/{run}"))
        attempt += 1
    return replace(media, frames=np.concatenate([runs[run] for run in order]))


def repeat_frame(media: DecodedMedia, seed_key: str, unit: int = 2, turn: int = 0, turns: int = 1) -> DecodedMedia:
    """The video with one of its runs of frames, chosen by the key, in place of all; an image as it is.

    ``turn`` 0 to ``turns`` - 1 choose as many moments evenly apart, the first one by the key. Over all turns no moment
    is favoured, so hitting the moment in question is no matter of luck.
    """
    if media.kind == "image":
        return media
    runs = _runs(media, unit)
    chosen = runs[(_number(f"{seed_key}/repeat") + turn * len(runs) // turns) % len(runs)]
    copies = -(-len(media.frames) // len(chosen))
    return replace(media, frames=np.concatenate([chosen] * copies)[: len(media.frames)])


def _runs(media: DecodedMedia, unit: int) -> list[np.ndarray]:
    return [media.frames[start : start + unit] for start in range(0, len(media.frames), unit)]


def _number(key: str) -> int:
    """A number that depends on the key alone, on every machine and in every Python version."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
