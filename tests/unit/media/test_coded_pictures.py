"""Pictures stored as fields, out of order, or amid a group: frames are those that a decoder makes of the whole file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from tests.support.clips import number_of
from tests.support.field_clips import Fields, parameter_sets, pictures, write_fields
from tests.support.odd_clips import decoded, encode, remux
from vlm_pg.media.boundary import DecodeFailure
from vlm_pg.media.coded_pictures import FieldPairs, ShownOrder
from vlm_pg.media.index import _Frames, read_index
from vlm_pg.media.keyframes import Syntax
from vlm_pg.media.seeking import PyAVDecoder

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
    check(path, whole_file(path))
    assert read_index(path).shown_until == pytest.approx(read_index(path).pts_seconds[-1] + 0.04)


@pytest.mark.parametrize("first", [5, 28])
def test_a_recording_that_begins_amid_a_picture(first: int, tmp_path: Path) -> None:
    source = write_fields(tmp_path / "a.ts", Fields(), 40)
    path = remux(source, tmp_path / "b.ts", lambda packets: packets[first:])
    come = whole_file(path)
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


def whole_file(path: Path) -> list[tuple[Any, np.ndarray]]:
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
    for wanted in (*([position] for position in range(len(come))), list(range(len(come)))):
        assert np.array_equal(reader.read(wanted), np.stack([come[position][1] for position in wanted]))


FRAMES = 48
INTRA, P, B = (b"\0\0\1\0\0" + bytes([kind << 3]) for kind in (1, 2, 3))


@pytest.mark.parametrize(
    ("kinds", "stored", "ascends"),
    [
        ([INTRA, P, B, B, P, B, B], [0, 3, 1, 2, 6, 4, 5], True),
        ([INTRA, B, B, P], [2, 0, 1, 3], True),
        ([INTRA, P, B, P], [0, 2, 0, 3], True),  # two of one time, in order
        ([INTRA, P, B, B, INTRA, B], [0, 3, 1, 2, 4, 4], True),
        ([INTRA, P, B, INTRA, B, P], [0, 2, 1, 3, 4, 5], False),  # out come 0 1 2 4 3 5
        ([INTRA, P, B, INTRA, P], [0, 2, 2, 1, 5], False),  # out come 0 2 2 1 5
    ],
)
def test_the_order_in_which_pictures_come(kinds: list[bytes], stored: list[int], ascends: bool) -> None:
    order = ShownOrder(Syntax("mpeg2video"))
    for kind, pts in zip(kinds, stored, strict=True):
        order.add(memoryview(kind), pts)
    order.end()
    assert order.ascends is ascends


def test_nothing_is_said_of_other_codecs() -> None:
    order = ShownOrder(Syntax("h264"))
    for pts in (0, 3, 1, 2):
        order.add(memoryview(B), pts)
    assert order.ascends


def a_key_frame_shares_the_time_of_one_before(packets: list[Any]) -> None:
    position = keys(packets)[2]
    packets[position].pts = packets[position + 1].pts


def a_key_frame_comes_too_early(packets: list[Any]) -> None:
    position = keys(packets)[2]
    packets[position].pts = packets[position + 1].pts + 10


def a_key_frame_comes_too_late(packets: list[Any]) -> None:
    """Its time is that of the second picture behind it, and theirs are one earlier."""
    by_time = sorted(packets, key=lambda packet: packet.pts)
    position = by_time.index(packets[keys(packets)[2]])
    times = [packet.pts for packet in by_time[position : position + 3]]
    for packet, pts in zip(by_time[position : position + 3], [times[2], times[0], times[1]], strict=True):
        packet.pts = pts
    for packet in packets:
        packet.dts -= 3 * (times[1] - times[0])


def the_last_one_shares_its_time(packets: list[Any]) -> None:
    packets[-3].pts = packets[-2].pts


def a_hole_that_is_filled_later(packets: list[Any]) -> None:
    """Pictures 20 and 21 get the time of 19 and of 22: nothing is lost but the order."""
    by_time = sorted(packets, key=lambda packet: packet.pts)
    by_time[20].pts, by_time[21].pts = by_time[22].pts, by_time[19].pts


def keys(packets: list[Any]) -> list[int]:
    return [position for position, packet in enumerate(packets) if packet.is_keyframe]


CHANGES = (
    a_key_frame_shares_the_time_of_one_before,
    a_key_frame_comes_too_early,
    a_key_frame_comes_too_late,
    the_last_one_shares_its_time,
    a_hole_that_is_filled_later,
)


@pytest.mark.parametrize("suffix", ["mkv", "ts"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_picture_is_the_one_that_comes_then(change: Any, suffix: str, tmp_path: Path) -> None:
    shown = list(range(FRAMES + 1))
    whole = encode(tmp_path / "a.mkv", shown, "mpeg2video", clock=25, bf="2", sc_threshold="1000000000")

    def changed(packets: list[Any]) -> list[Any]:
        change(packets)
        return packets

    path = remux(whole, tmp_path / f"b.{suffix}", changed)
    assert decoded(path) == shown
    index = read_index(path)
    assert not index.times_hold and index.entries
    reader = PyAVDecoder(path, index)
    for wanted in (*([position] for position in range(len(shown))), list(range(len(shown)))):
        assert [number_of(picture) for picture in reader.read(wanted)] == [shown[position] for position in wanted]


def test_leading_pictures_end_with_the_next_one_that_is_none() -> None:
    """Stored: I, two B before it, a P of the same time as I, then B pictures of earlier times, which are shown."""
    frames = _Frames(Syntax("mpeg2video"))
    kinds = (INTRA, B, B, P, B, B, P)
    for kind, pts in zip(kinds, (30, 10, 20, 30, 15, 25, 60), strict=True):
        frames.add(packet_of(kind, pts))
    assert sorted(frames.pts) == [15, 25, 30, 30, 60]


def packet_of(data: bytes, pts: int) -> Any:
    packet = av.Packet(data)
    packet.pts = packet.dts = pts
    packet.is_keyframe = data == INTRA
    return packet


X265 = "log-level=none:pools=none:frame-threads=1:keyint=12:bframes=3:b-adapt=0"
RECORDED = {
    "h264": ("libx264", {"bf": "3", "x264-params": "b-adapt=0:keyint=12:scenecut=0"}),
    "h264-open": ("libx264", {"bf": "3", "x264-params": "b-adapt=0:keyint=12:scenecut=0:open-gop=1"}),
    "h264-refresh": ("libx264", {"bf": "0", "x264-params": "intra-refresh=1:keyint=12"}),
    "hevc": ("libx265", {"x265-params": f"{X265}:open-gop=0"}),
    "hevc-open": ("libx265", {"x265-params": f"{X265}:open-gop=1"}),
    "mpeg2": ("mpeg2video", {"bf": "2"}),
}


@pytest.mark.parametrize("way", RECORDED)
@pytest.mark.parametrize("first", [3, 14])
def test_frames_start_where_a_decoder_starts(way: str, first: int, tmp_path: Path) -> None:
    codec, options = RECORDED[way]
    made = encode(tmp_path / "a.ts", list(range(60)), codec, clock=25, **options)
    path = remux(made, tmp_path / "b.ts", lambda packets: packets[first:])
    come = whole_file(path)
    assert 0 < len(come) < 60 - first, "no picture at the start is lost"
    check(path, come)


def test_what_is_stored_first_may_lack_its_flag(tmp_path: Path) -> None:
    """A key frame that the container does not call one: decoders do not ask."""
    made = encode(tmp_path / "a.mkv", list(range(48)), "libx265", clock=25, **RECORDED["hevc"][1])

    def unflagged(packets: list[Any]) -> list[Any]:
        packets[0].is_keyframe = False
        return packets

    path = remux(made, tmp_path / "b.mkv", unflagged)
    come = whole_file(path)
    assert len(come) == 48
    check(path, come)
