"""With frames kept on disk nothing is read that would not be read without, and odd things in a cache cost no sample."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.hostile_files import base_files
from tests.support.hostile_paths import REFUSALS, make_root
from tests.support.watch import Doorbell, OpenedFiles, own_descriptors
from vlm_pg.cache.eviction import EntryFile, Pruned, entry_files, prune
from vlm_pg.cache.settings import CacheSettings
from vlm_pg.cache.store import MARK, Entry, read_entry, serialized, verify
from vlm_pg.errors import ConfigError, SampleError
from vlm_pg.media import frame_cache
from vlm_pg.media.frame_cache import content_of
from vlm_pg.media.loader import MediaLoader, decoding_pool
from vlm_pg.media.pool import WorkerPool
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import DecodedMedia, MediaKind, MediaRef

SETTINGS = MediaSettings(max_frames=4, max_pixels=40 * 28 * 28, workers=0)
# In a worker, which may take little: what reads or unpacks something endless is refused as out of memory.
IN_WORKER = SETTINGS.model_copy(update={"workers": 1, "worker_memory_bytes": 256 << 20})
ENDLESS = 100 << 30


@pytest.fixture(autouse=True)
def own_stores() -> None:
    frame_cache._store.cache_clear()
    content_of.cache_clear()


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = decoding_pool(IN_WORKER, CacheSettings(folder=Path("any")))
    assert pool is not None
    with pool:
        yield pool


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Real media by ending."""
    bases = base_files(tmp_path_factory.mktemp("bases"))
    names = {".mp4": "libx264-mp4-base.mp4", ".MKV": "libx264-matroska-base.mkv", ".png": "picture.png"}
    return {suffix: bases[name] for suffix, name in names.items()}


@pytest.fixture
def root(tmp_path: Path, contents: dict[str, bytes]) -> Path:
    return make_root(tmp_path / "root", contents)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def keeping(root: Path, cache: Path, settings: MediaSettings = SETTINGS, **options: Any) -> MediaLoader:
    return MediaLoader(settings, root, cache_settings=CacheSettings(folder=cache), **options)


def load(loader: MediaLoader, path: str, kind: MediaKind = "video") -> DecodedMedia | SampleError:
    (result,) = loader.load([MediaRef(kind, path)])
    return result


def refused(loader: MediaLoader, path: str, kind: MediaKind = "video") -> tuple[str, str]:
    fault = load(loader, path, kind)
    assert isinstance(fault, SampleError), path
    return fault.reason, str(fault)


