"""Whatever lies in a media folder costs one sample at most: a corpus of odd files, and seeded damage to healthy ones.

Of every file: a typed answer, no other file opened, no connection, bounded memory and processor time (not the clock's,
which other programs take part in); of all together: no descriptor, process or temporary file left.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.clip_table import table
from tests.support.clips import write
from tests.support.hostile_files import base_files, bombs, cut_files, growing, late_stream, odd_metadata, renamed_files
from tests.support.hostile_scripts import scripts
from tests.support.mutations import mutation
from tests.support.watch import Doorbell, OpenedFiles, cpu_seconds, descriptors, memory_bytes, own_descriptors
from vlm_pg.cache.settings import CacheSettings
from vlm_pg.errors import SampleError
from vlm_pg.media.loader import MediaLoader
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import MediaRef

pytestmark = pytest.mark.matrix

IMAGES = (".jpg", ".jpeg", ".png", ".webp")
CPU_SECONDS = 30.0
MEMORY_BYTES = 2 << 30


class Guarded:
    """A loader under watch. ``load`` asserts what holds of every file, ``check_end`` what holds of all."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, is_kept: bool = False):
        self.root, self.outside, temporary = folder / "root", folder / "outside", folder / "temporary"
        for path in (self.root, self.outside, temporary):
            path.mkdir()
        monkeypatch.setenv("TMPDIR", str(temporary))
        self.temporary = temporary
        self.door = Doorbell()
        canary = next(iter(base_files(folder / "bases").values()))
        for path in (self.outside / "canary.mp4", self.root / "canary.mp4"):
            path.write_bytes(canary)
        (self.root / "link.mp4").symlink_to(self.outside / "canary.mp4")
        self.targets = ["canary.mp4", "link.mp4", str(self.outside / "canary.mp4"), "../outside/canary.mp4"]
        self.opened = [OpenedFiles(self.outside), OpenedFiles(self.root)]
        self.before = own_descriptors()
        settings = MediaSettings(
            workers=1, deadline_seconds=600, worker_memory_bytes=MEMORY_BYTES, max_frames=8, max_pixels=32 * 28 * 28
        )
        self.loads = 2 if is_kept else 1
        self.loader = MediaLoader(
            settings, self.root, cache_settings=CacheSettings(folder=folder / "cache") if is_kept else None
        )
        self.reasons: Counter[str] = Counter()
        self.slowest, self.largest = 0.0, 0
        self.started_descriptors: int | None = None

    def load(self, name: str, data: bytes) -> None:
        path = self.root / name
        path.write_bytes(data)
        for opened in self.opened:
            opened.names()
        said = {self._load_once(name) for _ in range(self.loads)}
        assert len(said) == 1, f"{name}: another answer from the cache: {said}"
        path.unlink()

    def _load_once(self, name: str) -> str:
        pid = self._worker()
        began = cpu_seconds(pid) if self.started_descriptors is not None else None
        (result,) = self.loader.load([MediaRef("image" if name.lower().endswith(IMAGES) else "video", name)])
        reason = result.reason if isinstance(result, SampleError) else "decoded"
        self.reasons[reason] += 1
        now = self._worker()
        if now == pid and began is not None:
            self.slowest = max(self.slowest, cpu_seconds(pid) - began)
        if now == pid:
            self.largest = max(self.largest, memory_bytes(pid, "VmHWM"))
            if self.started_descriptors is None:
                self.started_descriptors = len(descriptors(pid))
        assert self.opened[0].names() == set(), f"{name}: a file outside of the root was opened"
        assert self.opened[1].names() <= {name}, f"{name}: another file was opened"
        assert self.door.rings == 0, f"{name}: a connection was made"
        return str(result) if isinstance(result, SampleError) else hashlib.sha256(result.frames).hexdigest()

    def _worker(self) -> int:
        """The process that decodes next."""
        pool = self.loader._pool
        assert pool is not None
        pool.start()
        while not pool.pids:
            time.sleep(0.001)
        return pool.pids[0]

    def check_end(self, most_seconds: float | None = None) -> None:
        assert most_seconds is None or self.slowest <= most_seconds
        pid = self._worker()
        assert len(descriptors(pid)) <= (self.started_descriptors or 0), descriptors(pid)
        self.loader.close()
        assert not Path(f"/proc/{pid}").exists()
        assert list(self.temporary.iterdir()) == []
        assert own_descriptors() == self.before
        # what libraries and the interpreter hold is not counted by the limit
        assert self.largest <= MEMORY_BYTES + (1 << 30)
        self.door.close()
        for opened in self.opened:
            opened.close()
        print(f"\n{sum(self.reasons.values())} loads, {dict(self.reasons)}, slowest {self.slowest:.1f} s of a core, "
              f"largest {self.largest / 2**30:.2f} GiB")  # fmt: skip


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Guarded:
    return Guarded(tmp_path, monkeypatch)


@pytest.fixture
def keeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Guarded:
    """With a cache, where each file is asked for twice."""
    return Guarded(tmp_path, monkeypatch, is_kept=True)


def corpus(guarded: Guarded, folder: Path) -> Iterator[tuple[str, bytes]]:
    """All odd files, seeded by nothing but their own making."""
    folder.mkdir()
    bases = base_files(folder)
    yield from bases.items()
    url = f"http://127.0.0.1:{guarded.door.port}/x.mp4"
    yield from scripts(guarded.targets, url)
    yield from bombs(bases)
    yield from odd_metadata(bases, folder)
    yield "growing.mkv", growing(folder, 7000)
    yield "growing-more.mkv", growing(folder, 9000)
    yield "late.mkv", late_stream(folder)
    yield from cut_files(bases)
    yield from renamed_files(bases)
    yield os.fsdecode(b"caf\xe9.mp4"), bases["libx264-mp4-base.mp4"]
    yield os.fsdecode(b"\xff\xfe.png"), bases["picture.png"]
    yield "new\nline \x1b[31mred.mp4", b"nothing"
    yield "concat:a|b.mp4", bases["libx264-mp4-base.mp4"]
    yield "%03d.mp4", bases["libx264-mp4-base.mp4"]


def run(guarded: Guarded, files: Iterable[tuple[str, bytes]]) -> int:
    guarded.load("warm-up.png", b"")
    guarded.load("warm-up.mp4", (guarded.root / "canary.mp4").read_bytes())
    count = 0
    for name, data in files:
        guarded.load(name, data)
        count += 1
    return count


def test_the_corpus_with_frames_kept(keeping: Guarded, tmp_path: Path):
    assert run(keeping, corpus(keeping, tmp_path / "made")) >= 500
    keeping.check_end()


def test_the_corpus(guarded: Guarded, tmp_path: Path):
    count = run(guarded, corpus(guarded, tmp_path / "made"))
    for clip in table():
        guarded.load(f"{clip.name}.mkv", write(clip, tmp_path).read_bytes())
    assert count + len(table()) >= 500
    guarded.check_end(CPU_SECONDS)


def mutations(folder: Path, numbers: Iterable[int]) -> Iterator[tuple[str, bytes]]:
    bases = base_files(folder)
    for number in numbers:
        name, data = mutation(bases, number)
        yield f"{number}-{name}", data


@pytest.mark.parametrize("thousand", range(10))
def test_mutations(guarded: Guarded, tmp_path: Path, thousand: int):
    first = 1000 * thousand
    assert run(guarded, mutations(tmp_path / "made", range(first, first + 1000))) == 1000
    guarded.check_end(CPU_SECONDS)
