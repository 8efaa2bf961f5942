"""Where decoding may start and what of a file is missing, on examples that can be checked by hand."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace

import pytest

from vlm_pg.media.boundary import DecodeFailure
from vlm_pg.media.container import VideoHeader
from vlm_pg.media.decode_file import missing
from vlm_pg.media.index import EntryPoint, VideoIndex, _Frames
from vlm_pg.media.keyframes import Entry, Syntax, entry, is_shown, leaves_out, syntax_of
from vlm_pg.media.seeking import MOST_HELD, keep_by_order, keep_by_time, runs

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
    return VideoHeader(64, 64, whole, video, 25.0, "h264")


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