def same(left: DecodedMedia | SampleError, right: DecodedMedia | SampleError) -> bool:
    assert isinstance(left, DecodedMedia) and isinstance(right, DecodedMedia), (left, right)
    return np.array_equal(left.frames, right.frames) and replace(left, frames=0) == replace(right, frames=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_filled", [False, True])
def test_paths_are_refused_as_without_a_cache(root: Path, cache: Path, is_filled: bool) -> None:
    """Also where the cache holds what they lead to: the same content has an allowed name too."""
    plain, loader = MediaLoader(SETTINGS, root), keeping(root, cache)
    if is_filled:
        for path, kind in (("a.mp4", "video"), ("deep/B.MKV", "video"), ("c.png", "image")):
            assert isinstance(load(loader, path, kind), DecodedMedia)  # type: ignore[arg-type]
        assert len(list(entry_files(cache))) == 3
    watched = OpenedFiles(root.parent)
    for kind, path, reason, _ in REFUSALS:
        assert refused(loader, path, kind) == refused(plain, path, kind)  # type: ignore[arg-type]
        assert refused(loader, path, kind)[0] == reason  # type: ignore[arg-type]
    assert "outside.mp4" not in watched.names()
    watched.close()
    assert len(list(entry_files(cache))) == 3 * is_filled


def test_a_name_that_becomes_a_link_is_judged_anew(root: Path, cache: Path) -> None:
    loader = keeping(root, cache)
    for path in ("a.mp4", "deep/B.MKV"):
        assert isinstance(load(loader, path), DecodedMedia)
    (root / "a.mp4").unlink()
    (root / "a.mp4").symlink_to(root.parent / "outside.mp4")
    shutil.move(root / "deep", root.parent / "moved")
    (root / "deep").symlink_to(root.parent / "moved")
    for path in ("a.mp4", "deep/B.MKV"):
        assert refused(loader, path)[0] == "outside_root"


@pytest.mark.parametrize("path", ["a.mp4", "none.mp4"])
def test_urls_are_judged_as_without_a_cache(root: Path, cache: Path, path: str) -> None:
    door = Doorbell()
    url = f"http://127.0.0.1:{door.port}/{path}"
    with keeping(root, cache, allow_remote=True) as loader, MediaLoader(SETTINGS, root, allow_remote=True) as plain:
        load(loader, "a.mp4")
        reason, message = refused(loader, url)
        assert (reason, message) == refused(plain, url) and reason == "download_failed" and "not public" in message
        for other in ("http://user:secret@127.0.0.1/a.mp4", f"file://{root.parent}/outside.mp4", "ftp://x/a.mp4"):
            assert refused(loader, other) == refused(plain, other)
    assert refused(keeping(root, cache), url)[0] == "remote_media" and door.rings == 0
    door.close()
    assert len(list(entry_files(cache))) == 1


def forged(entry: Entry, stored: EntryFile, tensors: Any = None, **about: Any) -> bytes:
    """An entry that describes something else, with the checksum of that."""
    content = serialized(stored.kind, stored.key, Entry(tensors or entry.tensors, {**entry.about, **about}))
    assert content is not None
    return content


def zstd(size: int) -> dict[str, np.ndarray]:
    import pyarrow

    return {"packed": np.frombuffer(pyarrow.compress(bytes(size), codec="zstd", asbytes=True), dtype=np.uint8)}


def headed(header: bytes, body: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + body


def forgeries(entry: Entry, stored: EntryFile) -> Iterator[tuple[str, bytes]]:
    """Contents of an entry's file that no store writes."""
    yield "empty", b""
    yield "header of 2^63", struct.pack("<Q", 1 << 63) + b"{}"
    yield "header of 100 MB", headed(b" " * 100_000_000)
    yield "offsets beyond", headed(json.dumps({"packed": {"dtype": "U8", "shape": [1 << 50],
                                                         "data_offsets": [0, 1 << 50]}}).encode())  # fmt: skip
    yield "negative offsets", headed(b'{"packed":{"dtype":"U8","shape":[-1],"data_offsets":[-5,-1]}}')
    for name, text in (("brackets", "[" * 200_000), ("digits", "9" * 100_000), ("list", "[]"), ("null", "null")):
        yield f"metadata is {name}", headed(json.dumps({"__metadata__": {"entry": text}}).encode())
        yield f"header is {name}", headed(text.encode())
    yield "about is a list", headed(json.dumps({"__metadata__": {"entry": json.dumps(
        {"kind": stored.kind, "key": stored.key, "about": [1], "checksum": "0"})}}).encode())  # fmt: skip
    frames, count = entry.about["shape"], entry.about["shape"][0]
    for shape in ([1 << 40, 3, 28, 28], [0, 3, 28, 28], [-1, 3, -28, 28], [count, 3, 28.0, 28], "4", None, [True] * 4,
                  [count, 1, 28, 28], frames[:3], [count, 3, frames[2] + 1, frames[3]], [10**30] * 4,
                  [count, 3, 56, 28 * 100_000]):  # fmt: skip
        yield f"shape {shape}", forged(entry, stored, shape=shape)
    yield "a bomb", forged(entry, stored, zstd(512 << 20))
    yield "a stated bomb", forged(entry, stored, zstd(512 << 20), shape=[count, 3, 28, (512 << 20) // 84 // count])
    yield "too little", forged(entry, stored, zstd(10))
    yield "no zstd", forged(entry, stored, {"packed": np.arange(50, dtype=np.uint8)})
    yield "no tensor", forged(entry, stored, {"other": np.arange(50, dtype=np.uint8)})
    yield "floats", forged(entry, stored, {"packed": np.ones((3, 5), np.float32)})
    odd_cue = {"start": "0", "end": 1.0, "text": "a"}
    for odd in ({"kind": "image"}, {"frame_seconds": []}, {"frame_seconds": ["0"] * count}, {"frame_seconds": None},
                {"sampled_fps": "x"}, {"sampled_fps": 1e999}, {"decoder": 3}, {"subtitles": [{"start": 0}]},
                {"subtitles": [odd_cue]}, {"subtitles": 7}, {"subtitles": [None]}):  # fmt: skip
        yield f"{odd}", forged(entry, stored, **odd)


def test_forged_entries_are_made_anew(root: Path, cache: Path, pool: WorkerPool) -> None:
    """Within little memory; nothing is believed that cannot be what was asked for."""
    with keeping(root, cache, IN_WORKER, pool=pool) as loader:
        right = load(loader, "a.mp4")
        [stored] = entry_files(cache)
        whole = stored.path.read_bytes()
        entry = read_entry(stored.path, stored.kind, stored.key)
        forgotten = forgeries(entry, stored)
        count = 0
        for name, content in forgotten:
            stored.path.write_bytes(content)
            assert same(load(loader, "a.mp4"), right), name
            assert stored.path.read_bytes() == whole, name
            count += 1
        assert count > 30


def sparse(path: Path, head: bytes = b"", size: int = ENDLESS) -> None:
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size)


def endless(path: Path) -> None:
    """A file of 100 GB that its header agrees with."""
    header = {"packed": {"dtype": "U8", "shape": [ENDLESS], "data_offsets": [0, ENDLESS]}}
    content = headed(json.dumps({"__metadata__": {"entry": "{}"}, **header}).encode())
    sparse(path, content, len(content) + ENDLESS)


STANDS_THERE: dict[str, Callable[[Path, Path], None]] = {
    "a link to a file": lambda path, other: path.symlink_to(other),
    "a link to nothing": lambda path, other: path.symlink_to(other.parent / "none"),
    "a link to itself": lambda path, other: path.symlink_to(path),
    "a pipe": lambda path, other: os.mkfifo(path),
    "endless nothing": lambda path, other: sparse(path),
    "endless entry": lambda path, other: endless(path),
}


@pytest.mark.parametrize("what", STANDS_THERE)
def test_what_stands_in_an_entrys_place_is_not_read(
    root: Path, cache: Path, tmp_path: Path, pool: WorkerPool, what: str
) -> None:
    other = tmp_path / "outside" / "precious"
    other.parent.mkdir()
    with keeping(root, cache, IN_WORKER, pool=pool) as loader:
        right = load(loader, "a.mp4")
        [stored] = entry_files(cache)
        whole = stored.path.read_bytes()
        other.write_bytes(whole)
        watched = OpenedFiles(other.parent)
        before = own_descriptors()
        for ask in ("load", "verify"):
            stored.path.unlink()
            STANDS_THERE[what](stored.path, other)
            if ask == "load":
                assert same(load(loader, "a.mp4"), right)
                assert stored.path.is_file() and not stored.path.is_symlink()
                assert stored.path.read_bytes() == whole
            else:
                assert [well for _, well in verify(cache)] == [False] and not stored.path.is_symlink()
        assert own_descriptors() == before and watched.names() == set()
        watched.close()
        assert [path.name for path in other.parent.iterdir()] == ["precious"]


def test_a_folder_in_an_entrys_place_stays_and_costs_no_frames(root: Path, cache: Path) -> None:
    loader = keeping(root, cache)
    right = load(loader, "a.mp4")
    [stored] = entry_files(cache)
    stored.path.unlink()
    stored.path.mkdir()
    (stored.path / "mine").write_text("precious")
    before = own_descriptors()
    with pytest.warns(UserWarning, match="cannot be written"):
        assert same(load(loader, "a.mp4"), right)
    assert own_descriptors() == before and not list(entry_files(cache)) and not list(verify(cache))
    assert prune(cache, 0) == Pruned(0, 0, 0) and (stored.path / "mine").read_text() == "precious"


@pytest.mark.parametrize("depth", [0, 1])
def test_nothing_is_kept_behind_a_link(root: Path, cache: Path, tmp_path: Path, depth: int) -> None:
    loader = keeping(root, cache)
    right = load(loader, "a.mp4")
    [stored] = entry_files(cache)
    folder = stored.path.parents[depth]
    shutil.move(folder, tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    moved = {path: path.stat().st_mtime_ns for path in (tmp_path / "elsewhere").rglob("*")}
    assert not list(entry_files(cache))
    with pytest.warns(UserWarning, match="a link that leads elsewhere"):
        assert same(load(loader, "a.mp4"), right)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "elsewhere").rglob("*")} == moved


@pytest.mark.parametrize("name", [".prune.lock", ".room"])
def test_lock_and_account_are_no_way_to_another_file(root: Path, cache: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "precious").write_text("mine")
    for make in (lambda path: path.symlink_to(tmp_path / "precious"), os.mkfifo, os.mkdir):
        frame_cache._store.cache_clear()
        load(keeping(root, cache), "a.mp4")
        [stored] = entry_files(cache)
        stored.path.unlink()
        (cache / ".room").unlink()
        lock = cache / name
        lock.unlink(missing_ok=True)
        make(lock)
        frame_cache._store.cache_clear()
        loader = keeping(root, cache)
        if make is os.mkfifo and name == ".prune.lock":
            assert isinstance(load(loader, "a.mp4"), DecodedMedia)
        else:
            with pytest.warns(UserWarning, match="cannot be written"):
                assert isinstance(load(loader, "a.mp4"), DecodedMedia)
        lock.rmdir() if make is os.mkdir else lock.unlink()
        lock.touch()
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize("make", [os.mkfifo, sparse, os.mkdir], ids=["pipe", "endless", "folder"])
def test_an_odd_mark_is_refused_and_not_waited_for(root: Path, cache: Path, make: Callable[[Path], None]) -> None:
    cache.mkdir()
    make(cache / MARK)
    with pytest.raises(ConfigError, match="cannot be used"):
        keeping(root, cache)


@pytest.mark.parametrize("kind", ["video", "image", "subtitles"])
def test_endless_files_are_refused_as_without_a_cache(root: Path, cache: Path, pool: WorkerPool, kind: str) -> None:
    """By their size or first bytes: they are not read through, which would take minutes or all memory."""
    name = {"video": "long.mp4", "image": "long.jpg", "subtitles": "long.srt"}[kind]
    sparse(root / name, b"\xff\xd8\xff" if kind == "image" else b"")
    ref = MediaRef("image" if kind == "image" else "video", name)
    if kind == "subtitles":
        ref = MediaRef("video", "a.mp4", subtitles=name)
    with MediaLoader(IN_WORKER, root, pool=pool) as plain, keeping(root, cache, IN_WORKER, pool=pool) as loader:
        answers = [one.load([ref])[0] for one in (plain, loader)]
    assert all(isinstance(answer, SampleError) for answer in answers) and str(answers[0]) == str(answers[1])
    expected = {"video": "corrupt_media", "image": "image_too_large", "subtitles": "bad_subtitles"}[kind]
    assert {answer.reason for answer in answers if isinstance(answer, SampleError)} == {expected}


def test_subtitles_are_read_as_their_name_says(root: Path, cache: Path) -> None:
    for name in ("a.srt", "a.vtt"):
        (root / name).write_text("1\n00:00:00,000 --> 00:00:01,000\nHello.\n")
    loader = keeping(root, cache)
    (good,) = loader.load([MediaRef("video", "a.mp4", subtitles="a.srt")])
    (bad,) = loader.load([MediaRef("video", "a.mp4", subtitles="a.vtt")])
    assert isinstance(good, DecodedMedia) and isinstance(bad, SampleError) and bad.reason == "bad_subtitles"
