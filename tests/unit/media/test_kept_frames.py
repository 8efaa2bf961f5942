"""Frames decoded once: from the cache they are what decoding gives, bit for bit, and never those of anything else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.frame_folders import coloured, write_folder
from vlm_pg.cache.eviction import Outcome, places
from vlm_pg.cache.settings import CacheSettings
from vlm_pg.errors import ConfigError, SampleError
from vlm_pg.media import frame_cache
from vlm_pg.media.decode_file import decode_file
from vlm_pg.media.frame_cache import content_of, load_file, packed, unpacked
from vlm_pg.media.loader import MediaLoader
from vlm_pg.media.selection import WHOLE, Part
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import DecodedMedia, MediaRef

SETTINGS = MediaSettings(max_frames=6, max_pixels=40 * 28 * 28, workers=0)


@pytest.fixture(autouse=True)
def own_stores() -> None:
    frame_cache._store.cache_clear()
    content_of.cache_clear()


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that were really decoded."""
    names: list[str] = []

    def decode(kind: Any, path: str, *rest: Any) -> DecodedMedia:
        names.append(Path(path).name)
        return decode_file(kind, path, *rest)

    monkeypatch.setattr(frame_cache, "decode_file", decode)
    return names


def same(left: DecodedMedia, right: DecodedMedia) -> bool:
    rest = ("kind", "frame_seconds", "sampled_fps", "decoder", "subtitles")
    return np.array_equal(left.frames, right.frames) and all(getattr(left, n) == getattr(right, n) for n in rest)


@pytest.mark.parametrize("shape", [(1, 3, 28, 28), (4, 3, 56, 84), (2, 3, 28, 5600)])
def test_packing_loses_nothing(shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0)
    for frames in (
        values.integers(0, 256, shape, dtype=np.uint8),
        np.zeros(shape, np.uint8),
        np.full(shape, 255, np.uint8),
        np.broadcast_to(np.arange(shape[3], dtype=np.uint8), shape).copy(),
    ):
        before = frames.copy()
        again = unpacked(packed(frames), list(shape))
        assert np.array_equal(again, before) and np.array_equal(frames, before) and again.flags.writeable


