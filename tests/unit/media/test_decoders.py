"""Pictures as players show them: turned, mirrored, on white; torchcodec gives the frames of PyAV or refuses."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from tests.support.odd_clips import encode, read_index, with_matrix
from tests.support.refusals import refused
from tests.support.torchcodec import require_torchcodec
from vlm_pg.errors import ConfigError
from vlm_pg.media import upright, video_decoders
from vlm_pg.media.boundary import DecodeFailure
from vlm_pg.media.decode_file import decode_video
from vlm_pg.media.images import decode_image
from vlm_pg.media.loader import MediaLoader
from vlm_pg.media.sampling import Part
from vlm_pg.media.seeking import PyAVDecoder
from vlm_pg.media.settings import MediaSettings
from vlm_pg.media.upright import Turn
from vlm_pg.media.video_decoders import DecordDecoder, TorchCodecDecoder, check_installed

SMALL = MediaSettings(min_pixels=784, max_pixels=784 * 4, image_min_pixels=784, image_max_pixels=784 * 4)
COS, SIN = math.cos(math.radians(0.5)), math.sin(math.radians(0.5))
ROTATIONS = {
    "upright": ((1, 0, 0, 1), lambda stored: stored),
    "clockwise": ((0, 1, -1, 0), lambda stored: np.rot90(stored, -1)),
    "upside-down": ((-1, 0, 0, -1), lambda stored: np.rot90(stored, 2)),
    "anticlockwise": ((0, -1, 1, 0), lambda stored: np.rot90(stored)),
    "nearly-clockwise": ((SIN, COS, -COS, SIN), lambda stored: np.rot90(stored, -1)),
    "stretched": ((2, 0, 0, 1), lambda stored: stored),
    "nothing": ((0, 0, 0, 0), lambda stored: stored),  # what players show upright
}
MIRRORED = {
    "left-right": ((-1, 0, 0, 1), np.fliplr),
    "top-bottom": ((1, 0, 0, -1), np.flipud),
    "diagonal": ((0, 1, 1, 0), lambda stored: stored.swapaxes(0, 1)),
    "other-diagonal": ((0, -1, -1, 0), lambda stored: np.rot90(stored, 2).swapaxes(0, 1)),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encode(tmp_path_factory.mktemp("stored") / "a.mp4", list(range(6)), "mpeg4", first=300, clock=25)


@pytest.mark.parametrize("name", [*ROTATIONS, *MIRRORED])
def test_display_matrices(name: str, stored: Path, tmp_path: Path) -> None:
    """Of the eight ways to lay a picture down, as ISO/IEC 14496-12 writes them."""
    matrix, turned = (ROTATIONS | MIRRORED)[name]
    path = with_matrix(stored, tmp_path / "a.mp4", *matrix)
    pictures = PyAVDecoder(stored, read_index(stored)).read([0, 5])
    index = read_index(path)
    shown = PyAVDecoder(path, index).read([0, 5])
    assert np.array_equal(shown, np.stack([turned(picture) for picture in pictures]))
    if name in MIRRORED:
        for decoder in (DecordDecoder, TorchCodecDecoder):
            with pytest.raises(DecodeFailure, match=f"{decoder.name} does not mirror"):
                decoder(path, index)
    elif name == "nearly-clockwise":
        with pytest.raises(DecodeFailure, match=r"to be turned by 89\.5 degrees"):
            DecordDecoder(path, index)
    else:
        assert np.array_equal(DecordDecoder(path, index).read([0, 5]), shown)


@pytest.mark.parametrize("matrix", [(0.8, 0.6, -0.6, 0.8), (1, 0.5, 0, 1), (1, 0, 1, 0)])
def test_other_matrices_are_refused(matrix: tuple[float, ...], stored: Path, tmp_path: Path) -> None:
    path = with_matrix(stored, tmp_path / "a.mp4", *matrix)
    with refused("corrupt_media", r"to be turned by -?[\d.]+ degrees or skewed\. Quarter turns"):
        decode_video(path, SMALL, 28)


def test_what_mirrors() -> None:
    assert not any(Turn(*flags).mirrors for flags in ((), (True, True), (True, False, True), (False, True, True)))
    assert all(Turn(*flags).mirrors for flags in ((True,), (False, True), (False, False, True), (True, True, True)))


def clear(path: Path, codec: str, format: str, paint: Callable[[int], np.ndarray], count: int = 6) -> Path:
    """Frames [56, 56, 4] of a format with opacity."""
    pictures = [paint(number) for number in range(count)]
    return encode(path, range(count), codec, clock=25, pictures=pictures, pix_fmt=format)


def half_clear(_: int) -> np.ndarray:
    """Red, half of it opaque in one part and not at all in the other; black lies under the latter."""
    rgba = np.zeros((56, 56, 4), np.uint8)
    rgba[:28] = 200, 0, 0, 128
    return rgba


@pytest.mark.parametrize(("codec", "format"), [("png", "rgba"), ("qtrle", "argb"), ("ffv1", "yuva444p")])
def test_transparent_parts_are_white_as_in_images(codec: str, format: str, tmp_path: Path) -> None:
    path = clear(tmp_path / ("a.mkv" if codec == "ffv1" else "a.mov"), codec, format, half_clear)
    Image.fromarray(half_clear(0)).save(tmp_path / "a.png")
    expected = decode_image(tmp_path / "a.png", SMALL, 28).frames[0]
    assert expected[:, 5, 5].tolist() == [227, 127, 127] and expected[:, -5, 5].tolist() == [255, 255, 255]
    difference = np.abs(decode_video(path, SMALL, 28).frames.astype(int) - expected)
    assert difference.max() <= (2 if codec == "ffv1" else 0)
    for decoder in (DecordDecoder, TorchCodecDecoder):
        with pytest.raises(DecodeFailure, match=f"{decoder.name} (shows what lies under|misplaces)|out of order"):
            decoder(path, read_index(path))


@pytest.mark.parametrize("codec", ["qtrle", "png"])
def test_a_frame_looks_the_same_whichever_others_are_asked_for(codec: str, tmp_path: Path) -> None:
    """Of a video that fades in from nothing: its first pictures are white, read alone, together or out of a clip."""

    def fading(position: int) -> np.ndarray:
        return np.full((56, 56, 4), (9, 90, 40 * position, 0 if position < 4 else 255), np.uint8)

    path = clear(tmp_path / "a.mov", codec, "argb" if codec == "qtrle" else "rgba", fading)
    index = read_index(path)
    expected = [[255, 255, 255]] * 4 + [[9, 90, 160], [9, 90, 200]]
    for wanted in ([0], [1, 3], [4, 5], [0, 1, 2, 3, 4, 5]):
        decoder = PyAVDecoder(path, index)
        for positions in ([wanted[0]], wanted):
            assert decoder.read(positions)[:, 5, 5].tolist() == [expected[position] for position in positions]
    assert decode_video(path, SMALL, 28, part=Part(0.0, 0.1)).frames[:, :, 5, 5].tolist() == [[255] * 3] * 2


def test_opacity_that_nobody_set(tmp_path: Path) -> None:
    path = clear(
        tmp_path / "a.mov", "qtrle", "argb", lambda position: np.full((56, 56, 4), (9, 90, 40 * position, 0), np.uint8)
    )
    frames = decode_video(path, SMALL, 28).frames
    assert frames[-1, :, 5, 5].tolist() == [9, 90, 200]


def test_a_long_file_is_looked_at_in_some_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long: and what is damaged where nobody asks refuses nothing."""
    nothing = np.full((56, 56, 4), (9, 90, 40, 0), np.uint8)
    path = clear(tmp_path / "a.mov", "png", "rgba", lambda position: nothing, 500)
    data = bytearray(path.read_bytes())
    for _ in range(3):  # pictures amid the file
        at = data.index(b"\x89PNG", len(data) // 2)
        data[at : at + 24] = bytes(24)
    path.write_bytes(data)
    looked: list[int] = []
    monkeypatch.setattr(upright, "has_alpha", lambda frame: looked.append(frame.pts) or True)
    frames = decode_video(path, SMALL, 28, part=Part(0.0, 0.5)).frames
    assert frames[-1, :, 5, 5].tolist() == [9, 90, 40]
    assert 30 < len(set(looked)) < 80


TORCHCODEC = MediaSettings(decoder="torchcodec", workers=0)
# 10 bits are turned into RGB differently
FILES = ("flipping_a_pancake.mkv", "nasa_13013.mp4", "av1_video.mkv", "h265_video.mp4", "unordered.mov", "video_0.mov",
         "video_90.mov", "video_180.mov", "video_270.mov", "h264_10bits.mp4", "bt709_full_range.mp4")  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("part", [pytest.param(Part(), marks=pytest.mark.matrix), Part(0.01, 0.5)])
def test_frames_of_real_files(media_dir: Path, name: str, part: Part) -> None:
    require_torchcodec()
    ours = decode_video(media_dir / name, TORCHCODEC, 28, part=part)
    auto = decode_video(media_dir / name, MediaSettings(), 28, part=part)
    assert ours.decoder == "torchcodec"
    assert ours.frame_seconds == auto.frame_seconds and ours.sampled_fps == auto.sampled_fps
    assert ours.frames.shape == auto.frames.shape
    difference = np.abs(ours.frames.astype(int) - auto.frames.astype(int)).mean()
    assert difference <= (5.0 if "10bits" in name else 0.0)


def test_an_index_of_other_frames_is_noticed(media_dir: Path) -> None:
    require_torchcodec()
    path = media_dir / "bt709_full_range.mp4"
    index = read_index(path)
    with pytest.raises(DecodeFailure, match="torchcodec counts 30 frames where 29 are shown"):
        TorchCodecDecoder(path, replace(index, pts=index.pts[1:]))
    moved = replace(index, pts=(*index.pts[:5], index.pts[5] + 1, *index.pts[6:]))
    with pytest.raises(DecodeFailure, match=r"torchcodec has a frame of 0\.167 s where 0\.167 s are wanted"):
        TorchCodecDecoder(path, moved).read([4, 5])
    with pytest.raises(DecodeFailure, match="flags key frames that are none"):
        TorchCodecDecoder(path, replace(index, flags_are_entries=False))


def test_a_corrupted_file(media_dir: Path) -> None:
    require_torchcodec()
    with refused("corrupt_media"):
        decode_video(media_dir / "corrupted.mp4", TORCHCODEC, 28)


@pytest.mark.parametrize("cause", ["is not installed", "finds no FFmpeg that it can load"])
def test_a_clear_error_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str) -> None:
    monkeypatch.setitem(sys.modules, "torchcodec", None)
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    if "FFmpeg" in cause:

        class Finder:
            @staticmethod
            def find_spec(name: str, *_: object) -> None:
                if name.startswith("torchcodec"):
                    raise RuntimeError("Could not load libtorchcodec")

        monkeypatch.delitem(sys.modules, "torchcodec")
        monkeypatch.delitem(sys.modules, "torchcodec.decoders")
        monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    words = rf"media\.decoder is torchcodec, which {cause}\. .* pip install 'vlm-pg\[torchcodec\]', .*decoder=auto"
    with pytest.raises(ConfigError, match=words):
        MediaLoader(TORCHCODEC, tmp_path)


