"""Where decoding may start and what of a file is missing, on examples that can be checked by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest

from vlm_pg.media.boundary import DecodeFailure
from vlm_pg.media.container import VideoHeader
from vlm_pg.media.decode_file import missing
from vlm_pg.media.index import EntryPoint, VideoIndex, _Frames
from vlm_pg.media.keyframes import Entry, Syntax, entry, is_shown, leaves_out, syntax_of
from vlm_pg.media.seeking import runs

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
