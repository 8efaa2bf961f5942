"""AVI, whose packets have no times of their own: frames are those of a decode from the start, or are refused.

The oracle is FFmpeg decoding the whole file in sequence. That the clips are what they are meant to be shows by the
numbers in their pictures.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.support.avi_clips import decoded, encoded, kind_of, marked_packed, not_coded, numbers, packed, write_avi
from tests.support.clips import number_of
from tests.support.odd_clips import read_index, remux
from vlm_pg.errors import SampleError
from vlm_pg.media.boundary import DecodeFailure
from vlm_pg.media.coded_pictures import Mpeg4Pictures
from vlm_pg.media.keyframes import Syntax
from vlm_pg.media.loader import MediaLoader
from vlm_pg.media.seeking import PyAVDecoder
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import DecodedMedia, MediaRef

FRAMES = 26


@cache
def vops(b_frames: int, frames: int = FRAMES) -> tuple[bytes, ...]:
    return tuple(encoded("mpeg4", frames, bf=str(b_frames)))


def with_b_frame_first(b_frames: int) -> list[bytes]:
    """Intra pictures with a B-frame in their own packet, in the middle of the file."""
    chunks = packed(vops(b_frames))
    assert any(index and kind_of(chunk) == 0 and chunk.count(b"\0\0\1\xb6") == 2 for index, chunk in enumerate(chunks))
    return chunks


# chunks, name of the codec, and the times of the frames in 1/25 s since the first one
STEADY = list(range(FRAMES))
CLIPS = {
    "no B-frames": (lambda: list(vops(0)), b"XVID", STEADY),
    "B-frames": (lambda: list(vops(2)), b"XVID", STEADY),
    "packed": (lambda: with_b_frame_first(1), b"DX50", STEADY),
    "packed by two": (lambda: with_b_frame_first(2), b"DIVX", STEADY),
    "packed by three": (lambda: packed(vops(3)), b"XVID", STEADY),
    "marked as packed": (lambda: marked_packed(vops(0)), b"DIVX", STEADY),
    # the picture before stays: 4 for three ticks
    "empty chunks": (lambda: [*vops(0)[:5], b"", b"", *vops(0)[5:]], b"XVID", [*range(5), *range(7, 28)]),
    "not coded": (
        lambda: [*vops(0)[:5], *[not_coded(vops(0)[4])] * 2, *vops(0)[5:]],
        b"XVID",
        [*range(5), *range(7, 28)],
    ),
    # of 16 frames and B-frames: chunk 7 is P9 stored behind 6, 7 and 8
    "not coded amid B-frames": (
        lambda: [*vops(2)[:7], not_coded(vops(2)[4]), *vops(2)[7:]],
        b"XVID",
        [*range(7), *range(8, 27)],
    ),
    "Motion JPEG": (lambda: encoded("mjpeg", FRAMES, b="4M"), b"MJPG", STEADY),
    "H.264 with B-frames": (lambda: encoded("libx264", FRAMES, bf="2", preset="veryfast"), b"H264", STEADY),
}


def check_reads(path: Path, wanted: Sequence[Sequence[int]]) -> None:
    whole, index = [pixels for _, pixels in decoded(path)], read_index(path)
    assert len(index.pts) == len(whole)
    for chosen in wanted:
        got = PyAVDecoder(path, index).read(chosen)
        assert all(np.array_equal(one, whole[number]) for one, number in zip(got, chosen, strict=True)), chosen


@pytest.mark.parametrize("name", CLIPS)
def test_frames_are_those_of_a_decode_from_the_start(name: str, tmp_path: Path) -> None:
    chunks, fourcc, times = CLIPS[name][0](), CLIPS[name][1], CLIPS[name][2]
    path = write_avi(tmp_path / "a.avi", chunks, fourcc)
    assert numbers(path) == list(range(FRAMES))
    index = read_index(path)
    assert [round((second - index.pts_seconds[0]) * 25, 6) for second in index.pts_seconds] == times
    check_reads(path, [*([index] for index in range(FRAMES)), range(FRAMES), (0, 11, 12, 25), (9, 10, 13)])
    settings = MediaSettings(workers=0, fps=1000, max_frames=64)
    with MediaLoader(settings, tmp_path) as loader:
        (media,) = loader.load([MediaRef("video", "a.avi")])
    assert isinstance(media, DecodedMedia)
    assert [number_of(frame.transpose(1, 2, 0)) for frame in media.frames] == list(range(FRAMES))
    assert media.frame_seconds == pytest.approx([time / 25 for time in times])


@pytest.mark.matrix
@pytest.mark.parametrize("suffix", ["mkv", "mp4", "mov", "ts"])
@pytest.mark.parametrize("name", ["packed", "packed by two", "not coded", "not coded amid B-frames", "empty chunks"])
def test_copied_into_another_container_they_are_the_same(name: str, suffix: str, tmp_path: Path) -> None:
    source = write_avi(tmp_path / "a.avi", CLIPS[name][0](), CLIPS[name][1])
    path = remux(source, tmp_path / f"b.{suffix}", lambda packets: packets)
    assert numbers(path) == list(range(FRAMES))
    check_reads(path, [[index] for index in range(FRAMES)])


def test_a_moment_shows_the_picture_that_stays(tmp_path: Path) -> None:
    chunks, fourcc, _ = CLIPS["not coded"]
    write_avi(tmp_path / "a.avi", chunks(), fourcc)
    with MediaLoader(MediaSettings(workers=0), tmp_path) as loader:
        (media,) = loader.load([MediaRef("video", "a.avi", times=(0.16, 0.24, 0.27, 0.28))])
    assert isinstance(media, DecodedMedia)
    assert [number_of(frame.transpose(1, 2, 0)) for frame in media.frames] == [4, 4, 4, 5]


def test_a_packed_picture_without_a_place_behind_it_is_shown_by_nobody(tmp_path: Path) -> None:
    """FFmpeg's decoder leaves it out at the end of the file: of 25 frames the last but one."""
    path = write_avi(tmp_path / "a.avi", packed(vops(2, 25))[:-1], b"DIVX")
    assert numbers(path) == [*range(23), 24]
    check_reads(path, [[index] for index in range(24)])


