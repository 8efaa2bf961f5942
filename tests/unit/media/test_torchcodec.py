"""torchcodec as decoder: the frames that PyAV gives, or a refusal; a clear error where it is missing."""

from __future__ import annotations

import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from tests.support.torchcodec import require_torchcodec
from vlm_pg.errors import ConfigError, SampleError
from vlm_pg.media import video_decoders
from vlm_pg.media.boundary import DecodeFailure
from vlm_pg.media.decode_file import decode_video
from vlm_pg.media.index import read_index
from vlm_pg.media.loader import MediaLoader
from vlm_pg.media.sampling import Part
from vlm_pg.media.settings import MediaSettings
from vlm_pg.media.video_decoders import TorchCodecDecoder, check_installed

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
    with pytest.raises(SampleError) as got:
        decode_video(media_dir / "corrupted.mp4", TORCHCODEC, 28)
    assert got.value.reason == "corrupt_media"


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
