"""Clips, moments and budgets of video files: the frames that decoding the whole file shows at these times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.clip_table import table
from tests.support.clips import number_of, write
from tests.support.odd_clips import read_index
from tests.support.refusals import refused
from tests.support.whole_decode import decode_whole
from vlm_pg.media.decode_file import decode_video
from vlm_pg.media.sampling import WHOLE, Part
from vlm_pg.media.seeking import PyAVDecoder
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import DecodedMedia

CLIPS = {clip.name: clip for clip in table()}
ALL = {"fps": 1000.0, "max_frames": 64}


def show(path: Path, part: Part, factor: int = 28, **settings: Any) -> DecodedMedia:
    return decode_video(path, MediaSettings(**settings), factor, part=part)


def numbers(media: DecodedMedia) -> list[int | None]:
    return [number_of(frame.transpose(1, 2, 0)) for frame in media.frames]


# of real files: start, end, settings, how many frames that makes
REAL = [
    ("flipping_a_pancake.mkv", 2.0, 7.0, {"fps": 2.0, "max_frames": 64}, 10),
    ("flipping_a_pancake.mkv", 1 / 30, 3 / 30, ALL, 2),  # milliseconds: frames 1 to 3
    ("nasa_13013.mp4", 5.0, 8.0, {"fps": 4.0, "max_frames": 64}, 12),  # 29.97 a second: 150 to 239
    ("h265_video.mp4", 0.2, 0.8, ALL, 6),  # an open group of pictures
    ("unordered.mov", 0.04, 0.2, ALL, 2),
    ("video_90.mov", 0.03, 0.1, ALL, 2),  # upright
    pytest.param("flipping_a_pancake.mkv", 9.0, 99.0, ALL, 40, marks=pytest.mark.matrix),  # 270 to 309
    pytest.param("nasa_13013.mp4", 12.5, None, ALL, 14, marks=pytest.mark.matrix),  # 375 to 389, an even number of them
    pytest.param("av1_video.mkv", 1.0, 2.0, ALL, 26, marks=pytest.mark.matrix),
    pytest.param("bt709_full_range.mp4", None, 0.5, ALL, 16, marks=pytest.mark.matrix),
]


@pytest.mark.parametrize(("name", "start", "end", "settings", "count"), REAL)
def test_a_clip_of_a_real_file(
    media_dir: Path, name: str, start: float | None, end: float | None, settings: dict[str, Any], count: int
) -> None:
    whole = decode_whole(media_dir / name)
    media = show(media_dir / name, Part(start, end), **settings)
    indices = whole.clip(start or 0.0, 1e9 if end is None else end, count)
    assert media.frame_seconds == pytest.approx([whole.seconds[index] for index in indices], abs=1e-6)
    assert np.array_equal(media.frames, whole.resized(indices, *media.frames.shape[2:]))


OF_QWEN = [
    ("flipping_a_pancake.mkv", 0.1, 0.9),
    ("nasa_13013.mp4", None, 0.4),
    ("bt709_full_range.mp4", 0.5, None),
    ("nasa_13013.mp4", 0.3, 70.0),
]


@pytest.mark.parametrize(("name", "start", "end"), OF_QWEN)
def test_a_clip_is_that_of_qwen_vl_utils(
    media_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str, start: float | None, end: float | None
) -> None:
    """Frames, pixels and rate equal ``fetch_video`` with video_start and video_end."""
    from qwen_vl_utils import vision_process

    monkeypatch.setattr(vision_process, "get_video_reader_backend", lambda: "decord")
    media = show(media_dir / name, Part(start, end), fps=5.0, max_frames=8)
    element = {"video": str(media_dir / name), "fps": 5.0, "min_frames": 4, "max_frames": 8,
               "min_pixels": 4 * 784, "max_pixels": 128 * 784}  # fmt: skip
    element |= {key: value for key, value in (("video_start", start), ("video_end", end)) if value is not None}
    (theirs, metadata), their_fps = vision_process.fetch_video(
        element, return_video_sample_fps=True, return_video_metadata=True
    )
    assert metadata["video_backend"] == "decord"
    assert np.array_equal(media.frames, theirs.numpy())
    assert media.sampled_fps == pytest.approx(their_fps, rel=1e-6)
    shown = [index / metadata["fps"] for index in metadata["frames_indices"]]
    assert media.frame_seconds == pytest.approx(shown, abs=0.0006)


# of clips whose frames show their numbers, 25 a second unless their rate is variable
MADE = [
    # 0, 4, 7, 16, 20, 37, 41, 46, 50, ... hundredths of a second
    ("libx264-mp4-variable", Part(0.07, 0.41), [2, 3, 5, 6]),
    ("libx264-mp4-variable", Part(0.08, 0.38), [3, 5]),
    ("libx264-matroska-variable", Part(0.07, 0.41), [2, 3, 5, 6]),
    ("libx264-mp4-variable", Part(times=(0.36, 0.37, 0.47)), [4, 5, 7, 7]),
    ("mpeg4-mpegts-variable", Part(times=(0.0, 0.159, 0.161)), [0, 2, 3, 3]),
    ("libx265-mp4-open-gop", Part(0.4, 0.8), [10, 11, 12, 13, 14, 16, 17, 18, 19, 20]),
    ("libx264-mpegts-b-frames", Part(0.4, 0.52), [10, 11, 12, 13]),
    ("mpeg2video-vob-offset", Part(1.0, 1.12), [25, 26, 27, 28]),
    ("libx264-mov-edit-list-b-frames", Part(0.4, 0.52), [17, 18, 19, 20]),  # seven are cut away
    ("libx264-mov-edit-list-b-frames", Part(times=(0.0, 0.05)), [7, 8]),
    ("libx264-matroska-turned-90", Part(1.8, 9.0), [45, 47]),
    ("libx264-mp4-no-stss-b-frames", Part(times=(0.2, 0.5, 1.0, 1.9)), [5, 12, 25, 47]),
    ("libx264-mp4-fragments-b-frames", Part(None, 0.12), [0, 1, 2, 3]),
    ("mpeg4-avi-plain", Part(0.5, 0.65), [13, 14, 15, 16]),  # 12.5: the next one
]


@pytest.mark.parametrize(("name", "part", "expected"), MADE, ids=lambda value: value if isinstance(value, str) else "")
def test_a_part_of_a_file_of_every_kind(name: str, part: Part, expected: list[int], tmp_path: Path) -> None:
    path = write(CLIPS[name], tmp_path)
    media = show(path, part, **ALL)
    assert numbers(media) == expected
    whole = decode_whole(path)
    shown = [number_of(picture) for picture in whole.pictures]
    indices = [shown.index(number) for number in expected]
    assert media.frame_seconds == pytest.approx([whole.seconds[index] for index in indices], abs=1e-6)
    if part.times:
        assert indices[: len(part.times)] == [whole.on_display(time) for time in part.times]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (Part(10.4, None), r"video 'flipping_a_pancake\.mkv', which has 310 in 10\.33 s"),
        (Part(2.0, 2.02), "holds fewer than 2 frames"),
        (Part(times=(2.0, 10.5)), r"asks for 10\.5 s of video 'flipping_a_pancake\.mkv', which ends at 10\.33 s"),
    ],
)
def test_a_part_that_is_not_there(media_dir: Path, part: Part, words: str) -> None:
    with refused("bad_clip", words):
        show(media_dir / "flipping_a_pancake.mkv", part)


def test_nothing_outside_a_clip_is_decoded(media_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the entry point before a clip to its last frame, and the few that a decoder wants ahead."""
    seen: list[float] = []
    real = PyAVDecoder._decode

    def watched(coded: Any) -> Any:
        for packet in coded:
            seen.extend([] if packet.pts is None else [float(packet.pts * packet.time_base)])
            yield packet

    monkeypatch.setattr(PyAVDecoder, "_decode", lambda decoder, coded, run: real(decoder, watched(coded), run))
    show(media_dir / "nasa_13013.mp4", Part(9.0, 9.5), fps=4.0)
    index = read_index(media_dir / "nasa_13013.mp4")
    before = max(float(entry.pts * index.time_base) for entry in index.entries if entry.pts * index.time_base <= 9)
    assert min(seen) == before > 8.0 and max(seen) < 10.5


