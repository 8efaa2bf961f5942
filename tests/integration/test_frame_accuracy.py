"""The frames of undamaged videos are those asked for, or the file is refused: every codec, container and way to store.

Each frame shows its number (``tests/support/clips.py``). All clips run under the marker ``matrix``, one of each way in
the usual tests.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.clip_table import table
from tests.support.clips import FRAMES, Clip, number_of, write
from tests.support.odd_clips import read_index
from tests.support.torchcodec import require_torchcodec
from vlm_pg.errors import SampleError
from vlm_pg.media.boundary import DecodeFailure
from vlm_pg.media.decode_file import decode_video
from vlm_pg.media.sampling import frame_indices
from vlm_pg.media.seeking import PyAVDecoder
from vlm_pg.media.settings import MediaSettings
from vlm_pg.media.video_decoders import Decoder, DecordDecoder, TorchCodecDecoder

CLIPS = {clip.name: clip for clip in table()}
USUAL = (
    "libx264-mp4-no-stss-b-frames",
    "libx264-mp4-intra-refresh",
    "libx264-mov-edit-list-b-frames",
    "libx264-matroska-turned-90",
    "libx264-mpegts-b-frames",
    "libx264-matroska-no-cues",
    "libx265-mp4-open-gop",
    "libx264-mp4-variable",
    "mpeg2video-vob-offset",
    "mpeg4-avi-plain",
)
# what may be refused: PyAV is not told when frames of H.264 in a program stream are shown
REFUSED = {name for name in CLIPS if name.startswith("libx264-vob")}

# without an index, with times that FFmpeg guesses, or with flagged key frames that are none
TORCHCODEC_REFUSES = ("mpegts", "vob", "avi", "flv", "intra-refresh", "no-stss", "no-stss-b-frames")


def all_clips() -> list:
    return [name if name in USUAL else pytest.param(name, marks=pytest.mark.matrix) for name in CLIPS]


def test_the_table_is_large_enough():
    assert len(CLIPS) == len(table()) >= 120
    assert set(USUAL) <= set(CLIPS)


@pytest.mark.skipif(os.geteuid() != 0, reason="the encoder asks for real time only when root runs it")
def test_encoding_leaves_the_process_out_of_real_time(tmp_path: Path):
    """All other processes of a machine wait for one in real time."""
    write(CLIPS["libsvtav1-mp4-plain"], tmp_path)
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


@pytest.mark.parametrize("name", all_clips())
def test_auto_returns_the_frames_asked_for_or_refuses(name: str, tmp_path: Path):
    clip = CLIPS[name]
    path = write(clip, tmp_path)
    if name in REFUSED:
        with pytest.raises(SampleError, match="no presentation timestamp"):
            decode_video(path, MediaSettings(), 28)
        return
    index = read_index(path)
    assert len(index.pts) == FRAMES - clip.first
    check_reads(PyAVDecoder(path, index), clip)
    media = decode_video(path, MediaSettings(fps=1000, max_frames=32), 28)
    expected = [clip.first + position for position in frame_indices(FRAMES - clip.first, 32)]
    assert [number_of(frame.transpose(1, 2, 0)) for frame in media.frames] == expected
    assert media.decoder == "pyav"


@pytest.mark.parametrize("name", all_clips())
def test_torchcodec_is_refused_where_it_is_wrong(name: str, tmp_path: Path):
    require_torchcodec()
    path = write(CLIPS[name], tmp_path)
    try:
        decoder = TorchCodecDecoder(path, read_index(path))
        check_reads(decoder, CLIPS[name])
    except DecodeFailure:
        assert CLIPS[name].container in TORCHCODEC_REFUSES or CLIPS[name].feature in TORCHCODEC_REFUSES


def check_reads(decoder: Decoder, clip: Clip) -> None:
    """All frames, few far apart, single ones, both sides of a key frame."""
    total = FRAMES - clip.first
    for wanted in (range(total), (0, 20, total - 2, total - 1), (total - 1,), (13,), (11, 12), (total // 2,)):
        numbers = [number_of(picture) for picture in decoder.read(list(wanted))]
        assert numbers == [clip.first + position for position in wanted]


@pytest.mark.parametrize("name", all_clips())
def test_decord_is_refused_where_it_is_wrong(name: str, tmp_path: Path):
    """Of undamaged files too: what is known of decord's faults is checked before it is believed."""
    path = write(CLIPS[name], tmp_path)
    try:
        decoder = DecordDecoder(path, read_index(path))
    except DecodeFailure:
        return
    check_reads(decoder, CLIPS[name])
