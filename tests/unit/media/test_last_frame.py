"""Where a set's questions are on a video's last frame, that frame is shown, or the video is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.clips import Clip, number_of, write
from vlm_pg.errors import SampleError
from vlm_pg.eval.protocols.load import load_protocol, protocol_names
from vlm_pg.media.decode_file import decode_file
from vlm_pg.media.settings import MediaSettings

PROTOCOLS = [name for name in protocol_names() if name.startswith("video_mmmu/")]
FIRST = {"movflags": "faststart"}


def last_packet(path: Path) -> int:
    """Where the last packet of a file begins."""
    import av

    with av.open(str(path)) as container:
        return max(packet.pos for packet in container.demux() if packet.size)


def last_shown(path: Path, settings: MediaSettings) -> int | None:
    return number_of(np.asarray(decode_file("video", str(path), settings, 28).frames[-1]).transpose(1, 2, 0))


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Of even and odd numbers of frames, with B-frames, at a variable rate."""
    folder = tmp_path_factory.mktemp("clips")
    return {
        frames: write(Clip("libx264", container, "plain", {"bf": "3"}, variable=variable), folder, frames)
        for frames, container, variable in ((33, "mp4", False), (48, "matroska", False), (47, "mov", True))
    }


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_protocol_of_video_mmmu_shows_the_last_frame(clips: dict[int, Path], name: str) -> None:
    settings = load_protocol(name).media_settings(MediaSettings(workers=0))
    assert settings.last_frame == "always"
    for frames, path in clips.items():
        assert last_shown(path, settings) == frames - 1
        fewer = settings.model_copy(update={"min_frames": 2, "video_tokens": 600})  # the budget takes frames away
        assert last_shown(path, fewer) == frames - 1


def test_a_file_that_was_cut_before_its_last_frame_is_refused(tmp_path: Path) -> None:
    """Of 48 frames one is 2 %, which media.max_missing_share lets pass: the last one would be another."""
    path = write(Clip("mpeg4", "mp4", "plain", {"bf": "0"}, FIRST), tmp_path)
    always = MediaSettings(last_frame="always")
    assert last_shown(path, always) == 47
    path.write_bytes(path.read_bytes()[: last_packet(path)])
    assert last_shown(path, MediaSettings()) == 46
    with pytest.raises(SampleError, match=r"lacks its last frame: its header states 1\.920 s, 1\.880 s are") as got:
        decode_file("video", str(path), always, 28)
    assert got.value.reason == "truncated_media"


def test_other_protocols_leave_it_to_the_frames_that_are_sampled() -> None:
    assert load_protocol("video_mme/lmms").media_settings(MediaSettings()).last_frame == "as_sampled"