def test_packed_and_not_said_so_is_right_or_refused(tmp_path: Path) -> None:
    """Then a decoder takes the first picture of a packet alone."""
    plain = [chunk.replace(b"DivX503b1393p", b"Lavc000000000") for chunk in packed(vops(1))]
    path = write_avi(tmp_path / "a.avi", plain, b"FMP4")
    right_or_refused(path)


def right_or_refused(path: Path) -> int:
    """How many of the frames were read; they are those of the oracle at that time, or index where times do not tell."""
    whole, read = decoded(path), 0
    index = read_index(path)
    pictures = {round(time * 25): picture for time, picture in whole}
    for number in range(len(index.pts)):
        try:
            (got,) = PyAVDecoder(path, index).read([number])
        except DecodeFailure:
            continue
        picture = pictures[round(index.pts_seconds[number] * 25)] if index.times_hold else whole[number][1]
        assert np.array_equal(got, picture), number
        read += 1
    return read


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(60))
def test_pictures_that_stay_anywhere_are_right_or_refused(tmp_path: Path, seed: int) -> None:
    """Chunks that are empty or not coded are put in at random, in B-frames and in packed ones too."""
    chance = random.Random(seed)
    chunks = packed(vops(chance.choice((1, 2, 3)))) if seed % 2 else list(vops(chance.choice((0, 1, 2))))
    for _ in range(chance.randrange(1, 4)):
        index = chance.randrange(1, len(chunks))
        chunks[index:index] = [chance.choice((b"", not_coded(vops(0)[4])))] * chance.randrange(1, 3)
    path = write_avi(tmp_path / "a.avi", chunks, b"DIVX")
    read = right_or_refused(path)
    # Of some of these files FFmpeg loses frames: a B-frame directly behind a picture that is not coded.
    assert read == FRAMES or len(decoded(path)) < FRAMES


