"""Frames on disk are those that decoding gives, are found by all that decides them, and cost nothing when odd."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image, features

from tests.support.frame_folders import coloured, write_folder
from vlm_pg.cache import provenance as machine
from vlm_pg.cache.eviction import Outcome, entry_files
from vlm_pg.cache.provenance import source_digest
from vlm_pg.cache.settings import CacheSettings
from vlm_pg.errors import ConfigError, SampleError
from vlm_pg.media import frame_cache, video_decoders
from vlm_pg.media.decode_file import decode_file
from vlm_pg.media.frame_cache import MadeOf, content_of, load_file, made_with, packed, unpacked
from vlm_pg.media.loader import MediaLoader
from vlm_pg.media.sampling import WHOLE, Part
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
    "flipping_a_pancake.mkv",
    "nasa_13013.mp4",
    "av1_video.mkv",
    "h265_10bits.mp4",
    "video_90.mov",
    "unordered.mov",
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("part", [pytest.param(Part(), marks=pytest.mark.matrix), Part(start=0.0, end=0.5)])
def test_real_files_come_back_bit_for_bit(
    media_dir: Path, tmp_path: Path, decoded: list[str], name: str, part: Part
) -> None:
    cached = CacheSettings(folder=tmp_path / "cache")
    try:
        plain = decode_file("video", str(media_dir / name), SETTINGS, 28, part)
    except SampleError as fault:
        with pytest.raises(SampleError, match=fault.reason.split("_")[-1]):
            load_file("video", str(media_dir / name), SETTINGS, 28, part, cache_settings=cached)
        assert not list(entry_files(tmp_path / "cache"))
        return
    first, second = (
        load_file("video", str(media_dir / name), SETTINGS, 28, part, cache_settings=cached) for _ in range(2)
    )
    assert same(first, plain) and same(second, plain) and decoded == [name]


def test_an_entry_is_about_content_part_and_settings(media_dir: Path, tmp_path: Path, decoded: list[str]) -> None:
    cached = CacheSettings(folder=tmp_path / "cache")
    one, other = tmp_path / "a.mkv", tmp_path / "b.mkv"
    shutil.copyfile(media_dir / "flipping_a_pancake.mkv", one)
    shutil.copyfile(one, other)

    def load(path: Path, settings: MediaSettings = SETTINGS, factor: int = 28, part: Part = WHOLE) -> DecodedMedia:
        return load_file("video", str(path), settings, factor, part, cache_settings=cached)

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
    cached, part = CacheSettings(folder=tmp_path / "cache"), Part(folder_fps=3.0)
    folder = write_folder(tmp_path / "a", [coloured(number) for number in range(9)])

    def load(path: Path, part: Part = part) -> DecodedMedia:
        found = load_file("video", str(path), SETTINGS, 28, part, cache_settings=cached)
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
        load_file("video", str(folder), SETTINGS, 28, part, cache_settings=cached)
    (folder / "00001.png").unlink()
    with pytest.raises(SampleError, match="begins with number 2"):
        load_file("video", str(folder), SETTINGS, 28, part, cache_settings=cached)


def test_a_file_that_changes_meanwhile_is_not_kept(media_dir: Path, tmp_path: Path, monkeypatch: Any) -> None:
    path, cached = tmp_path / "a.mkv", CacheSettings(folder=tmp_path / "cache")
    shutil.copyfile(media_dir / "flipping_a_pancake.mkv", path)

    def decode(*arguments: Any) -> DecodedMedia:
        shutil.copyfile(media_dir / "nasa_13013.mp4", path)
        return decode_file(*arguments)

    monkeypatch.setattr(frame_cache, "decode_file", decode)
    load_file("video", str(path), SETTINGS, 28, cache_settings=cached)
    assert not list(entry_files(tmp_path / "cache"))


def test_images_and_subtitles_are_kept(tmp_path: Path, media_dir: Path, decoded: list[str]) -> None:
    from PIL import Image

    cached = CacheSettings(folder=tmp_path / "cache")
    Image.effect_noise((90, 70), 80).convert("RGB").save(tmp_path / "a.png")
    first, second = (load_file("image", str(tmp_path / "a.png"), SETTINGS, 28, cache_settings=cached) for _ in range(2))
    assert same(first, second) and decoded == ["a.png"]
    words, video = tmp_path / "a.srt", str(media_dir / "flipping_a_pancake.mkv")
    for text in ("Flip it.", "Eat it."):
        words.write_text(f"1\n00:00:01,000 --> 00:00:02,000\n{text}\n")
        for _ in range(2):
            media = load_file("video", video, SETTINGS, 28, subtitles=str(words), cache_settings=cached)
            assert [cue.text for cue in media.subtitles] == [text]
    assert decoded == ["a.png", "flipping_a_pancake.mkv", "flipping_a_pancake.mkv"]


def test_a_cache_that_cannot_be_written_costs_no_frames(
    media_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vlm_pg.cache.store import Store

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Store, "write", full)
    cached, video = CacheSettings(folder=tmp_path / "cache"), str(media_dir / "video_90.mov")
    with pytest.warns(UserWarning, match=r"cannot be written \(No space left on device\): frames are decoded again"):
        media = load_file("video", video, SETTINGS, 28, cache_settings=cached)
    assert same(media, decode_file("video", video, SETTINGS, 28))


@pytest.mark.parametrize("outcome", Outcome)
def test_only_a_full_cache_is_called_full(
    media_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, outcome: Outcome
) -> None:
    """One in which others make room at this moment is not; in neither case are the frames called cached."""
    monkeypatch.setattr(frame_cache.Store, "write", lambda *_: outcome)
    cached, video = CacheSettings(folder=tmp_path / "cache"), str(media_dir / "video_90.mov")
    assert frame_cache.store_file("video", video, SETTINGS, 28, WHOLE, "", cached, None) == (outcome is Outcome.STORED)
    warned = [str(one.message) for one in recwarn if "cache" in str(one.message)]
    assert len(warned) == (outcome is Outcome.FULL) and all("has no room for more frames" in one for one in warned)


@pytest.mark.usefixtures("kept_templates")
@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_stores_frames(media_dir: Path, tmp_path: Path, workers: int) -> None:
    cached, settings = CacheSettings(folder=tmp_path / "cache"), SETTINGS.model_copy(update={"workers": workers})
    refs = [MediaRef("video", name) for name in ("flipping_a_pancake.mkv", "video_90.mov", "corrupted.mp4")]
    with MediaLoader(settings, media_dir) as plain, MediaLoader(settings, media_dir, cache_settings=cached) as keeping:
        expected = plain.load(refs)
        for _ in range(2):
            got = keeping.load(refs)
            assert all(same(a, b) for a, b in zip(got[:2], expected[:2], strict=True))  # type: ignore[arg-type]
            assert isinstance(got[2], SampleError) and str(got[2]) == str(expected[2])
    assert len(list(entry_files(tmp_path / "cache"))) == 2


def test_a_folder_that_is_no_cache_is_refused_at_once(media_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds files and is no cache"):
        MediaLoader(SETTINGS, media_dir, cache_settings=CacheSettings(folder=tmp_path))


FEW = MediaSettings(max_frames=4, max_pixels=20 * 28 * 28, workers=0)


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    yield
    made_with.cache_clear()
    frame_cache._store.cache_clear()


def facts(kind: MadeOf, decoder: str = "auto", device: str = "cpu") -> Any:
    made_with.cache_clear()
    return made_with(kind, decoder, device)


def of_package(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    version = frame_cache.version_of
    return lambda patched: patched.setattr(frame_cache, "version_of", lambda one: "0" if one == name else version(one))


FFMPEG = {**av.library_versions, "libswscale": (1, 2, 3)}
# Whether images, and whether videos, depend on it.
CHANGES: dict[str, tuple[bool, bool, Callable[[pytest.MonkeyPatch], Any]]] = {
    "our code": (True, True, lambda patched: patched.setattr(frame_cache, "source_digest", lambda files: "edited")),
    "the machine": (True, True, lambda patched: patched.setattr(platform, "machine", lambda: "aarch64")),
    "qwen-vl-utils": (True, True, of_package("qwen-vl-utils")),
    "Pillow": (True, False, of_package("pillow")),
    "Pillow's libraries": (True, False, lambda patched: patched.setattr(features, "version", lambda name: "0")),
    "PyAV": (False, True, of_package("av")),
    "a library of FFmpeg": (False, True, lambda patched: patched.setattr(av, "library_versions", FFMPEG)),
    "FFmpeg": (False, True, lambda patched: patched.setattr(av, "ffmpeg_version_info", "n9")),
    "torch": (False, True, of_package("torch")),
    "instructions": (
        *(False, True),
        lambda patched: patched.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT"),
    ),
    "a decoder that is not requested": (False, False, of_package("decord")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_one_fact_is_another_key_for_what_depends_on_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of a folder are decoded as images are and scaled as videos are, and never by FFmpeg."""
    of_images, of_videos, change = CHANGES[name]
    before = facts("image"), facts("video"), facts("folder")
    change(monkeypatch)
    assert (facts("image") != before[0], facts("video") != before[1]) == (of_images, of_videos)
    of_folders = of_images or (of_videos and name not in ("PyAV", "FFmpeg", "a library of FFmpeg"))
    assert (facts("folder") != before[2]) == of_folders


