"""MP4 files whose units of time are damaged are refused; odd ones that state less are read at the right times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.clip_table import QUICK
from tests.support.clips import RATE, Clip, write
from vlm_pg.errors import SampleError
from vlm_pg.media.decode_file import decode_file
from vlm_pg.media.settings import MediaSettings

FRAMES = 100
Change = Callable[[bytes], bytes]


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Four seconds with the edit list that FFmpeg writes, without one, and in fragments."""
    muxers = {
        "edited": {"use_editlist": "1"},
        "plain": {"use_editlist": "0"},
        "fragments": {"movflags": "frag_keyframe+empty_moov+default_base_moof"},
    }
    folder = tmp_path_factory.mktemp("clips")
    return {
        name: write(Clip("libx264", "mp4", name, QUICK["libx264"], muxer=muxer), folder, frames=FRAMES).read_bytes()
        for name, muxer in muxers.items()
    }


def renamed(box: bytes) -> Change:
    return lambda data: data.replace(box, b"free", 1)


def scaled(box: bytes, place: int, factor: float) -> Change:
    """The number of four bytes at ``place`` of a box's contents, times ``factor``."""

    def change(data: bytes) -> bytes:
        start = data.index(box) + 4 + place
        number = round(int.from_bytes(data[start : start + 4], "big") * factor)
        return data[:start] + number.to_bytes(4, "big") + data[start + 4 :]

    return change


def filled(box: bytes, place: int, byte: bytes) -> Change:
    def change(data: bytes) -> bytes:
        start = data.index(box) + 4 + place
        return data[:start] + 4 * byte + data[start + 4 :]

    return change


SCALE, LENGTH, TRACK_LENGTH, SEGMENT = 12, 16, 20, 8
UNKNOWN = "is missing or damaged, so the units of its times are not known"
DAMAGED: dict[str, tuple[Change, str]] = {
    "no mdhd": (renamed(b"mdhd"), f"its media header (mdhd) {UNKNOWN}"),
    "no units": (filled(b"mdhd", SCALE, b"\0"), f"its media header (mdhd) {UNKNOWN}"),
    "negative units": (filled(b"mdhd", SCALE, b"\xf0"), f"its media header (mdhd) {UNKNOWN}"),
    "no mvhd": (renamed(b"mvhd"), f"its movie header (mvhd) {UNKNOWN}"),
    "no units of the movie": (filled(b"mvhd", SCALE, b"\0"), f"its movie header (mvhd) {UNKNOWN}"),
}
CONTRADICTORY: dict[str, tuple[Change, str]] = {
    "units too small": (scaled(b"mdhd", SCALE, 100), "so its times cannot be trusted"),
    "another length": (scaled(b"mdhd", LENGTH, 2), "the durations of its frames (stts) add up to 4.0 s"),
    "other durations": (scaled(b"stts", 12, 2), "the durations of its frames (stts) add up to 8.0 s"),
}
TOO_LARGE = {"units too large": (scaled(b"mdhd", SCALE, 1 / 12.8), "states 51.2 s, its track and movie headers 4.0")}
CASES = [
    *((name, "edited") for name in DAMAGED | CONTRADICTORY),
    *((name, "plain") for name in DAMAGED | CONTRADICTORY | TOO_LARGE),
    *((name, "fragments") for name in DAMAGED),
]


@pytest.mark.parametrize("damage, clip", CASES)
def test_damaged_units_of_time_are_refused(damage: str, clip: str, clips: dict[str, bytes], tmp_path: Path) -> None:
    change, named = (DAMAGED | CONTRADICTORY | TOO_LARGE)[damage]
    path = tmp_path / "clip.mp4"
    path.write_bytes(change(clips[clip]))
    with pytest.raises(SampleError, match="cannot be decoded") as refusal:
        decode_file("video", str(path), MediaSettings(), 28)
    assert refusal.value.reason == "corrupt_media" and named in str(refusal.value)


ODD: dict[str, Change] = {
    "as it is": lambda data: data,
    "no length of the track": filled(b"tkhd", TRACK_LENGTH, b"\0"),
    "an unknown length of the track": filled(b"tkhd", TRACK_LENGTH, b"\xff"),
    "the track's length in other units": scaled(b"tkhd", TRACK_LENGTH, 12.8),
    "no length of the media": filled(b"mdhd", LENGTH, b"\0"),
    "an unknown length of the media": filled(b"mdhd", LENGTH, b"\xff"),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("clip", ["edited", "plain", "fragments"])
def test_lengths_that_are_not_stated_are_no_damage(
    odd: str, clip: str, clips: dict[str, bytes], tmp_path: Path
) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(ODD[odd](clips[clip]))
    found = decode_file("video", str(path), MediaSettings(), 28).frame_seconds
    assert found[0] == 0 and found[-1] == pytest.approx((FRAMES - 1) / RATE)