FILES = [
    *("flipping_a_pancake.mkv", "nasa_13013.mp4", "av1_video.mkv", "h265_10bits.mp4", "bt709_full_range.mp4"),
    *("video_90.mov", "unordered.mov"),
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("part", [Part(), Part(start=0.0, end=0.5)], ids=["whole", "clip"])
def test_real_files_come_back_bit_for_bit(
    media_dir: Path, tmp_path: Path, decoded: list[str], name: str, part: Part
) -> None:
    kept = CacheSettings(folder=tmp_path / "cache")
    try:
        plain = decode_file("video", str(media_dir / name), SETTINGS, 28, part)
    except SampleError as fault:
        with pytest.raises(SampleError, match=fault.reason.split("_")[-1]):
            load_file("video", str(media_dir / name), SETTINGS, 28, part, kept=kept)
        assert not list(places(tmp_path / "cache"))
        return
    first, second = (load_file("video", str(media_dir / name), SETTINGS, 28, part, kept=kept) for _ in range(2))
    assert same(first, plain) and same(second, plain) and decoded == [name]


def test_an_entry_is_about_content_part_and_settings(media_dir: Path, tmp_path: Path, decoded: list[str]) -> None:
    kept = CacheSettings(folder=tmp_path / "cache")
    one, other = tmp_path / "a.mkv", tmp_path / "b.mkv"
    shutil.copyfile(media_dir / "flipping_a_pancake.mkv", one)
    shutil.copyfile(one, other)

    def load(path: Path, settings: MediaSettings = SETTINGS, factor: int = 28, part: Part = WHOLE) -> DecodedMedia:
        return load_file("video", str(path), settings, factor, part, kept=kept)

    whole = load(one)
    assert same(load(other), whole) and decoded == ["a.mkv"], "the same content under another name"
    slower = SETTINGS.model_copy(update={"workers": 3, "deadline_seconds": 5.0, "worker_memory_bytes": 1 << 30})
    assert same(load(one, slower), whole) and len(decoded) == 1
    for changes in (
        {"max_frames": 4},
        {"min_pixels": 20 * 28 * 28},
        {"max_pixels": 30 * 28 * 28},
        {"fps": 0.2, "min_frames": 2},
        {"max_video_frames": 1000},
        {"video_tokens": 20},
        {"num_frames": 4, "frames": "uniform"},
    ):
        settings = SETTINGS.model_copy(update=changes)
        assert same(load(one, settings), decode_file("video", str(one), settings, 28))
    assert same(load(one, factor=32), decode_file("video", str(one), SETTINGS, 32))
    clip = Part(start=1.0, end=4.0)
    assert same(load(one, part=clip), decode_file("video", str(one), SETTINGS, 28, clip))
    assert len(decoded) == 10
    shutil.copyfile(media_dir / "nasa_13013.mp4", one)
    assert same(load(one), decode_file("video", str(one), SETTINGS, 28)) and len(decoded) == 11, "another content"
    with pytest.raises(SampleError, match="more frames than 100"):
        load(other, SETTINGS.model_copy(update={"max_video_frames": 100}))


def test_a_folder_of_pictures_is_kept_by_all_of_them(tmp_path: Path, decoded: list[str]) -> None:
    kept, part = CacheSettings(folder=tmp_path / "cache"), Part(folder_fps=3.0)
    folder = write_folder(tmp_path / "a", [coloured(number) for number in range(9)])

    def load(path: Path, part: Part = part) -> DecodedMedia:
        found = load_file("video", str(path), SETTINGS, 28, part, kept=kept)
        assert same(found, decode_file("video", str(path), SETTINGS, 28, part))
        return found

    load(folder)
    load(folder)
    load(write_folder(tmp_path / "b", [coloured(number) for number in range(9)], "img_{}.png"))
    assert decoded == ["a"], "the same pictures under other names"
    load(folder, Part(folder_fps=6.0))
    load(folder, Part(end=1.0, folder_fps=3.0))
    assert len(decoded) == 3
    state = (folder / "00001.png").stat()
    Image.fromarray(coloured(500)).save(folder / "00001.png")
    os.utime(folder / "00001.png", ns=(state.st_atime_ns, state.st_mtime_ns))
    load(folder)
    (folder / "00009.png").unlink()
    load(folder)
    assert len(decoded) == 5
    os.truncate(folder / "00001.png", 40)
    with pytest.raises(SampleError, match=r"'a/00001\.png' cannot be decoded"):
        load_file("video", str(folder), SETTINGS, 28, part, kept=kept)
    (folder / "00001.png").unlink()
    with pytest.raises(SampleError, match="begins with number 2"):
        load_file("video", str(folder), SETTINGS, 28, part, kept=kept)


def test_a_file_that_changes_meanwhile_is_not_kept(media_dir: Path, tmp_path: Path, monkeypatch: Any) -> None:
    path, kept = tmp_path / "a.mkv", CacheSettings(folder=tmp_path / "cache")
    shutil.copyfile(media_dir / "flipping_a_pancake.mkv", path)

    def decode(*arguments: Any) -> DecodedMedia:
        shutil.copyfile(media_dir / "nasa_13013.mp4", path)
        return decode_file(*arguments)

    monkeypatch.setattr(frame_cache, "decode_file", decode)
    load_file("video", str(path), SETTINGS, 28, kept=kept)
    assert not list(places(tmp_path / "cache"))


def test_images_and_subtitles_are_kept(tmp_path: Path, media_dir: Path, decoded: list[str]) -> None:
    from PIL import Image

    kept = CacheSettings(folder=tmp_path / "cache")
    Image.effect_noise((90, 70), 80).convert("RGB").save(tmp_path / "a.png")
    first, second = (load_file("image", str(tmp_path / "a.png"), SETTINGS, 28, kept=kept) for _ in range(2))
    assert same(first, second) and decoded == ["a.png"]
    words, video = tmp_path / "a.srt", str(media_dir / "flipping_a_pancake.mkv")
    for text in ("Flip it.", "Eat it."):
        words.write_text(f"1\n00:00:01,000 --> 00:00:02,000\n{text}\n")
        for _ in range(2):
            media = load_file("video", video, SETTINGS, 28, subtitles=str(words), kept=kept)
            assert [cue.text for cue in media.subtitles] == [text]
    assert decoded == ["a.png", "flipping_a_pancake.mkv", "flipping_a_pancake.mkv"]


def test_damaged_entries_are_decoded_anew(media_dir: Path, tmp_path: Path, decoded: list[str]) -> None:
    kept, video = CacheSettings(folder=tmp_path / "cache"), str(media_dir / "flipping_a_pancake.mkv")
    plain = load_file("video", video, SETTINGS, 28, kept=kept)
    [place] = places(tmp_path / "cache")
    place.path.write_bytes(place.path.read_bytes()[:-3])
    assert same(load_file("video", video, SETTINGS, 28, kept=kept), plain) and len(decoded) == 2
    assert same(load_file("video", video, SETTINGS, 28, kept=kept), plain) and len(decoded) == 2


def test_a_cache_that_cannot_be_written_costs_no_frames(
    media_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vlm_pg.cache.store import Store

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Store, "write", full)
    kept, video = CacheSettings(folder=tmp_path / "cache"), str(media_dir / "video_90.mov")
    with pytest.warns(UserWarning, match=r"cannot be written \(No space left on device\): frames are decoded again"):
        media = load_file("video", video, SETTINGS, 28, kept=kept)
    assert same(media, decode_file("video", video, SETTINGS, 28))


@pytest.mark.parametrize("outcome", Outcome)
def test_only_a_full_cache_is_called_full(
    media_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, outcome: Outcome
) -> None:
    """One in which others make room at this moment is not; in neither case are the frames called kept."""
    monkeypatch.setattr(frame_cache.Store, "write", lambda *_: outcome)
    kept, video = CacheSettings(folder=tmp_path / "cache"), str(media_dir / "video_90.mov")
    assert frame_cache.keep_file("video", video, SETTINGS, 28, WHOLE, "", kept, None) == (outcome is Outcome.KEPT)
    told = [str(one.message) for one in recwarn if "cache" in str(one.message)]
    assert len(told) == (outcome is Outcome.FULL) and all("has no room for more frames" in one for one in told)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_keeps_frames(media_dir: Path, tmp_path: Path, workers: int) -> None:
    kept, settings = CacheSettings(folder=tmp_path / "cache"), SETTINGS.model_copy(update={"workers": workers})
    refs = [MediaRef("video", name) for name in ("flipping_a_pancake.mkv", "video_90.mov", "corrupted.mp4")]
    with MediaLoader(settings, media_dir) as plain, MediaLoader(settings, media_dir, kept=kept) as keeping:
        expected = plain.load(refs)
        for _ in range(2):
            got = keeping.load(refs)
            assert all(same(a, b) for a, b in zip(got[:2], expected[:2], strict=True))  # type: ignore[arg-type]
            assert isinstance(got[2], SampleError) and str(got[2]) == str(expected[2])
    assert len(list(places(tmp_path / "cache"))) == 2


def test_a_folder_that_is_no_cache_is_refused_at_once(media_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds files and is no cache"):
        MediaLoader(SETTINGS, media_dir, kept=CacheSettings(folder=tmp_path))
