"""Matroska files with a damaged unit of time are refused where they carry a checksum, else read as stated."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.clip_table import QUICK, X264_B
from tests.support.clips import FRAMES, RATE, Clip, write
from vlm_pg.errors import SampleError
from vlm_pg.media.decode_file import decode_file
from vlm_pg.media.settings import MediaSettings

TIMESTAMP_SCALE, DURATION = b"\x2a\xd7\xb1", b"\x44\x89"


def flipped(data: bytes, element: bytes, place: int, bit: int) -> bytes:
    """``bit`` of the byte ``place`` bytes behind the first such id."""
    at = data.index(element) + len(element) + place
    return data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]


@pytest.fixture(scope="module")
def matroska(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(Clip("libx264", "matroska", "sums", X264_B), tmp_path_factory.mktemp("clips")).read_bytes()


@pytest.mark.parametrize("place", [1, 2, 3])
@pytest.mark.parametrize("bit", [0x01, 0x80])
def test_a_damaged_unit_of_time_is_refused(place: int, bit: int, matroska: bytes, tmp_path: Path) -> None:
    path = tmp_path / "clip.mkv"
    path.write_bytes(flipped(matroska, TIMESTAMP_SCALE, place, bit))
    with pytest.raises(SampleError, match="cannot be decoded") as refusal:
        decode_file("video", str(path), MediaSettings(), 28)
    assert refusal.value.reason == "corrupt_media"
    assert "its unit of time (TimestampScale) is unusual and the checksum over it (Info) is wrong" in str(refusal.value)


def test_undamaged_ones_are_read_with_and_without_checksums(matroska: bytes, tmp_path: Path) -> None:
    """A wrong checksum alone says nothing of times: here it is of the stated length, by a tick."""
    path, other = tmp_path / "clip.mkv", tmp_path / "other.mkv"
    path.write_bytes(matroska)
    other.write_bytes(flipped(matroska, DURATION, 4, 0x01))
    webm = write(Clip("libvpx", "webm", "sums", QUICK["libvpx"]), tmp_path)
    assert b"\xbf\x84" in matroska[:400] and b"\xbf\x84" not in webm.read_bytes()[:400]
    for found in (path, other, webm):
        seconds = decode_file("video", str(found), MediaSettings(), 28).frame_seconds
        assert seconds[0] == 0 and seconds[-1] == pytest.approx((FRAMES - 1) / RATE, abs=0.002)


def test_without_a_checksum_another_unit_is_another_speed(tmp_path: Path) -> None:
    """Nothing in the file contradicts it: the stated length is in that unit, too."""
    webm = write(Clip("libvpx", "webm", "speed", QUICK["libvpx"]), tmp_path)
    webm.write_bytes(flipped(webm.read_bytes(), TIMESTAMP_SCALE, 1, 0x10))  # 2,048,576 ns for 1,000,000
    seconds = decode_file("video", str(webm), MediaSettings(), 28).frame_seconds
    assert seconds[-1] == pytest.approx(2.048576 * (FRAMES - 1) / RATE, abs=0.003)
