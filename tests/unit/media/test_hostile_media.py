"""Odd and hostile files one by one: what is refused and in which words, and what is harmless and must be read."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.clip_table import QUICK
from tests.support.clips import Clip, number_of, picture, write
from tests.support.hostile_files import (
    base_files,
    growing,
    huge_webp,
    image,
    late_stream,
    many_scans,
    odd_exifs,
    table_bombs,
    titled,
)
from tests.support.odd_clips import read_index
from tests.support.watch import OpenedFiles
from vlm_pg.errors import SampleError
from vlm_pg.media import container as container_module
from vlm_pg.media.boundary import DecodeFailure, reading
from vlm_pg.media.container import open_video
from vlm_pg.media.decode_file import decode_file
from vlm_pg.media.index import TooManyFrames
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import DecodedMedia


def load(path: Path, **changes) -> DecodedMedia:
    kind = "video" if path.suffix in (".mp4", ".mkv", ".mov", ".webm") else "image"
    return decode_file(kind, str(path), MediaSettings(**changes), 28)


def refusal(path: Path, **changes) -> SampleError:
    with pytest.raises(SampleError) as got:
        load(path, **changes)
    return got.value


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return base_files(tmp_path_factory.mktemp("bases"))


def video(folder: Path, codec: str = "libx264", container: str = "mp4") -> Path:
    return write(Clip(codec, container, "plain", QUICK[codec]), folder, frames=16)


def numbers(media: DecodedMedia) -> list[int | None]:
    return [number_of(frame.transpose(1, 2, 0)) for frame in media.frames]


def test_a_script_that_names_a_file_opens_nothing(tmp_path: Path):
    target = tmp_path / "canary"
    target.mkdir()
    video(target).rename(target / "clip.mp4")
    script = tmp_path / "script.mp4"
    script.write_text("ffconcat version 1.0\nfile canary/clip.mp4\n")
    opened = OpenedFiles(target)
    for decoder in ("auto", "pyav", "decord"):
        error = refusal(script, decoder=decoder)
        assert error.reason == "corrupt_media"
        assert "begins with b'ffconcat version') is none of the containers that are read: MP4" in str(error)
    assert opened.names() == set()
    (target / "clip.mp4").read_bytes()
    assert opened.names() == {"clip.mp4"}, "the watch works"
    opened.close()


def test_ffmpeg_is_told_what_it_may_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The second lock by itself: were the content misjudged, FFmpeg still refuses the format, and all but files."""
    script = tmp_path / "script.mp4"
    video(tmp_path).rename(tmp_path / "clip.mp4")
    script.write_text("ffconcat version 1.0\nfile clip.mp4\n")
    monkeypatch.setattr(container_module, "judge", lambda _: "concat")
    with pytest.raises(DecodeFailure, match="Invalid argument"), open_video(script):
        pytest.fail("opened")
    monkeypatch.setattr(container_module, "FORMAT_WHITELIST", container_module.FORMAT_WHITELIST + ",concat")
    monkeypatch.setattr(container_module, "PROTOCOL_WHITELIST", "crypto")
    with pytest.raises(DecodeFailure), open_video(script):
        pytest.fail("opened")


def test_what_decoders_raise_is_the_files_fault_and_traced():
    with pytest.raises(DecodeFailure) as got, reading((OSError,)):
        raise IndexError("list index out of range")
    assert str(got.value) == "IndexError: list index out of range"
    assert "raise IndexError" in got.value.trace
    with pytest.raises(DecodeFailure, match=r"^gone$") as got, reading((OSError,)):
        raise OSError("gone")
    assert got.value.trace == ""
    with pytest.raises(MemoryError), reading((Exception,)):
        raise MemoryError


def test_an_unforeseen_error_reaches_the_caller_with_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("vlm_pg.media.index.syntax_of", lambda *_: {}["surprise"])
    error = refusal(video(tmp_path))
    assert error.reason == "corrupt_media" and "KeyError: 'surprise'" in str(error)
    assert "in index_of" in error.trace and "KeyError" in error.trace


@pytest.mark.parametrize("container", ["mp4", "mov", "matroska", "avi"])
def test_titles_in_any_encoding_are_harmless(tmp_path: Path, container: str):
    (tmp_path / "a.mkv").write_bytes(titled(tmp_path, container))
    assert numbers(load(tmp_path / "a.mkv"))[0] == 0


@pytest.mark.parametrize("code", [b"encv", b"zzzz"])
def test_encrypted_and_unknown_codecs_are_named(tmp_path: Path, bases: dict[str, bytes], code: bytes):
    (tmp_path / "a.mp4").write_bytes(bases["libx264-mp4-base.mp4"].replace(b"avc1", code))
    error = refusal(tmp_path / "a.mp4")
    assert error.reason == "corrupt_media" and error.trace == ""
    assert "its video is encrypted or in a codec that is not known" in str(error)


