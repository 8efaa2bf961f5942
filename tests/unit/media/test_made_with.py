"""What frames are made with is part of their key: one fact at a time, each makes them anew."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import av
import pytest
import torch
from PIL import Image, features

from vlm_pg.cache import provenance as machine
from vlm_pg.cache.eviction import places
from vlm_pg.cache.provenance import source_digest
from vlm_pg.cache.settings import CacheSettings
from vlm_pg.errors import SampleError
from vlm_pg.media import frame_cache, video_decoders
from vlm_pg.media.frame_cache import MadeOf, load_file, made_with
from vlm_pg.media.loader import MediaLoader
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import MediaRef

SETTINGS = MediaSettings(max_frames=4, max_pixels=20 * 28 * 28, workers=0)


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    yield
    made_with.cache_clear()
    frame_cache._store.cache_clear()


def facts(kind: MadeOf, decoder: str = "auto", device: str = "cpu") -> Any:
    made_with.cache_clear()
    return made_with(kind, decoder, device)


def of_package(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    version = frame_cache._version
    return lambda patched: patched.setattr(frame_cache, "_version", lambda one: "0" if one == name else version(one))


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
    "a decoder that is not asked": (False, False, of_package("decord")),
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
                load_file(kind, str(path), SETTINGS, 28, kept=cache)  # type: ignore[arg-type]
            counts.append(len(list(places(tmp_path / "cache"))))
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
    said, core = {"libavcodec": "61.3.100"}, ModuleType("torchcodec._core")
    core.get_ffmpeg_library_versions = lambda: dict(said)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchcodec", ModuleType("torchcodec"))
    monkeypatch.setitem(sys.modules, "torchcodec._core", core)
    return said


def test_a_decoder_is_more_than_its_version(torchcodec: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = [facts("video", "torchcodec"), facts("video"), facts("video", "decord")]
    torchcodec["libavcodec"] = "62.11.100"
    found.append(facts("video", "torchcodec"))
    of_package("torchcodec")(monkeypatch)
    found.append(facts("video", "torchcodec"))
    of_package("decord")(monkeypatch)
    found.append(facts("video", "decord"))
    assert all(one != other for place, one in enumerate(found) for other in found[:place])


def test_a_gpu_that_decodes_is_named_by_its_driver(
    torchcodec: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CUDA is not started for that, unless there is no other way to know."""
    asked: list[int] = []
    monkeypatch.setattr(video_decoders, "gpu_number", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: asked.append(number) or f"GPU {number}")
    monkeypatch.setattr(machine, "_GPUS", tmp_path / "gpus")
    monkeypatch.setattr(machine, "_DRIVERS", (tmp_path / "version",))
    found = []
    for model, driver in (("H100", "580"), ("H200", "580"), ("H200", "590")):
        (tmp_path / "gpus" / "0000:01").mkdir(parents=True, exist_ok=True)
        (tmp_path / "gpus" / "0000:01" / "information").write_text(f"Model: \t {model}\nIRQ: 5\n")
        (tmp_path / "version").write_text(driver)
        found.append(facts("video", "torchcodec", "cuda"))
    assert not asked and found[1]["gpu"] == ["H200", "580"]
    (tmp_path / "gpus" / "0000:01" / "information").unlink()
    found += [facts("video", "torchcodec", "cuda"), facts("video", "torchcodec")]
    assert asked == [3] and all(one != other for place, one in enumerate(found) for other in found[:place])


def kept(loader: MediaLoader, refs: list[MediaRef]) -> list[bool]:
    """One after the other."""
    found = []
    for ref in refs:
        one = loader.keep(ref)
        assert not isinstance(one, SampleError)
        found.append(one.result())
    return found


@pytest.mark.filterwarnings("ignore:cache.folder")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_full_cache_is_told_of_wherever_it_is_noticed(media_dir: Path, tmp_path: Path, workers: int) -> None:
    """Once, by the process that has a terminal."""
    settings = SETTINGS.model_copy(update={"workers": workers})
    refs = [MediaRef("video", f"video_{turn}.mov") for turn in (90, 180, 270)]
    with MediaLoader(SETTINGS, media_dir, kept=CacheSettings(folder=tmp_path / "all")) as loader:
        assert kept(loader, refs) == [True] * 3
    size = max(place.size for place in places(tmp_path / "all"))
    small = CacheSettings(folder=tmp_path / "cache", max_gb=1.5 * size / 2**30)
    with MediaLoader(settings, media_dir, kept=small) as loader:
        with pytest.warns(UserWarning, match=r"has no room for more frames within cache\.max_gb") as told:
            found = kept(loader, refs)
        assert found == [True, False, False] and (len(told) == 1 or not workers)
        assert all(not isinstance(one, SampleError) for one in loader.load(refs))
