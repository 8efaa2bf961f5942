"""MPEG-2 whose timestamps are not those of its pictures: they are named in the order in which they come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import pytest

from tests.support.clips import number_of
from tests.support.odd_clips import decoded, encode, remux
from vlm_pg.media.coded_pictures import ShownOrder
from vlm_pg.media.index import _Frames, read_index
from vlm_pg.media.keyframes import Syntax
from vlm_pg.media.video_decoders import PyAVDecoder

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
    place = keys(packets)[2]
    packets[place].pts = packets[place + 1].pts


def a_key_frame_comes_too_early(packets: list[Any]) -> None:
    place = keys(packets)[2]
    packets[place].pts = packets[place + 1].pts + 10


def a_key_frame_comes_too_late(packets: list[Any]) -> None:
    """Its time is that of the second picture behind it, and theirs are one earlier."""
    by_time = sorted(packets, key=lambda packet: packet.pts)
    place = by_time.index(packets[keys(packets)[2]])
    times = [packet.pts for packet in by_time[place : place + 3]]
    for packet, pts in zip(by_time[place : place + 3], [times[2], times[0], times[1]], strict=True):
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
    return [place for place, packet in enumerate(packets) if packet.is_keyframe]


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
    for wanted in (*([place] for place in range(len(shown))), list(range(len(shown)))):
        assert [number_of(picture) for picture in reader.read(wanted)] == [shown[place] for place in wanted]


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
