"""Recordings that begin anywhere: their frames are those that come when the whole file is decoded, at their times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import pytest

from tests.support.clips import number_of
from tests.support.odd_clips import encode, remux
from vlm_pg.media.index import read_index
from vlm_pg.media.video_decoders import PyAVDecoder

X265 = "log-level=none:pools=none:frame-threads=1:keyint=12:bframes=3:b-adapt=0"
WAYS = {
    "h264": ("libx264", {"bf": "3", "x264-params": "b-adapt=0:keyint=12:scenecut=0"}),
    "h264-open": ("libx264", {"bf": "3", "x264-params": "b-adapt=0:keyint=12:scenecut=0:open-gop=1"}),
    "h264-refresh": ("libx264", {"bf": "0", "x264-params": "intra-refresh=1:keyint=12"}),
    "hevc": ("libx265", {"x265-params": f"{X265}:open-gop=0"}),
    "hevc-open": ("libx265", {"x265-params": f"{X265}:open-gop=1"}),
    "mpeg2": ("mpeg2video", {"bf": "2"}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", [3, 14])
def test_frames_start_where_a_decoder_starts(way: str, first: int, tmp_path: Path) -> None:
    codec, options = WAYS[way]
    whole = encode(tmp_path / "a.ts", list(range(60)), codec, clock=25, **options)
    path = remux(whole, tmp_path / "b.ts", lambda packets: packets[first:])
    come = frames_of(path)
    assert 0 < len(come) < 60 - first, "no picture at the start is lost"
    check(path, come)


def test_what_is_stored_first_may_lack_its_flag(tmp_path: Path) -> None:
    """A key frame that the container does not call one: decoders do not ask."""
    whole = encode(tmp_path / "a.mkv", list(range(48)), "libx265", clock=25, **WAYS["hevc"][1])

    def unflagged(packets: list[Any]) -> list[Any]:
        packets[0].is_keyframe = False
        return packets

    path = remux(whole, tmp_path / "b.mkv", unflagged)
    come = frames_of(path)
    assert [number for _, number in come] == list(range(48))
    check(path, come)


def frames_of(path: Path) -> list[tuple[int | None, int | None]]:
    """Time and number of each frame that comes of the whole file."""
    with av.open(str(path)) as container:
        return [(frame.pts, number_of(frame.to_ndarray(format="rgb24"))) for frame in container.decode(video=0)]


def check(path: Path, come: list[tuple[int | None, int | None]]) -> None:
    """Each alone, and all."""
    index = read_index(path)
    assert list(index.pts) == [pts for pts, _ in come]
    reader = PyAVDecoder(path, index)
    for wanted in (*([place] for place in range(len(come))), list(range(len(come)))):
        assert [number_of(picture) for picture in reader.read(wanted)] == [come[place][1] for place in wanted]
