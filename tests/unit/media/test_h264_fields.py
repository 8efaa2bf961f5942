"""H.264 stored as two fields a picture: its frames are those that a decoder makes of the whole file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from tests.support.clips import number_of
from tests.support.field_clips import Fields, parameter_sets, pictures, write_fields
from tests.support.odd_clips import remux
from vlm_pg.media.boundary import DecodeFailure
from vlm_pg.media.coded_pictures import FieldPairs
from vlm_pg.media.index import read_index
from vlm_pg.media.keyframes import Syntax
from vlm_pg.media.video_decoders import PyAVDecoder

COUNT = 26
WAYS = {
    "two-b": Fields(),
    "no-b": Fields(b_frames=0),
    "slices-lower-first": Fields(slices=2, bottom_first=tuple(range(COUNT))),
    "scaling-lists": Fields(is_high=True),
    "frames-between": Fields(is_frame=(5, 6, 7, 13), bottom_first=(2, 8, 9, 20)),
}


@pytest.mark.parametrize(
    ("suffix", "together", "second_time"),
    [("ts", False, True), ("ts", False, False), ("ts", True, True), ("mkv", False, True), ("mp4", True, True)],
)
@pytest.mark.parametrize("way", WAYS)
def test_every_frame_is_that_of_the_whole_file(
    way: str, suffix: str, together: bool, second_time: bool, tmp_path: Path
) -> None:
    path = write_fields(tmp_path / f"a.{suffix}", WAYS[way], COUNT, together, second_time)
    check(path, whole(path))
    assert read_index(path).shown_until == pytest.approx(read_index(path).pts_seconds[-1] + 0.04)


@pytest.mark.parametrize("first", [5, 28])
def test_a_recording_that_begins_amid_a_picture(first: int, tmp_path: Path) -> None:
    source = write_fields(tmp_path / "a.ts", Fields(), 40)
    path = remux(source, tmp_path / "b.ts", lambda packets: packets[first:])
    come = whole(path)
    assert 0 < len(come) < 40 - first // 2
    check(path, come)


@pytest.mark.parametrize("lost", [4, 5, 10, 11])
def test_a_lost_field_is_no_frame(lost: int, tmp_path: Path) -> None:
    """What is made from half a picture is not what was recorded."""
    source = write_fields(tmp_path / "a.ts", Fields(), COUNT)
    path = remux(source, tmp_path / "b.ts", lambda packets: packets[:lost] + packets[lost + 1 :])
    with pytest.raises(DecodeFailure, match="stored as two fields, of which one is missing"):
        read_index(path)


def test_both_fields_in_one_packet_leave_none_open() -> None:
    """Two pictures with one frame_num, the upper field of the first and the lower one of the second stored first."""
    stored = [b"".join(units) for _, units in pictures(Fields(bottom_first=(2,)), 12)]
    assert seconds(stored[2:4]) == [False, False]
    apart = [unit for _, units in pictures(Fields(), 12) for unit in units]
    assert seconds(apart) == [False, True] * 12
    assert seconds([apart[4], apart[6]]) == [False, False], "the upper fields of two pictures with one frame_num"
    assert seconds([apart[0], apart[3]]) == [False, False], "two fields of different frame_num"
    kept = apart[5].replace(b"\0\0\0\1\1", b"\0\0\0\1\x61", 1)
    assert seconds([apart[4], kept]) == [False, False], "of which one alone is a reference"


def test_what_cannot_be_read_is_no_second_field() -> None:
    stored = [unit for _, units in pictures(Fields(), 12) for unit in units]
    assert True not in seconds(stored, b""), "no parameter sets"
    assert True not in seconds([unit[:6] for unit in stored]), "cut off"
    assert True not in seconds(stored, parameter_sets(Fields())[:12]), "a parameter set that is cut off"
    assert True not in seconds([stored[0], b"\0\0\1\x67\x4d" + stored[1]]), "one that is replaced by such"
    assert True not in seconds(stored, codec="hevc")


def seconds(stored: list[bytes], extradata: bytes | None = None, codec: str = "h264") -> list[bool]:
    """Which of some packets are second fields; the first one's parameter sets are taken away."""
    sets = parameter_sets(Fields())
    pairs = FieldPairs(Syntax(codec), sets if extradata is None else extradata)
    return [pairs.is_second(memoryview(packet.removeprefix(sets)), is_keyframe=False) for packet in stored]


def whole(path: Path) -> list[tuple[Any, np.ndarray]]:
    """Time and picture of each frame that comes of the whole file, all of which show a number."""
    with av.open(str(path)) as container:
        come = [(frame.pts, frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    numbers = [number_of(picture) for _, picture in come]
    assert numbers == list(range(numbers[0] or 0, numbers[-1] + 1))  # type: ignore[operator]
    return come


def check(path: Path, come: list[tuple[Any, np.ndarray]]) -> None:
    """Each alone, and all, bit for bit."""
    index = read_index(path)
    assert list(index.pts) == [pts for pts, _ in come]
    reader = PyAVDecoder(path, index)
    for wanted in (*([place] for place in range(len(come))), list(range(len(come)))):
        assert np.array_equal(reader.read(wanted), np.stack([come[place][1] for place in wanted]))