def test_what_is_made_with_something_else_is_not_taken(
    media_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor lost: whoever has the first again finds its own."""
    cache, picture = CacheSettings(folder=tmp_path / "cache"), tmp_path / "a.png"
    Image.effect_noise((90, 70), 80).convert("RGB").save(picture)
    for kind, path, name in (("video", media_dir / "video_90.mov", "FFmpeg"), ("image", picture, "Pillow")):
        counts = []
        for changed in (False, True, False, True):
            with monkeypatch.context() as patched:
                if changed:
                    CHANGES[name][2](patched)
                made_with.cache_clear()
                load_file(kind, str(path), FEW, 28, cache_settings=cache)  # type: ignore[arg-type]
            counts.append(len(list(entry_files(tmp_path / "cache"))))
        assert counts == ([1, 2, 2, 2] if kind == "video" else [3, 4, 4, 4])


def test_our_code_is_all_of_this_package_by_its_content(tmp_path: Path) -> None:
    files = sorted(Path(frame_cache.__file__).parent.glob("*.py"))
    assert {"sampling.py", "upright.py", "decode_file.py", "seeking.py"} <= {file.name for file in files}
    assert facts("video")["code"] == source_digest(files)
    copies = [tmp_path / file.name for file in files]
    for copy, file in zip(copies, files, strict=True):
        copy.write_bytes(file.read_bytes())
    found = [source_digest(reversed(copies))]
    assert found[0] == source_digest(files), "wherever it lies, in whatever order it is listed"
    copies[3].write_bytes(copies[3].read_bytes() + b"#")
    found.append(source_digest(copies))
    copies[4].rename(tmp_path / "other.py")
    found.append(source_digest([*copies[:4], tmp_path / "other.py", *copies[5:]]))
    assert len(set(found)) == 3


@pytest.fixture
def torchcodec(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What its libraries say stands in here, as its wheel links none and takes those of the system."""
    versions, core = {"libavcodec": "61.3.100"}, ModuleType("torchcodec._core")
    core.get_ffmpeg_library_versions = lambda: dict(versions)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchcodec", ModuleType("torchcodec"))
    monkeypatch.setitem(sys.modules, "torchcodec._core", core)
    return versions


def test_a_decoder_is_more_than_its_version(torchcodec: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = [facts("video", "torchcodec"), facts("video"), facts("video", "decord")]
    torchcodec["libavcodec"] = "62.11.100"
    found.append(facts("video", "torchcodec"))
    of_package("torchcodec")(monkeypatch)
    found.append(facts("video", "torchcodec"))
    of_package("decord")(monkeypatch)
    found.append(facts("video", "decord"))
    assert all(one != other for index, one in enumerate(found) for other in found[:index])


def test_a_gpu_that_decodes_is_named_by_its_driver(
    torchcodec: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CUDA is not started for that, unless there is no other way to know."""
    requested: list[int] = []
    monkeypatch.setattr(video_decoders, "gpu_number", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: requested.append(number) or f"GPU {number}")
    monkeypatch.setattr(machine, "_GPUS", tmp_path / "gpus")
    monkeypatch.setattr(machine, "_DRIVERS", (tmp_path / "version",))
    found = []
    for model, driver in (("H100", "580"), ("H200", "580"), ("H200", "590")):
        (tmp_path / "gpus" / "0000:01").mkdir(parents=True, exist_ok=True)
        (tmp_path / "gpus" / "0000:01" / "information").write_text(f"Model: \t {model}\nIRQ: 5\n")
        (tmp_path / "version").write_text(driver)
        found.append(facts("video", "torchcodec", "cuda"))
    assert not requested and found[1]["gpu"] == ["H200", "580"]
    (tmp_path / "gpus" / "0000:01" / "information").unlink()
    found += [facts("video", "torchcodec", "cuda"), facts("video", "torchcodec")]
    assert requested == [3] and all(one != other for index, one in enumerate(found) for other in found[:index])


def cached(loader: MediaLoader, refs: list[MediaRef]) -> list[bool]:
    """One after the other."""
    found = []
    for ref in refs:
        one = loader.store(ref)
        assert not isinstance(one, SampleError)
        found.append(one.result())
    return found


@pytest.mark.usefixtures("kept_templates")
@pytest.mark.filterwarnings("ignore:cache.folder")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_full_cache_is_told_of_wherever_it_is_noticed(media_dir: Path, tmp_path: Path, workers: int) -> None:
    """Once, by the process that has a terminal."""
    settings = FEW.model_copy(update={"workers": workers})
    refs = [MediaRef("video", f"video_{turn}.mov") for turn in (90, 180, 270)]
    with MediaLoader(FEW, media_dir, cache_settings=CacheSettings(folder=tmp_path / "all")) as loader:
        assert cached(loader, refs) == [True] * 3
    size = max(stored.size for stored in entry_files(tmp_path / "all"))
    small = CacheSettings(folder=tmp_path / "cache", max_gb=1.5 * size / 2**30)
    with MediaLoader(settings, media_dir, cache_settings=small) as loader:
        with pytest.warns(UserWarning, match=r"has no room for more frames within cache\.max_gb") as warned:
            found = cached(loader, refs)
        assert found == [True, False, False] and (len(warned) == 1 or not workers)
        assert all(not isinstance(one, SampleError) for one in loader.load(refs))
