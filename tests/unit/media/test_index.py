"""Which packets are frames and where decoding may start: examples by hand, and frames of a decode of the whole file."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest

from tests.support.clips import number_of
from tests.support.field_clips import Fields, parameter_sets, pictures, write_fields
from tests.support.odd_clips import decoded, encode, read_index, remux
from vlm_pg.media.boundary import DecodeFailure
from vlm_pg.media.coded_pictures import FieldPairs, ShownOrder
from vlm_pg.media.container import VideoHeader
from vlm_pg.media.decode_file import missing
from vlm_pg.media.index import EntryPoint, VideoIndex, _Frames
from vlm_pg.media.keyframes import Entry, Syntax, entry, is_shown, leaves_out, syntax_of
from vlm_pg.media.seeking import MOST_HELD, PyAVDecoder, keep_by_order, keep_by_time, runs

RECOVERY_NOW, RECOVERY_LATER = b"\x06\x06\x01\xc4\x80", b"\x06\x06\x01\x24\x80"  # ue(0): 1...; ue(3): 00100...


def lengths(*units: bytes) -> bytes:
    return b"".join(len(unit).to_bytes(4, "big") + unit for unit in units)


def codes(*units: bytes) -> bytes:
    return b"".join(b"\0\0\0\1" + unit for unit in units)


@pytest.mark.parametrize("write", [lengths, codes])
@pytest.mark.parametrize(
    ("codec", "units", "expected"),
    [
        ("h264", [b"\x67sps", b"\x68pps", b"\x65slice"], Entry.CLEAN),
        ("h264", [b"\x41slice"], Entry.NONE),
        ("h264", [RECOVERY_NOW, b"\x41slice"], Entry.OPEN),
        ("h264", [RECOVERY_LATER, b"\x41slice"], Entry.NONE),
        ("h264", [], Entry.NONE),
        ("hevc", [b"\x40\x01vps", b"\x26\x01idr"], Entry.CLEAN),
        ("hevc", [b"\x2a\x01cra"], Entry.OPEN),
        ("hevc", [b"\x02\x01trail"], Entry.NONE),
    ],
)
def test_units(write, codec: str, units: list[bytes], expected: Entry):
    syntax = Syntax(codec, 4 if write is lengths else 0)
    assert entry(write(*units), True, syntax) is expected
    assert entry(write(*units), False, syntax) is Entry.NONE, "what is not flagged is not looked into"


@pytest.mark.parametrize(
    ("codec", "packet", "expected"),
    [
        ("mpeg4", b"\0\0\1\xb6\x10", Entry.CLEAN),
        ("mpeg4", b"\0\0\1\xb6\x50", Entry.NONE),
        ("mpeg2video", b"\0\0\1\xb3seq\0\0\1\0\0\x08", Entry.CLEAN),
        ("mpeg2video", b"\0\0\1\0\0\x10", Entry.NONE),
        ("vp8", b"\x10", Entry.CLEAN),
        ("vp8", b"\x11", Entry.NONE),
        ("vp9", b"\x82", Entry.CLEAN),
        ("vp9", b"\x86", Entry.NONE),
        ("vp9", b"\xb1", Entry.CLEAN),  # profile 3: a reserved bit comes before
        ("mjpeg", b"x", Entry.CLEAN),
    ],
)
def test_other_codecs(codec: str, packet: bytes, expected: Entry):
    assert entry(packet, True, Syntax(codec)) is expected


GROUP_OPEN, GROUP_CLOSED = b"\0\0\1\xb8\0\x08\0\0\0\0\1\0", b"\0\0\1\xb8\0\x08\0\x40\0\0\1\0"


@pytest.mark.parametrize(
    ("codec", "first", "kind", "leading", "expected"),
    [
        ("hevc", b"", Entry.OPEN, codes(b"\x02\x01", b"\x10\x01rasl"), False),  # the first slice decides
        ("hevc", b"", Entry.OPEN, codes(b"\x10\x01rasl"), True),
        ("hevc", b"", Entry.CLEAN, codes(b"\x0c\x01radl"), False),
        ("h264", b"", Entry.OPEN, b"", True),
        ("h264", b"", Entry.CLEAN, b"", False),
        ("mpeg2video", GROUP_OPEN, Entry.CLEAN, b"", True),
        ("mpeg2video", GROUP_CLOSED, Entry.CLEAN, b"", False),
        ("mpeg1video", b"\0\0\1\0", Entry.CLEAN, b"", True),
        ("mpeg4", b"", Entry.CLEAN, b"", True),
        ("vc1", b"", Entry.CLEAN, b"", False),
    ],
)
def test_pictures_that_a_decoder_leaves_out(codec: str, first: bytes, kind: Entry, leading: bytes, expected: bool):
    assert leaves_out(first, kind, leading, Syntax(codec)) is expected


def test_hidden_pictures_of_vp8():
    assert (
        is_shown(b"\x10", Syntax("vp8")) and not is_shown(b"\x01", Syntax("vp8")) and is_shown(b"\x01", Syntax("vp9"))
    )


def test_configuration_records():
    assert syntax_of("h264", b"\x01\x64\x00\x1f\xff") == Syntax("h264", 4)
    assert syntax_of("h264", b"\0\0\0\1\x67") == Syntax("h264", 0)
    assert syntax_of("hevc", b"\x01" + bytes(20) + b"\x01\x00") == Syntax("hevc", 2)
    assert syntax_of("vp9", None) == Syntax("vp9")


def header(whole: float, video: float) -> VideoHeader:
    return VideoHeader(64, 64, whole, video, 25.0)


def index(
    video: tuple[float, float], whole: tuple[float, float], pts: tuple[int, ...] = (0,), entries: tuple[int, ...] = ()
) -> VideoIndex:
    points = tuple(EntryPoint(pts, pts) for pts in entries)
    return VideoIndex(pts, points, Fraction(1, 25), True, video, whole, True, True, True)


@pytest.mark.parametrize(
    ("stated", "video", "whole", "expected"),
    [
        ((10.4, 0.0), (0.0, 2.8), (0.0, 2.8), (10.4, 2.8)),  # a Matroska file that was cut
        ((10.0, 4.0), (0.0, 4.0), (0.0, 10.0), (4.0, 4.0)),  # sound goes on after the picture: whole
        ((10.0, 10.0), (0.0, 5.0), (0.0, 10.0), (10.0, 5.0)),  # half of the picture is missing
        ((1010.0, 0.0), (1000.0, 1003.0), (1000.0, 1003.0), (10.0, 3.0)),  # times that begin late, an end stated
        ((10.0, 10.0), (1000.0, 1010.0), (1000.0, 1010.0), (10.0, 10.0)),  # times that begin late, a length stated
        ((0.0, 0.0), (0.0, 3.0), (0.0, 3.0), (0.0, 0.0)),  # nothing stated
    ],
)
def test_what_is_missing(stated, video, whole, expected):
    assert missing(header(*stated), index(video, whole)) == pytest.approx(expected)


def test_wanted_frames_are_read_from_the_entry_point_before_them():
    found = runs(index((0, 0), (0, 0), pts=(5, 10, 49, 50, 90), entries=(10, 50)), [0, 1, 2, 3, 4])
    assert [(run.entry.pts if run.entry else None, run.wanted) for run in found] == [
        (None, (0,)), (10, (1, 2)), (50, (3, 4)),
    ]  # fmt: skip


class Packet(bytes):
    """A coded picture as PyAV hands it on."""

    is_discard = False
    duration = None

    def __new__(cls, pts: int, dts: int, is_keyframe: bool) -> Packet:
        packet = super().__new__(cls, b"coded")
        packet.pts, packet.dts, packet.is_keyframe = pts, dts, is_keyframe
        return packet


@pytest.mark.parametrize(("flags", "is_refused"), [([True] * 6, False), ([True, False, False] * 2, True)])
def test_a_clock_goes_back_at_key_frames_alone(flags: list[bool], is_refused: bool) -> None:
    """Where all frames of a codec that is not looked into are flagged (no sync table), flags say nothing."""
    frames = _Frames(Syntax("vc1"))
    for dts, (pts, is_keyframe) in enumerate(zip([0, 3, 1, 2, 6, 4], flags, strict=True)):
        frames.add(Packet(pts, dts, is_keyframe))
    reach = (0.0, 1.0)
    if is_refused:
        with pytest.raises(DecodeFailure, match=r"clock goes back from 0\.120 s to 0\.080 s"):
            frames.index(Fraction(1, 25), reach, reach)
    else:
        assert frames.index(Fraction(1, 25), reach, reach).pts == (0, 1, 2, 3, 4, 6)


def named(keep_by: Callable, come: list[int], pts: list[int], wanted: list[int], start: int = 0) -> tuple:
    """Whether all wanted are there; of each kept position the number of its frame; how many were decoded."""
    frames = [SimpleNamespace(pts=time, time=float(time), nth=nth) for nth, time in enumerate(come)]
    kept: dict[int, int] = {}
    left = iter(frames)
    is_there = keep_by(left, pts, start, wanted, lambda position, frame: kept.update({position: frame.nth}))
    return is_there, kept, len(come) - len(list(left))


TEN = list(range(10))


@pytest.mark.parametrize(
    ("come", "pts", "wanted", "expected"),
    [
        (TEN, TEN, [0, 4], (True, {0: 0, 4: 4}, 5)),  # nothing is decoded behind the last one
        ([0, 1, 3, 4], [0, 1, 2, 3, 4], [1, 2], (False, {1: 1}, 3)),  # 2 is left out, and 3 is not put in its place
        ([0, 1, 3, *range(4, 90)], list(range(90)), [3], (True, {3: 2}, 4 + MOST_HELD - 1)),  # 2 is left out
        ([0, 1], TEN, [1, 2], (False, {1: 1}, 2)),
        ([0, 7, 7, 9], [0, 7, 7, 9], [3], (True, {3: 3}, 4)),  # equal times on the way
    ],
)
def test_by_time(come: list[int], pts: list[int], wanted: list[int], expected: tuple) -> None:
    assert named(keep_by_time, come, pts, wanted) == expected


@pytest.mark.parametrize(
    ("come", "wanted"),
    [
        ([0, 3, 2, 4, 1], [4]),  # seen on the way
        ([0, 3, 2, 4, 1], [3]),  # seen behind: 1 and 2 had not come
        ([0, 2, 3, 1, 4], [2]),
        ([0, 2, 0, 4], [2]),  # two of one time, of which one had not come
    ],
)
def test_times_that_are_not_those_of_presentation(come: list[int], wanted: list[int]) -> None:
    with pytest.raises(DecodeFailure, match="in another order than their times"):
        named(keep_by_time, come, sorted(come), wanted)


@pytest.mark.parametrize(
    ("come", "pts", "first", "wanted", "expected"),
    [
        # 0 P1 B2 b3 b4 | P5 b6 b7: stored in the order of their times
        ([0, 3, 2, 4, 1, 6, 7, 5], list(range(8)), 0, [1], (True, {1: 1}, 5)),
        ([0, 3, 2, 4, 1, 6, 7, 5], list(range(8)), 0, [4, 5], (True, {4: 4, 5: 5}, 8)),
        ([0, 40, 80, 80, 120], [0, 40, 80, 80, 120], 0, [2, 3], (True, {2: 2, 3: 3}, 5)),  # two of one time
        ([0, 40, 80, 80], [0, 40, 80, 80], 0, [3], (True, {3: 3}, 4)),
        ([5, 6, 7], list(range(8)), 5, [5], (True, {5: 0}, 2)),  # from position 5 on
        # two pictures stored behind the first one and shown before it are left out: positions are off by two
        ([5, 8, 9, 10, 11], list(range(20)), 5, [5], (False, {5: 0}, 5)),
        ([0, 40, 80, 120], [0, 40, 80, 80, 120], 0, [2], (False, {2: 2}, 4)),  # one of two: which?
        ([0, *range(2, 90)], list(range(90)), 0, [1], (False, {1: 1}, MOST_HELD + 3)),  # it is not sought for ever
        ([0, 1, 2], [0, 1], 0, [1], (True, {1: 1}, 2)),
        ([0, 5, 6], [0, 1], 0, [1], (False, {1: 1}, 3)),
    ],
)
def test_by_order(come: list[int], pts: list[int], first: int, wanted: list[int], expected: tuple) -> None:
    assert named(keep_by_order, come, pts, wanted, first) == expected


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
