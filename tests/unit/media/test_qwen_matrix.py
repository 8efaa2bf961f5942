"""Frames, rate and size of a video or clip equal those of qwen-vl-utils' ``fetch_video``, over random numbers.

Where it raises, or comes to a side of 0, there is a refusal with a reason.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tests.support.qwen_video import fetch
from vlm_pg.errors import SampleError
from vlm_pg.media.sampling import Part, Timeline, choose, frames_within
from vlm_pg.media.settings import MediaSettings

RATES = (Fraction(24), Fraction(25), Fraction(30), Fraction(30000, 1001), Fraction(60), Fraction(24000, 1001))


def case(numbers: random.Random) -> dict[str, Any]:
    """A video, settings and a clip; sides, lengths and limits are spread over their orders of magnitude."""

    def spread(low: float, high: float) -> float:
        return math.exp(numbers.uniform(math.log(low), math.log(high)))

    rate = float(numbers.choice(RATES)) if numbers.random() < 0.7 else spread(0.5, 240)
    total = max(1, round(spread(0.05, 3600) * rate))
    factor = numbers.choice((28, 32))
    least = round(spread(1, 256)) * factor**2 - numbers.choice((0, 0, 5))
    settings = {"min_pixels": least, "max_pixels": least + round(spread(1, 1500 * factor**2))}
    if numbers.random() < 0.25:
        settings |= {"frames": "uniform", "num_frames": 2 * round(spread(1, 200))}
    else:
        low = round(spread(2, 64))
        settings |= {"fps": spread(0.1, 30), "min_frames": low}
        settings["max_frames"] = low + low % 2 + round(spread(1, 4096))
    length = total / rate
    # ends on the frames themselves, as people write them, and anywhere
    ends = sorted(round(numbers.uniform(0, 1.2 * length), numbers.choice((0, 1, 2, 12))) for _ in range(2))
    clip = {name: end if numbers.random() < 0.7 else None for name, end in zip(("start", "end"), ends, strict=True)}
    narrow = numbers.random() < 0.1
    return {
        "height": round(spread(1, 40 if narrow else 4000)),
        "width": round(spread(1, 8000)),
        "total": total,
        "rate": rate,
        "factor": factor,
        "settings": settings,
        "clip": clip if numbers.random() < 0.6 else {},
    }


def ours(drawn: dict[str, Any]) -> tuple[list[int], float, int, int]:
    settings, total, rate = MediaSettings(**drawn["settings"]), drawn["total"], drawn["rate"]
    timeline = Timeline(np.arange(total) / rate, rate, rate, 1e-6)
    choice = choose(timeline, Part(**drawn["clip"]), settings, "a.mp4")
    bounds = settings.min_pixels, settings.max_pixels
    count = len(choice.indices)
    frames = frames_within(count, 2, (drawn["height"], drawn["width"]), bounds, drawn["factor"])
    assert frames[0] == count
    return list(choice.indices), choice.sampled_fps, *frames[1:]


def theirs(ask: Any, drawn: dict[str, Any]) -> tuple[list[int], float, int, int]:
    element = {key: value for key, value in drawn["settings"].items() if key not in ("frames", "num_frames")}
    if "num_frames" in drawn["settings"]:
        element["nframes"] = drawn["settings"]["num_frames"]
    clip = {f"video_{name}": end for name, end in drawn["clip"].items() if end is not None}
    video = {"height": drawn["height"], "width": drawn["width"], "total": drawn["total"], "fps": drawn["rate"]}
    return ask(element | clip, drawn["factor"], **video)


REASONS = {"bad_clip", "too_few_frames", "bad_aspect_ratio", "too_narrow"}


@pytest.mark.parametrize("cases", [10_000, pytest.param(100_000, marks=pytest.mark.matrix)])
def test_frames_rate_and_size(monkeypatch: pytest.MonkeyPatch, cases: int) -> None:
    numbers = random.Random(f"frames/{cases}")
    ask = fetch(monkeypatch, 1, 1, 1, 1.0)
    seen: Counter[str] = Counter()
    for _ in range(cases):
        drawn = case(numbers)
        try:
            expected = theirs(ask, drawn)
        except (ValueError, ZeroDivisionError):
            expected = None
        if expected is None or 0 in expected[2:]:
            with pytest.raises(SampleError) as got:
                ours(drawn)
            assert got.value.reason in REASONS, drawn
            seen[got.value.reason] += 1
            continue
        assert ours(drawn) == expected, drawn
        seen["clip" if any(end is not None for end in drawn["clip"].values()) else "whole"] += 1
    assert all(seen[what] > cases // 500 for what in (*REASONS, "clip", "whole")), seen
