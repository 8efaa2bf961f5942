"""Times that MP4 and Matroska files state: contradictions are refused, what nothing contradicts is decoded."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.clip_table import QUICK, X264_B
from tests.support.clips import FRAMES as CLIP_FRAMES
from tests.support.clips import RATE, Clip, write
from tests.support.refusals import refused
from vlm_pg.errors import SampleError
from vlm_pg.media.decode_file import decode_file
from vlm_pg.media.settings import MediaSettings

FRAMES = 100
Change = Callable[[bytes], bytes]


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Four seconds with the edit list that FFmpeg writes, without one, in fragments, and (variable) eight seconds."""
    edited, fragments = {"use_editlist": "1"}, {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
    made = {
        "edited": Clip("libx264", "mp4", "edited", QUICK["libx264"], muxer=edited),
        "reordered": Clip("libx264", "mp4", "reordered", X264_B, muxer=edited),
        "late": Clip("libx264", "mp4", "late", X264_B, muxer=edited, start=3 * RATE),
        "plain": Clip("libx264", "mp4", "plain", QUICK["libx264"], muxer={"use_editlist": "0"}),
        "fragments": Clip("libx264", "mp4", "fragments", QUICK["libx264"], muxer=fragments),
        "variable": Clip("libx264", "mp4", "variable", QUICK["libx264"], muxer=fragments, variable=True),
    }
    folder = tmp_path_factory.mktemp("clips")
    return {name: write(clip, folder, frames=FRAMES).read_bytes() for name, clip in made.items()}


def renamed(box: bytes) -> Change:
    return lambda data: data.replace(box, b"free", 1)


def changed(box: bytes, offset: int, number: int | Callable[[int], int], nth: int = 1) -> Change:
    """The number of four bytes at ``offset`` of the contents of the ``nth`` such box."""

    def change(data: bytes) -> bytes:
        start = -1
        for _ in range(nth):
            start = data.index(box, start + 1)
        start += 4 + offset
        new = number if isinstance(number, int) else number(int.from_bytes(data[start : start + 4], "big"))
        return data[:start] + new.to_bytes(4, "big") + data[start + 4 :]

    return change


def scaled(box: bytes, offset: int, factor: float) -> Change:
    return changed(box, offset, lambda number: round(number * factor))


def shown_last_too_late(data: bytes) -> bytes:
    """The frame that is shown last gets another offset (ctts): two seconds more."""
    start = data.index(b"ctts") + 12
    count = int.from_bytes(data[start - 4 : start], "big")
    runs = list(struct.iter_unpack(">II", data[start : start + 8 * count]))
    decoded = [512 * sum(frames for frames, _ in runs[: number + 1]) for number in range(len(runs))]
    shown = [time + offset for time, (_, offset) in zip(decoded, runs, strict=True)]
    return changed(b"ctts", 12 + 8 * shown.index(max(shown)), max(runs[shown.index(max(shown))]) + 25600)(data)


def by_trex(duration: int) -> Change:
    """How long frames of fragments take is stated once, for all (trex), and by no fragment (tfhd)."""

    def change(data: bytes) -> bytes:
        # in place of the duration a description (the first one) is named, which takes as many bytes
        data = data.replace(b"tfhd" + bytes.fromhex("00020038"), b"tfhd" + bytes.fromhex("00020032"))
        for nth in range(1, data.count(b"tfhd") + 1):
            data = changed(b"tfhd", 8, 1, nth)(data)
        return changed(b"trex", 12, duration)(data)

    return change


SCALE, LENGTH, TRACK_LENGTH, SEGMENT, MEDIA_TIME = 12, 16, 20, 8, 12
TICKS = 512  # a frame
UNKNOWN = "is missing or damaged, so the units of its times are not known"
DAMAGED: dict[str, tuple[Change, str]] = {
    "no mdhd": (renamed(b"mdhd"), f"its media header (mdhd) {UNKNOWN}"),
    "no units": (changed(b"mdhd", SCALE, 0), f"its media header (mdhd) {UNKNOWN}"),
    "negative units": (changed(b"mdhd", SCALE, 0xF0F0F0F0), f"its media header (mdhd) {UNKNOWN}"),
    "no mvhd": (renamed(b"mvhd"), f"its movie header (mvhd) {UNKNOWN}"),
    "no units of the movie": (changed(b"mvhd", SCALE, 0), f"its movie header (mvhd) {UNKNOWN}"),
}
CONTRADICTORY: dict[str, tuple[Change, str]] = {
    "units too small": (scaled(b"mdhd", SCALE, 100), "so its times cannot be trusted"),
    "units a little too small": (scaled(b"mdhd", SCALE, 1.05), "its track and movie headers state 4.00 and 4.00 s"),
    "another length": (scaled(b"mdhd", LENGTH, 2), "the durations of its frames (stts) add up to 4.00 s"),
    "a little longer": (scaled(b"mdhd", LENGTH, 1.05), "the durations of its frames (stts) add up to 4.00 s"),
    "other durations": (scaled(b"stts", 12, 2), "the durations of its frames (stts) add up to 8.00 s"),
    "durations a little longer": (scaled(b"stts", 12, 1.05), "the durations of its frames (stts) add up to 4.20 s"),
}
TOO_LARGE = {
    "units too large": (
        scaled(b"mdhd", SCALE, 1 / 12.8),
        "states 51.20 s, its track and movie headers state 4.00 and 4.00 s",
    ),
    "units a little too large": (scaled(b"mdhd", SCALE, 1 / 1.05), "states 4.20 s, its track and movie headers"),
}
EDITED = {
    "segment too short": (scaled(b"elst", SEGMENT, 0.9), "its edit list (elst) shows 3.60 s, its track and movie"),
    "segment too late": (
        changed(b"elst", MEDIA_TIME, 6 * TICKS),
        "s, its track and movie headers state 4.00 and 4.00 s",
    ),
}
REORDERED = {"shown too late": (shown_last_too_late, "with their offsets (ctts) its frames take 6.00 s")}
OVERLAP = "(trun, tfhd, trex) the one before it has a frame at"
FRAGMENTS = {
    "durations of a fragment": (scaled(b"tfhd", 8, 1.125), "begins at 0.480 s (tfdt), and by its durations " + OVERLAP),
    "durations of a later fragment": (changed(b"tfhd", 8, 2 * TICKS, 3), f"its durations {OVERLAP} 1.200 s"),
    "durations of all fragments": (
        by_trex(2 * TICKS),
        f"begins at 0.480 s (tfdt), and by its durations {OVERLAP} 0.88",
    ),
    "fragment too early": (
        changed(b"tfdt", 8, 20 * TICKS, 4),
        f"begins at 0.800 s (tfdt), and by its durations {OVERLAP}",
    ),
}
VARIABLE = {"durations of a frame": (changed(b"trun", 24, 40 * TICKS), OVERLAP)}
CASES = [
    *((name, "edited") for name in EDITED),
    *((name, "reordered") for name in CONTRADICTORY | EDITED | REORDERED),
    *((name, "fragments") for name in FRAGMENTS),
    *((name, "variable") for name in VARIABLE),
    *((name, "edited") for name in DAMAGED | CONTRADICTORY),
    *((name, "plain") for name in DAMAGED | CONTRADICTORY | TOO_LARGE),
    *((name, "fragments") for name in DAMAGED),
]


@pytest.mark.parametrize("damage, clip", CASES)
def test_damaged_units_of_time_are_refused(damage: str, clip: str, clips: dict[str, bytes], tmp_path: Path) -> None:
    change, named = (DAMAGED | CONTRADICTORY | TOO_LARGE | EDITED | REORDERED | FRAGMENTS | VARIABLE)[damage]
    path = tmp_path / "clip.mp4"
    path.write_bytes(change(clips[clip]))
    with pytest.raises(SampleError, match="cannot be decoded") as refusal:
        decode_file("video", str(path), MediaSettings(), 28)
    assert refusal.value.reason == "corrupt_media" and named in str(refusal.value)


ODD: dict[str, Change] = {
    "as it is": lambda data: data,
    "no length of the track": changed(b"tkhd", TRACK_LENGTH, 0),
    "an unknown length of the track": changed(b"tkhd", TRACK_LENGTH, 0xFFFFFFFF),
    "the track's length in other units": scaled(b"tkhd", TRACK_LENGTH, 12.8),
    "no length of the media": changed(b"mdhd", LENGTH, 0),
    "an unknown length of the media": changed(b"mdhd", LENGTH, 0xFFFFFFFF),
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


def without_second_fragment(data: bytes) -> bytes:
    start = data.index(b"moof", data.index(b"moof") + 4) - 4
    return data[:start] + data[data.index(b"moof", start + 8) - 4 :]


SOUND: dict[str, tuple[str, Change, float]] = {
    "all": ("fragments", by_trex(TICKS), 3.96),
    "a lost fragment leaves a gap": ("fragments", without_second_fragment, 3.96),
    "late": ("late", lambda data: data, 3.96),
    "late, as Android's muxer, in the media's length too": ("late", scaled(b"mdhd", LENGTH, 7 / 4), 3.96),
    "reordered": ("reordered", lambda data: data, 3.96),
}


@pytest.mark.parametrize("case", SOUND)
def test_what_agrees_is_read(case: str, clips: dict[str, bytes], tmp_path: Path) -> None:
    clip, change, last = SOUND[case]
    path = tmp_path / "clip.mp4"
    path.write_bytes(change(clips[clip]))
    found = decode_file("video", str(path), MediaSettings(), 28).frame_seconds
    assert found[0] == 0 and found[-1] == pytest.approx(last)


TIMESTAMP_SCALE, DURATION = b"\x2a\xd7\xb1", b"\x44\x89"


def flipped(data: bytes, element: bytes, offset: int, bit: int) -> bytes:
    """``bit`` of the byte ``offset`` bytes behind the first such id."""
    at = data.index(element) + len(element) + offset
    return data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]


@pytest.fixture(scope="module")
def matroska(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(Clip("libx264", "matroska", "sums", X264_B), tmp_path_factory.mktemp("clips")).read_bytes()


@pytest.mark.parametrize("offset", [1, 2, 3])
@pytest.mark.parametrize("bit", [0x01, 0x80])
def test_a_damaged_unit_of_time_is_refused(offset: int, bit: int, matroska: bytes, tmp_path: Path) -> None:
    path = tmp_path / "clip.mkv"
    path.write_bytes(flipped(matroska, TIMESTAMP_SCALE, offset, bit))
    words = r"its unit of time \(TimestampScale\) is unusual and the checksum over it \(Info\) is wrong"
    with refused("corrupt_media", words):
        decode_file("video", str(path), MediaSettings(), 28)


def test_undamaged_ones_are_read_with_and_without_checksums(matroska: bytes, tmp_path: Path) -> None:
    """A wrong checksum alone says nothing of times: here it is of the stated length, by a tick."""
    path, other = tmp_path / "clip.mkv", tmp_path / "other.mkv"
    path.write_bytes(matroska)
    other.write_bytes(flipped(matroska, DURATION, 4, 0x01))
    webm = write(Clip("libvpx", "webm", "sums", QUICK["libvpx"]), tmp_path)
    assert b"\xbf\x84" in matroska[:400] and b"\xbf\x84" not in webm.read_bytes()[:400]
    for found in (path, other, webm):
        seconds = decode_file("video", str(found), MediaSettings(), 28).frame_seconds
        assert seconds[0] == 0 and seconds[-1] == pytest.approx((CLIP_FRAMES - 1) / RATE, abs=0.002)


def test_without_a_checksum_another_unit_is_another_speed(tmp_path: Path) -> None:
    """Nothing in the file contradicts it: the stated length is in that unit, too."""
    webm = write(Clip("libvpx", "webm", "speed", QUICK["libvpx"]), tmp_path)
    webm.write_bytes(flipped(webm.read_bytes(), TIMESTAMP_SCALE, 1, 0x10))  # 2,048,576 ns for 1,000,000
    seconds = decode_file("video", str(webm), MediaSettings(), 28).frame_seconds
    assert seconds[-1] == pytest.approx(2.048576 * (CLIP_FRAMES - 1) / RATE, abs=0.003)
