"""Real video files: the frames qwen-vl-utils picks, the same from both decoders, upright, faults with their reason."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from tests.support.clip_table import QUICK
from tests.support.clips import Clip, number_of, write
from tests.support.odd_clips import encode, read_index
from tests.support.refusals import refused
from vlm_pg.errors import SampleError
from vlm_pg.eval.protocols.protocol import load_protocol, protocol_names
from vlm_pg.media import seeking
from vlm_pg.media.boundary import DecodeFailure
from vlm_pg.media.container import VideoHeader, open_video
from vlm_pg.media.decode_file import decode_file, decode_video, resize_frames
from vlm_pg.media.index import EntryPoint
from vlm_pg.media.seeking import PyAVDecoder
from vlm_pg.media.settings import MediaSettings
from vlm_pg.media.video_decoders import DecordDecoder

READABLE_BY_BOTH = [
    *("flipping_a_pancake.mkv", "nasa_13013.mp4", "h265_10bits.mp4", "unordered.mov", "video_90.mov"),
    *(
        pytest.param(name, marks=pytest.mark.matrix)
        for name in ("h264_10bits.mp4", "bt709_full_range.mp4", "video_0.mov", "video_180.mov", "video_270.mov")
    ),
]


def decode(path: Path, **changes):
    return decode_video(path, MediaSettings(**changes), 28)


@pytest.mark.parametrize("patch_size", [14, pytest.param(16, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("name", READABLE_BY_BOTH)
def test_frames_and_pixels_of_qwen_vl_utils(media_dir: Path, name: str, patch_size: int):
    """Same indices, rate and resized pixels as ``fetch_video`` with its decord reader; 10 bits with decord only."""
    from qwen_vl_utils.vision_process import fetch_video

    decoder = "decord" if "10bits" in name else "auto"
    media = decode_video(media_dir / name, MediaSettings(decoder=decoder), 2 * patch_size)
    element = {"video": str(media_dir / name), "fps": 2.0, "min_frames": 4, "max_frames": 16,
               "min_pixels": 4 * 784, "max_pixels": 128 * 784}  # fmt: skip
    (theirs, metadata), their_fps = fetch_video(
        element, image_patch_size=patch_size, return_video_sample_fps=True, return_video_metadata=True
    )
    assert metadata["video_backend"] == "decord"
    assert media.decoder == ("decord" if "10bits" in name else "pyav")
    assert media.frames.dtype == np.uint8
    assert np.array_equal(media.frames, theirs.numpy())
    assert media.sampled_fps == pytest.approx(their_fps, rel=1e-6)
    stored = read_index(media_dir / name).pts_seconds
    shown = [stored[index] - stored[0] for index in metadata["frames_indices"]]
    assert media.frame_seconds == pytest.approx(shown, abs=1e-5)


@pytest.mark.parametrize("name", ["h265_10bits.mp4", "nasa_13013.mp4", "video_90.mov"])
def test_both_decoders_agree(media_dir: Path, name: str):
    """Same frames at the same times; pixels equal except where 10-bit colour is interpolated differently."""
    ours, theirs = (decode(media_dir / name, decoder=decoder) for decoder in ("decord", "pyav"))
    assert (ours.decoder, theirs.decoder) == ("decord", "pyav")
    assert ours.frames.shape == theirs.frames.shape
    assert ours.frame_seconds == pytest.approx(theirs.frame_seconds, abs=1e-5)
    assert ours.sampled_fps == pytest.approx(theirs.sampled_fps)
    difference = np.abs(ours.frames.astype(int) - theirs.frames.astype(int))
    assert difference.mean() <= (5.0 if "10bits" in name else 0.0)


def test_times_count_from_the_first_frame(tmp_path: Path):
    """MPEG-TS starts counting where it likes; a viewer's clock, and the times the model reads, start at 0."""
    path = encode(tmp_path / "offset.ts", list(range(100, 120)), "mpeg4", clock=25)
    assert read_index(path).pts_seconds[0] > 1.0
    assert decode(path).frame_seconds == pytest.approx([0.0, 0.24, 0.52, 0.76], abs=1e-6)


def test_av1_and_open_groups_need_pyav(media_dir: Path):
    media = decode(media_dir / "av1_video.mkv")
    assert media.decoder == "pyav"
    assert media.frames.shape == (10, 3, 224, 420)
    assert media.frame_seconds[-1] == pytest.approx(4.96)
    assert media.sampled_fps == pytest.approx(2.0)
    with pytest.raises(SampleError, match="decord misplaces frames"):
        decode(media_dir / "h265_video.mp4", decoder="decord")
    with pytest.raises(SampleError, match=r"wanted index: -1\. A complete file .* set media\.decoder=auto"):
        decode(media_dir / "av1_video.mkv", decoder="decord")