def test_odd_tags_beside_an_orientation_are_harmless(tmp_path: Path):
    for extension in (".jpg", ".png"):
        for number, exif in enumerate(odd_exifs()):
            path = tmp_path / f"{number}{extension}"
            path.write_bytes(image(extension, exif=exif))
            frame = load(path).frames[0]
            assert frame.shape[1] > frame.shape[2], "turned by a quarter"


@pytest.mark.parametrize("kind", ["video", "image"])
def test_a_file_name_that_is_not_utf8(tmp_path: Path, kind: str):
    made = video(tmp_path) if kind == "video" else tmp_path / "a.png"
    if kind == "image":
        Image.fromarray(picture(3)).save(made)
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9" + made.suffix.encode()))
    made.rename(path)
    assert load(path).kind == kind
    path.write_bytes(b"no media")
    error = refusal(path)
    assert r"caf\udce9" in str(error)
    str(error).encode()


def test_decord_says_what_it_cannot_open(tmp_path: Path):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.mp4"))
    video(tmp_path).rename(path)
    error = refusal(path, decoder="decord")
    assert error.reason == "corrupt_media" and "UnicodeEncodeError" in str(error) and error.trace


def test_a_stream_that_appears_late_is_harmless(tmp_path: Path):
    (tmp_path / "a.mkv").write_bytes(late_stream(tmp_path))
    media = load(tmp_path / "a.mkv")
    assert numbers(media)[0] == 0 and None not in numbers(media)


@pytest.mark.parametrize(
    "name", ["stts-200000000.mp4", "ctts-10000000.mp4", "stsz-equal-4294967295.mp4", "trun-200000000.mp4"]
)
def test_tables_that_promise_too_much_never_reach_a_decoder(
    tmp_path: Path, bases: dict[str, bytes], name: str, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / name).write_bytes(dict(table_bombs(bases["libx264-mp4-base.mp4"]))[name])
    monkeypatch.setattr("av.open", lambda *_, **__: pytest.fail("opened"))
    count = int(name.removesuffix(".mp4").rpartition("-")[2])
    error = refusal(tmp_path / name)
    assert error.reason == "corrupt_media"
    assert f"its tables promise {count}" in str(error) or f"its tables promise {count + 16}" in str(error)


def test_the_number_of_frames_is_tested_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = video(tmp_path)
    read = []
    monkeypatch.setattr("vlm_pg.media.index._Reach.add", lambda _, packet: read.append(packet))
    with pytest.raises(TooManyFrames, match="more than 4 frames"):
        read_index(path, 4)
    assert len(read) == 5


@pytest.mark.parametrize(("side", "reason"), [(1500, "video_too_large"), (3000, "corrupt_media")])
def test_pictures_that_grow_after_the_first(tmp_path: Path, side: int, reason: str):
    """Above the limit it is said; above twice the limit FFmpeg gets no memory for it."""
    (tmp_path / "a.mkv").write_bytes(growing(tmp_path, side))
    error = refusal(tmp_path / "a.mkv", max_video_frame_pixels=2_000_000)
    assert error.reason == reason
    if reason == "video_too_large":
        assert "has 1500x1500 pixels. At most 2000000 pixels are allowed. Scale the file down, or raise" in str(error)
    assert load(tmp_path / "a.mkv").frames.shape[0] == 4


def test_a_jpeg_of_endless_scans(tmp_path: Path):
    (tmp_path / "a.jpg").write_bytes(many_scans(40, side=64))
    error = refusal(tmp_path / "a.jpg")
    assert error.reason == "corrupt_media" and "it has more than 32 scans, which no encoder writes" in str(error)
    (tmp_path / "a.jpg").write_bytes(image(".jpg", progressive=True))
    assert load(tmp_path / "a.jpg").frames.shape[0] == 1


def test_a_webp_is_judged_by_its_header_before_it_gets_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.webp").write_bytes(huge_webp(9000))
    monkeypatch.setattr("PIL.Image.open", lambda *_, **__: pytest.fail("opened"))
    error = refusal(tmp_path / "a.webp")
    assert error.reason == "image_too_large" and "9000x9000 pixels" in str(error)


@pytest.mark.parametrize("lossless", [True, False])
def test_the_size_of_every_kind_of_webp(tmp_path: Path, lossless: bool):
    from vlm_pg.media.images import webp_size

    for alpha in (False, True):
        pixels = np.zeros((40, 70, 4 if alpha else 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "a.webp", lossless=lossless)
        with (tmp_path / "a.webp").open("rb") as file:
            assert webp_size(file) == (70, 40)


def test_a_fifo_and_a_folder_are_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "a.mp4")
    assert "it is not a regular file" in str(refusal(tmp_path / "a.mp4"))
    (tmp_path / "b.png").mkdir()
    assert "it cannot be opened (Is a directory)" in str(refusal(tmp_path / "b.png"))