class _Batch:
    """Frames on another device, which numpy cannot read there."""

    def __init__(self, positions: list[int]):
        self.pts_seconds = torch.tensor([position / 10 for position in positions], dtype=torch.float64)
        self.data = self

    def cpu(self) -> torch.Tensor:
        return torch.zeros(len(self.pts_seconds), 4, 6, 3, dtype=torch.uint8)


class _Decoder:
    def __init__(self, path: str, **options: object):
        self.options = options

    def __len__(self) -> int:
        return 3

    def get_frames_at(self, positions: list[int]) -> _Batch:
        return _Batch(positions)


def test_the_gpu_of_the_rank_is_asked_and_frames_come_to_the_cpu(
    media_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setitem(sys.modules, "torchcodec", ModuleType("torchcodec"))
    fake = ModuleType("torchcodec.decoders")
    fake.VideoDecoder = _Decoder  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", fake)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: started.append(device))
    monkeypatch.setenv("LOCAL_RANK", "3")
    video_decoders.gpu_number.cache_clear()
    path = media_dir / "bt709_full_range.mp4"
    index = replace(read_index(path), pts=(0, 1, 2), time_base=Fraction(1, 10))
    decoder = TorchCodecDecoder(path, index, "cuda")
    monkeypatch.undo()
    assert decoder.read([0, 2]).shape == (2, 4, 6, 3)
    video_decoders.gpu_number.cache_clear()
    assert started == ["cuda:3"] and decoder._decoder.options["device"] == "cuda:3"


def test_a_gpu_is_asked_of_no_other_decoder_and_of_no_machine_without() -> None:
    with pytest.raises(ValidationError, match="decoder_device is cuda and decoder is auto"):
        MediaSettings(decoder_device="cuda")
    if torch.cuda.device_count():
        pytest.skip("there is a GPU")
    require_torchcodec()
    with pytest.raises(ConfigError, match="there is no GPU"):
        check_installed("cuda")
