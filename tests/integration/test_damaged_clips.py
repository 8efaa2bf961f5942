"""Damage to the coded pictures of a clip: refused where the decoder can know of it, counted where it cannot.

Frames show their numbers, so what comes is right, of another number, or garbage. Most codecs code their pictures
without checksums: damage that still reads as a picture is one. What the table holds is dated in docs/checks.md.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support.clip_table import QUICK, X265_QUIET, table
from tests.support.clips import Clip, number_of, write
from tests.support.mutations import damaged_payload
from vlm_pg.errors import SampleError
from vlm_pg.media.decode_file import decode_video
from vlm_pg.media.settings import MediaSettings

pytestmark = pytest.mark.matrix

SETTINGS = MediaSettings(fps=8, min_frames=4, max_frames=16, workers=0)
NAMES = (
    "mpeg4-mp4-plain", "libx264-mp4-plain", "libx264-mp4-b-frames", "libx265-mp4-plain", "libvpx-vp9-webm-plain",
    "mjpeg-mov-plain", "libsvtav1-mp4-plain", "mpeg4-matroska-plain", "mpeg2video-matroska-plain",
    "ffv1-matroska-plain",
)  # fmt: skip
SEEDS = 34
HASHES = Clip(
    "libx265", "mp4", "hashes", {**QUICK["libx265"], "x265-params": f"{X265_QUIET}:keyint=12:bframes=0:hash=1"}
)


def numbers(path: Path) -> list[int | None]:
    """What the frames of a clip show."""
    return [number_of(frame.transpose(1, 2, 0)) for frame in decode_video(path, SETTINGS, 28).frames]


def outcomes(clip: Clip, folder: Path, seeds: range) -> Counter[str]:
    """What became of the clip with each damage."""
    path = write(clip, folder)
    data, expected = path.read_bytes(), numbers(path)
    assert None not in expected
    counts: Counter[str] = Counter()
    for seed in seeds:
        path.write_bytes(damaged_payload(data, f"{clip.name}/{seed}"))
        try:
            came = numbers(path)
        except SampleError:
            counts["refused"] += 1
            continue
        wrong = [number for number, right in zip(came, expected, strict=True) if number != right]
        counts["right" if not wrong else "garbage" if set(wrong) == {None} else "another number"] += 1
    return counts


def test_picture_hashes_are_compared(tmp_path: Path):
    """HEVC may carry a hash of every picture: then none is wrong."""
    assert outcomes(HASHES, tmp_path, range(SEEDS)) == {"refused": SEEDS}


def test_a_picture_that_the_decoder_patched_is_refused(tmp_path: Path):
    """Motion JPEG: what was overread is filled in, and only an error says so."""
    counts = outcomes(next(clip for clip in table() if clip.name == "mjpeg-mov-plain"), tmp_path, range(SEEDS))
    assert counts["refused"] >= 10 and set(counts) == {"refused", "right"}


def test_how_many_damaged_clips_pass(tmp_path: Path):
    total: Counter[str] = Counter()
    clips = [clip for clip in table() if clip.name in NAMES]
    for clip in [*clips, HASHES]:
        counts = outcomes(clip, tmp_path, range(SEEDS))
        print(f"{clip.name}: {dict(counts)}")
        total += counts
    print(dict(total))
    assert total.total() == SEEDS * (len(NAMES) + 1)
    assert total["garbage"] + total["another number"] <= 0.12 * total.total()
