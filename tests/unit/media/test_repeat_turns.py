"""Over its turns the repeated-frame control favours no moment."""

from __future__ import annotations

import numpy as np

from vlm_pg.media.controls import repeat_frame
from vlm_pg.types import DecodedMedia


def test_the_turns_of_a_repeated_frame_show_every_moment_once() -> None:
    frames = np.arange(8, dtype=np.uint8).reshape(8, 1, 1, 1).repeat(3, axis=1)
    media = DecodedMedia("video", frames, tuple(float(i) for i in range(8)), 1.0, "pyav")
    shown = [repeat_frame(media, "key", turn=turn, turns=4).frames[:, 0, 0, 0].tolist() for turn in range(4)]
    assert sorted(shown) == [[2 * run, 2 * run + 1] * 4 for run in range(4)]