def test_limits_judge_the_whole_file(media_dir: Path) -> None:
    with refused("video_too_long"):
        show(media_dir / "nasa_13013.mp4", Part(1.0, 3.0), max_video_seconds=10.0)


@pytest.mark.parametrize("part", [Part(3.0, 6.0), Part(times=(0.5, 0.51, 9.0))], ids=["clip", "moments"])
def test_clip_and_decoder(media_dir: Path, part: Part) -> None:
    media = show(media_dir / "flipping_a_pancake.mkv", part, decoder="decord")
    auto = show(media_dir / "flipping_a_pancake.mkv", part)
    assert media.decoder == "decord"
    assert np.array_equal(media.frames, auto.frames)
    assert media.frame_seconds == pytest.approx(auto.frame_seconds, abs=1e-6)


@pytest.mark.parametrize(
    ("part", "budget", "expected"),
    [
        # 1080 x 1920 would be 15 x 8 patches: see test_sampling.py
        (Part(0.1, 0.9), 480, (8, 224, 420)),
        (Part(0.1, 0.9), 100, (8, 84, 168)),  # 25 patches a pair: 3.75 x 6.67
        (Part(0.1, 0.9), 7, (6, 28, 56)),
        (Part(times=(0.1, 0.2, 0.3, 0.4)), 40, (4, 84, 140)),
        (Part(times=(0.1, 0.2, 0.3, 0.4)), 4, (4, 28, 56)),
    ],
)
def test_clip_and_token_budget(media_dir: Path, part: Part, budget: int, expected: tuple[int, int, int]) -> None:
    """1280x720, 30 frames a second: frames 3 to 27 of the clip."""
    media = show(media_dir / "bt709_full_range.mp4", part, fps=10.0, video_tokens=budget)
    count, _, height, width = media.frames.shape
    assert (count, height, width) == expected
    assert count // 2 * (height // 28) * (width // 28) <= budget
    if not part.times:
        indices = np.linspace(3, 27, count).round().astype(int).tolist()
        assert media.frame_seconds == pytest.approx([index / 30 for index in indices], abs=1e-4)
        assert media.sampled_fps == pytest.approx(count / 25 * 30)
        whole = decode_whole(media_dir / "bt709_full_range.mp4")
        assert np.array_equal(media.frames, whole.resized(indices, height, width))


def test_the_budget_leaves_out_no_moment_and_goes_no_lower_than_min_frames(media_dir: Path) -> None:
    """At the least area a pair takes 2 tokens: eight moments take 8, though min_frames is 4."""
    path, times = media_dir / "bt709_full_range.mp4", tuple(index / 10 for index in range(8))
    assert len(show(path, Part(times=times), video_tokens=8).frames) == 8
    assert len(show(path, WHOLE, min_frames=6, fps=10.0, video_tokens=7).frames) == 6
    for part, settings in ((Part(times=times), {}), (WHOLE, {"min_frames": 7, "fps": 10.0})):
        with refused("too_many_visual_tokens", r"8 frames of 1280x720 pixels, the fewest .* more than 7 visual"):
            show(path, part, video_tokens=7, **settings)


def test_clip_and_uniform(media_dir: Path) -> None:
    media = show(media_dir / "flipping_a_pancake.mkv", Part(2.0, 4.0), frames="uniform", num_frames=6, max_frames=4)
    assert media.frame_seconds == pytest.approx([2.0, 2.4, 2.8, 3.2, 3.6, 4.0], abs=1e-3)
    assert media.sampled_fps == pytest.approx(6 / 61 * 30)