def test_a_picture_that_stays_at_the_end(tmp_path: Path) -> None:
    """A decoder gives the last one once more when it is told that nothing follows; it is the same one."""
    path = write_avi(tmp_path / "a.avi", [*vops(0), not_coded(vops(0)[4])])
    assert numbers(path) == [*range(FRAMES), FRAMES - 1]
    assert len(read_index(path).pts) == right_or_refused(path) == FRAMES


def test_an_avi_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    path = write_avi(tmp_path / "a.avi", list(vops(0)))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with MediaLoader(MediaSettings(workers=0), tmp_path) as loader:
        (fault,) = loader.load([MediaRef("video", "a.avi")])
    assert isinstance(fault, SampleError) and fault.reason in ("truncated_media", "corrupt_media")


def bits(text: str) -> bytes:
    text = text.replace(" ", "")
    text += "0" * (-len(text) % 8)
    return bytes(int(text[at : at + 8], 2) for at in range(0, len(text), 8))


def layer(resolution: int, more: str = "0", aspect: str = "0001", shape: str = "00") -> bytes:
    """Header of a video object layer by 14496-2 6.2.3, its start code first. ``more``: its control parameters."""
    return b"\0\0\1\x20" + bits(f"0 00000001 0 {aspect} {more} {shape} 1 {resolution:016b} 1 0 1")


def vop(time_bits: int, coded: bool, kind: str = "01", seconds: int = 0) -> bytes:
    return b"\0\0\1\xb6" + bits(f"{kind} {'1' * seconds}0 1 {'0' * (time_bits - 1)}1 1 {int(coded)} 0111")


@pytest.mark.parametrize(
    ("header", "time_bits"),
    [
        (layer(25), 5),
        (layer(1), 1),
        (layer(2), 1),
        (layer(30000), 15),
        (layer(32), 5),
        (layer(33), 6),
        (layer(25, more="1 01 1 0"), 5),
        (layer(25, more="1 01 1 1" + "1" * 79), 5),
        (layer(25, aspect="1111 00000001 00000001"), 5),
        (layer(25, shape="01"), 0),  # of other shapes more fields follow: not known
        (layer(0), 0),
    ],
)
def test_a_picture_that_is_not_coded_is_known_by_the_layers_clock(header: bytes, time_bits: int) -> None:
    pictures = Mpeg4Pictures(Syntax("mpeg4"), header)
    assert pictures.time_bits == time_bits
    for seconds in (0, 1, 3):
        assert pictures.is_frame(memoryview(vop(time_bits or 5, coded=True, seconds=seconds)))
        assert pictures.is_frame(memoryview(vop(time_bits or 5, coded=False, seconds=seconds))) is (time_bits == 0)


def test_places_left_over_are_counted() -> None:
    """Two pictures in one packet leave one index over, which the next one that is not coded fills, and no other."""
    pictures = Mpeg4Pictures(Syntax("mpeg4"), layer(25))
    first, both, alone = vop(5, True), vop(5, True) + vop(5, True, "10"), vop(5, False)
    are_frames = [
        pictures.is_frame(memoryview(one))
        for one in (first, alone, both, first, alone, alone, both, both, alone, alone)
    ]
    assert are_frames == [True, False, True, True, True, False, True, True, True, True]
    assert pictures.is_packed
    other = Mpeg4Pictures(Syntax("h264"))
    assert other.is_frame(memoryview(both)) and other.is_frame(memoryview(alone)) and not other.is_packed


def test_a_seek_that_fails_is_not_needed(tmp_path: Path) -> None:
    """The index of the file flags no picture before the 13th; to one before it FFmpeg does not go."""
    path = write_avi(tmp_path / "a.avi", list(vops(0)), keys=[13, 24])
    check_reads(path, [[index] for index in (0, 3, 11, 14, 25)])
