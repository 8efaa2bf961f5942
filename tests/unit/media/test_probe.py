"""What a probe says of a medium is what decoding it gives, and what decoding refuses it refuses."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vlm_pg.errors import SampleError
from vlm_pg.media.loader import MediaLoader
from vlm_pg.media.probe import MediaFacts
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import DecodedMedia, MediaRef

SETTINGS = MediaSettings(max_frames=6, max_pixels=64 * 28 * 28, image_max_pixels=64 * 28 * 28)


pytestmark = pytest.mark.usefixtures("kept_templates")


def probed(loader: MediaLoader, ref: MediaRef, decode: bool = False) -> MediaFacts | SampleError:
    found = loader.probe(ref, decode)
    try:
        return found.result() if isinstance(found, Future) else found
    except SampleError as fault:
        return fault


@pytest.mark.parametrize(
    "name", ["h264_10bits.mp4", "av1_video.mkv", "video_90.mov", "unordered.mov", "corrupted.mp4", "picture.png"]
)
def test_a_file_is_probed_as_it_is_decoded(name: str, media_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "picture.png":
        Image.fromarray(np.arange(90 * 130 * 3, dtype=np.uint8).reshape(90, 130, 3)).save(path)
    else:
        path.write_bytes((media_dir / name).read_bytes())
    ref = MediaRef("image" if name == "picture.png" else "video", name)
    with MediaLoader(SETTINGS, tmp_path) as loader:
        media, whole, header = loader.load([ref])[0], probed(loader, ref, decode=True), probed(loader, ref)
        if isinstance(media, SampleError):
            assert name == "corrupted.mp4" and isinstance(whole, SampleError) and whole.reason == media.reason
            return
        assert isinstance(media, DecodedMedia) and isinstance(whole, MediaFacts)
        assert whole == header
        frames, _, height, width = media.frames.shape
        assert (whole.frames, whole.height, whole.width) == (frames, height, width)
        assert whole.visual_tokens == max(1, frames // 2) * (height // 28) * (width // 28)
        assert whole.content == hashlib.sha256(path.read_bytes()).hexdigest()
        assert whole.seconds >= media.frame_seconds[-1]


def test_part_budget_and_subtitles_count(media_dir: Path, tmp_path: Path) -> None:
    source = next(path for path in sorted(media_dir.rglob("*.mp4")))
    (tmp_path / "bad.srt").write_bytes(b"\0\1\2")
    (tmp_path / "a.mp4").write_bytes(source.read_bytes())
    with MediaLoader(SETTINGS.model_copy(update={"video_tokens": 40}), tmp_path) as loader:
        whole = probed(loader, MediaRef("video", "a.mp4"))
        moments = probed(loader, MediaRef("video", "a.mp4", times=(0.0, 0.5)))
        assert isinstance(whole, MediaFacts) and isinstance(moments, MediaFacts)
        assert whole.visual_tokens <= 40 and moments.frames == 2
        assert whole.seconds == moments.seconds and whole.content == moments.content
        for ref, reason in (
            (MediaRef("video", "a.mp4", start=1000.0, end=1001.0), "bad_clip"),
            (MediaRef("video", "a.mp4", subtitles="bad.srt"), "bad_subtitles"),
            (MediaRef("video", "b.mp4"), "missing_media"),
            (MediaRef("image", "a.mp4"), "unsupported_media"),
        ):
            fault = probed(loader, ref)
            assert isinstance(fault, SampleError) and fault.reason == reason