@pytest.mark.parametrize("decoder", ["auto", "decord", "pyav"])
def test_a_corrupted_file_is_named_as_such(media_dir: Path, decoder: str):
    with refused("corrupt_media", r"'corrupted\.mp4' cannot be decoded: .* is needed\. Fetch or re-encode"):
        decode(media_dir / "corrupted.mp4", decoder=decoder)


def test_a_video_cut_short(media_dir: Path, tmp_path: Path):
    """Half of an mp4 whose index comes first: frames that are not there are a fault, not the last frame repeated."""
    data = (media_dir / "flipping_a_pancake.mkv").read_bytes()
    (tmp_path / "half.mkv").write_bytes(data[: len(data) // 2])
    with refused("truncated_media", r"cut off: its header states 10\.4 s, 5\.\d s are there\. At most .* Fetch"):
        decode(tmp_path / "half.mkv")
    assert decode(tmp_path / "half.mkv", max_missing_share=0.6).frame_seconds[-1] < 9
    data = (media_dir / "bt709_full_range.mp4").read_bytes()
    (tmp_path / "half.mp4").write_bytes(data[: len(data) // 2])
    with refused("corrupt_media"):
        decode(tmp_path / "half.mp4", decoder="pyav")


@pytest.mark.parametrize("codec", ["libx264", "libx265"])
def test_a_video_whose_first_pictures_no_decoder_shows(codec: str, tmp_path: Path):
    """A damaged first key frame: up to the next one nothing can be shown, which is a quarter of this clip."""
    path = write(Clip(codec, "mp4", "plain", QUICK[codec]), tmp_path)
    with av.open(str(path)) as container:
        first = next(container.demux(video=0))
        start, size = first.pos, first.size
    data = bytearray(path.read_bytes())
    data[start + size // 2 : start + size] = bytes(size - size // 2)
    data[start : start + size] = data[start : start + size].replace(b"\x65", b"\x61").replace(b"\x28\x01", b"\x02\x01")
    path.write_bytes(data)
    with refused("truncated_media", r"cut off: its header states 1\.9 s, 1\.4 s are there"):
        decode(path)
    assert decode(path, max_missing_share=0.3, last_frame="always").frame_seconds


def test_decoders_deliver_exactly_the_indexed_frames_or_fail(media_dir: Path):
    """An index that does not fit the file is noticed by both; no neighbouring frame is put in."""
    path = media_dir / "bt709_full_range.mp4"
    index = read_index(path)
    between = replace(index, pts=(*index.pts[:5], index.pts[5] + 1, *index.pts[6:]))
    with pytest.raises(DecodeFailure, match=r"no frame comes at 0\.167 s"):
        PyAVDecoder(path, between).read([4, 5, 6])
    with pytest.raises(DecodeFailure, match="decord counts 30 frames where 29 are shown"):
        DecordDecoder(path, replace(index, pts=index.pts[1:]))


@pytest.mark.parametrize("target", ["later", "end"])
def test_a_seek_that_goes_too_far_is_made_good(media_dir: Path, monkeypatch: pytest.MonkeyPatch, target: str):
    """A seek that lands behind the entry point is noticed, and the file read from its start instead."""
    path = media_dir / "nasa_13013.mp4"
    index = read_index(path)
    expected = PyAVDecoder(path, index).read([100, 101])
    late = iter([index.entries[1].dts if target == "later" else index.pts[-1]])
    real_open = seeking.open_video

    class SeeksTooFar:
        def __init__(self, container):
            self.container, self.demux = container, container.demux

        def seek(self, pts, **options):
            self.container.seek(next(late, pts), **options)

    @contextlib.contextmanager
    def open_with_bad_seek(*arguments):
        with real_open(*arguments) as (container, stream):
            yield SeeksTooFar(container), stream

    monkeypatch.setattr(seeking, "open_video", open_with_bad_seek)
    assert np.array_equal(PyAVDecoder(path, index).read([100, 101]), expected)
    assert next(late, None) is None, "the bad seek was used"


def test_an_entry_point_that_is_none_is_noticed(media_dir: Path):
    """An index with an entry point where no packet begins: all is decoded from the first packet."""
    path = media_dir / "nasa_13013.mp4"
    index = read_index(path)
    wrong = replace(index, entries=(*index.entries[:1], EntryPoint(index.pts[50] + 1, index.pts[50] + 1)))
    assert np.array_equal(PyAVDecoder(path, wrong).read([100, 101]), PyAVDecoder(path, index).read([100, 101]))


def test_running_out_of_memory_is_a_fault_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def greedy(*_):
        raise MemoryError

    monkeypatch.setattr("vlm_pg.media.decode_file.decode_image", greedy)
    with refused("out_of_memory", r"'a\.png' does not fit into memory .* should\. Scale .* media\.worker_mem"):
        decode_file("image", str(tmp_path / "a.png"), MediaSettings(), 28)


def test_a_single_frame_is_too_few(tmp_path: Path):
    encode(tmp_path / "one.mp4", [0], "mpeg4", clock=25)
    with refused("too_few_frames", "has 1 frame"):
        decode(tmp_path / "one.mp4")


@pytest.mark.parametrize(
    ("changes", "reason", "message"),
    [
        ({"max_video_frame_pixels": 4000}, "video_too_large", r"96x64 pixels\. At most 4000 .* media\.max_video_fr"),
        ({"max_video_seconds": 1}, "video_too_long", r"lasts 2 s\. At most 1 s are .*media\.max_video_sec"),
        ({"max_video_frames": 49}, "video_too_long", r"more frames than 49, the most .* Cut .*media\.max_video_fr"),
    ],
)
def test_limits_of_the_header(tmp_path: Path, changes: dict[str, int], reason: str, message: str):
    encode(tmp_path / "a.mp4", list(range(50)), "mpeg4", clock=25)
    with refused(reason, message):
        decode(tmp_path / "a.mp4", **changes)


def test_a_strip_is_refused_by_its_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    header = VideoHeader(width=4096, height=16, duration_seconds=1.0, video_seconds=1.0, stated_fps=25.0)
    encode(tmp_path / "a.mp4", list(range(4)), "mpeg4", clock=25)
    monkeypatch.setattr("vlm_pg.media.decode_file.header_of", lambda *_: header)
    monkeypatch.setattr("vlm_pg.media.decode_file.index_of", lambda *_: pytest.fail("decoded"))
    with refused("bad_aspect_ratio"):
        decode(tmp_path / "a.mp4")


def test_every_protocol_of_video_mmmu_shows_the_last_frame() -> None:
    of_set = [load_protocol(name) for name in protocol_names() if name.startswith("video_mmmu/")]
    assert {one.media_settings(MediaSettings()).last_frame for one in of_set} == {"always"}
    assert load_protocol("video_mme/lmms").media_settings(MediaSettings()).last_frame == "as_sampled"


def test_a_file_that_was_cut_before_its_last_frame(tmp_path: Path) -> None:
    """Of 48 frames one is 2 %, which media.max_missing_share lets pass: with last_frame=always it is refused."""
    path = write(Clip("mpeg4", "mp4", "plain", {"bf": "0"}, {"movflags": "faststart"}), tmp_path)
    with open_video(path) as (container, _):
        last = max(packet.pos for packet in container.demux() if packet.size)
    shown = [number_of(decode(path, last_frame="always").frames[-1].transpose(1, 2, 0))]
    path.write_bytes(path.read_bytes()[:last])
    shown.append(number_of(decode(path).frames[-1].transpose(1, 2, 0)))
    assert shown == [47, 46]
    with refused("truncated_media", r"lacks its last frame: its header states 1\.920 s, 1\.880 s are"):
        decode(path, last_frame="always")


def test_reading_in_runs_changes_nothing(media_dir: Path, monkeypatch: pytest.MonkeyPatch):
    """Frames are read in runs that bound memory; the result is that of one run."""
    whole = decode(media_dir / "flipping_a_pancake.mkv")
    monkeypatch.setattr("vlm_pg.media.decode_file.RUN_BYTES", 3 * 240 * 426 * 3)
    parts = decode(media_dir / "flipping_a_pancake.mkv")
    assert np.array_equal(whole.frames, parts.frames)


@pytest.mark.parametrize("size", [(56, 84), (28, 28), (140, 196), (30, 50)])
def test_resizing_equals_torchvision(size: tuple[int, int]):
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.functional import resize

    frames = np.random.default_rng(0).integers(0, 256, (3, 30, 50, 3), dtype=np.uint8)
    expected = resize(
        torch.from_numpy(frames).permute(0, 3, 1, 2), list(size), InterpolationMode.BICUBIC, antialias=True
    )
    assert np.array_equal(resize_frames(frames, *size), expected.numpy())
