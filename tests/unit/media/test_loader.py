"""What decoding processes promise beyond what all pools do (tests/unit/killable), and loaders over them."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.unit.killable.helpers import is_gone, wait_until_gone
from vlm_pg.errors import ConfigError, SampleError
from vlm_pg.media import loader as loader_module
from vlm_pg.media import sampling
from vlm_pg.media.decode_file import MediaFacts
from vlm_pg.media.loader import MediaLoader, decoding_pool
from vlm_pg.media.pool import WorkerPool
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import DecodedMedia, MediaRef


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(1, deadline_seconds=3.0)
    yield pool
    pool.close()


def test_a_bug_raises_with_its_traceback(pool: WorkerPool):
    with pytest.raises(RuntimeError, match=r"a bug surfaced while decoding int:\n(?s:.*)invalid literal for int"):
        pool.submit(int, "x").result()
    assert pool.submit(int, "7").result() == 7


def test_closing_ends_busy_workers_and_fails_what_waits():
    pool = WorkerPool(1, deadline_seconds=600)
    pids = [pool.submit(os.getpid).result()]
    busy, waiting = pool.submit(time.sleep, 600), pool.submit(os.getpid)
    pool.close()
    pool.close()
    assert all(is_gone(pid) for pid in pids)
    for call in (busy, waiting):
        with pytest.raises(RuntimeError, match="closed before this file was decoded"):
            call.result()
    with pytest.raises(RuntimeError, match="is closed; nothing can be submitted"):
        pool.submit(os.getpid)


def test_closing_does_not_wait_for_what_is_still_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run that is refused at once should end at once."""
    body = "from pathlib import Path\nfrom time import sleep\nsleep(20)\nPath(__file__).with_name('done').touch()"
    (tmp_path / "slow_to_start.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool = WorkerPool(2, deadline_seconds=5, modules=("slow_to_start",))
    pool.start()
    pool.close()
    assert not (tmp_path / "done").exists()


@pytest.mark.matrix
def test_a_worker_that_ends_slowly_still_tells_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Long after its frames are gone, an interpreter still takes its modules apart."""
    body = "from time import sleep\nclass Slow:\n    def __del__(self, sleep=sleep): sleep(1.5)\nslow = Slow()"
    (tmp_path / "slow_to_end.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool = WorkerPool(1, deadline_seconds=5, modules=("slow_to_end", "no_such_module_anywhere"))
    with pytest.raises(RuntimeError, match=r"(?s)last: exit code 1\).*no_such_module_anywhere"):
        pool.submit(os.getpid).result()
    pool.close()


@pytest.mark.usefixtures("kept_templates")
def test_loading_real_files_one_answer_each(media_dir: Path):
    names = ["av1_video.mkv", "no.mp4", "video_90.mov", "corrupted.mp4", "av1_video.mkv"]
    with MediaLoader(MediaSettings(workers=2), media_dir) as loader:
        ticket = loader.submit([MediaRef("video", name) for name in names])
        results = ticket.result()
        assert ticket.result() == results, "a ticket can be read again"
    kinds = [one.reason if isinstance(one, SampleError) else one.decoder for one in results]
    assert kinds == ["pyav", "missing_media", "pyav", "corrupt_media", "pyav"]
    with MediaLoader(MediaSettings(workers=0), media_dir) as here:
        assert here._pool is None
        for ours, theirs in zip(here.load([MediaRef("video", name) for name in names]), results, strict=True):
            if isinstance(ours, DecodedMedia):
                assert isinstance(theirs, DecodedMedia) and np.array_equal(ours.frames, theirs.frames)
            else:
                assert isinstance(theirs, SampleError) and (ours.reason, str(ours)) == (theirs.reason, str(theirs))


@pytest.mark.usefixtures("kept_templates")
def test_waiting_can_be_stopped_and_taken_up_again(media_dir: Path):
    with MediaLoader(MediaSettings(workers=1), media_dir) as loader:
        ticket = loader.submit([MediaRef("video", "h265_video.mp4")])
        with pytest.raises(InterruptedError, match="stopped while waiting for 1 media file"):
            ticket.result(should_stop=lambda: True)
        assert isinstance(ticket.result()[0], DecodedMedia)


def test_a_loader_refuses_what_it_cannot_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match=r"data\.media_root is '.*none', which is not a folder\. .* Correct"):
        MediaLoader(MediaSettings(), tmp_path / "none")
    monkeypatch.setattr(loader_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"media\.decoder is decord, which is not installed\. .* set media\.decoder="):
        MediaLoader(MediaSettings(decoder="decord"), tmp_path)


def test_the_last_words_of_a_worker_are_its_own(pool: WorkerPool):
    """What it wrote in earlier calls is gone, and leaves no hole in front of what it writes now."""
    pool.submit(os.write, 2, b"earlier " * 100).result()
    error = pool.submit(os.write, 2, b"").exception()
    assert error is None
    crash = pool.submit(exec, "import os; os.write(2, b'first line\\n\\x1b[31msecond'); os._exit(3)", label="'a.mp4'")
    message = str(crash.exception())
    assert r"crashed on 'a.mp4': exit code 3: first line / \x1b[31msecond. Files that crash" in message
    assert "earlier" not in message and "\0" not in message and "\\x00" not in message


def test_frames_beyond_a_workers_memory_are_refused_by_name(tmp_path: Path):
    """FFmpeg, numpy and torch report the kernel's limit as an error; the file is named, the worker goes on."""
    Image.new("RGB", (8000, 7900)).save(tmp_path / "wide.png", compress_level=1)
    Image.new("RGB", (80, 79)).save(tmp_path / "small.png")
    with MediaLoader(MediaSettings(workers=1, worker_memory_bytes=256 << 20), tmp_path) as loader:
        wide, small = loader.load([MediaRef("image", "wide.png"), MediaRef("image", "small.png")])
        again = loader.load([MediaRef("image", "small.png")])[0]
    assert isinstance(wide, SampleError) and wide.reason == "out_of_memory"
    assert "'wide.png' does not fit into memory while it is decoded (media.worker_memory_bytes is 26843545" in str(wide)
    assert isinstance(small, DecodedMedia) and isinstance(again, DecodedMedia)


def test_what_a_file_leaves_in_memory_costs_no_other():
    """A library that leaks: without an end the memory of a worker would be full of it, and good files refused."""
    with WorkerPool(1, deadline_seconds=600, memory_bytes=256 << 20) as pool:
        leak = "__import__('sys').__dict__.setdefault('left', []).append(bytearray(b'x') * (1 << 20) * {})"
        pids = []
        for _ in range(2):
            pids += [pool.submit(os.getpid).result() for _ in range(2)]
            pool.submit(eval, leak.format(100)).result()
            assert pool.submit(eval, "len(bytes(200 << 20))").result() == 200 << 20
        assert pids[0] == pids[1] != pids[2] == pids[3], "replaced by need alone"


def private_mib(pid: int) -> float:
    fields = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(field[1]) for field in fields if field[0].startswith("Private")) / 1024


def test_workers_share_what_they_have_imported():
    """torch alone is 300 MB of private memory in a process that imports it by itself."""
    pool = WorkerPool(2, deadline_seconds=600, modules=("vlm_pg.media.decode_file",))
    pids = {pool.submit(os.getpid).result() for _ in range(2)}
    assert all(private_mib(pid) < 60 for pid in pids)
    assert pool.submit(eval, "__import__('sys').modules['torch'].__name__").result() == "torch"
    assert pool.submit(eval, "'qwen_vl_utils' in __import__('sys').modules").result() is False
    pool.close()


def test_workers_see_the_gpus_where_they_decode_on_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    for device, seen in (("cuda", "3"), ("cpu", "")):
        settings = MediaSettings(workers=1, decoder="torchcodec", decoder_device=device)
        decoding = decoding_pool(settings)
        assert decoding is not None and decoding._gpu == (device == "cuda")
        decoding.close()
        with WorkerPool(1, deadline_seconds=5, gpu=decoding._gpu) as pool:
            assert pool.submit(os.getenv, "CUDA_VISIBLE_DEVICES").result() == seen


def test_the_template_of_the_workers_may_be_killed(tmp_path: Path):
    """Its workers end with it; what they were doing is begun again, and no file is blamed."""
    pool = WorkerPool(1, deadline_seconds=600)
    first = pool.submit(os.getpid).result()
    busy = pool.submit(eval, f"__import__('time').sleep(0 if __import__('os').getpid() != {first} else 600)")
    waiting = pool.submit(os.getpid)
    os.kill(pool._template.pid, signal.SIGKILL)
    assert busy.result() is None
    assert waiting.result() != first
    assert wait_until_gone([first])
    pool.close()


def test_a_template_that_is_killed_again_and_again_is_no_file_s_fault():
    pool = WorkerPool(1, deadline_seconds=600)
    call = pool.submit(eval, "__import__('os').kill(__import__('os').getppid(), 9) or __import__('time').sleep(600)")
    with pytest.raises(RuntimeError, match=r"do not start \(3 tries, last: signal SIGKILL\)"):
        call.result()
    pool.close()


def test_a_pool_starts_with_its_first_call_or_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    body = "import pathlib, time\nwhile not (pathlib.Path(__file__).parent / 'go').exists(): time.sleep(0.01)"
    (tmp_path / "waits_for_a_sign.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool = WorkerPool(1, deadline_seconds=600, modules=("waits_for_a_sign",))
    assert pool.pids == [] and not pool.is_started and not pool.is_starting
    pool.start()
    assert pool.pids == [] and pool.is_started and pool.is_starting
    with pytest.raises(InterruptedError, match="while the decoding workers were starting"):
        pool.wait_until_ready(should_stop=lambda: True)
    (tmp_path / "go").touch()
    pool.wait_until_ready()
    assert len(pool.pids) == 1 and not pool.is_starting
    assert pool.submit(os.getpid).result() == pool.pids[0]
    pool.close()
    pool.start()
    assert pool.pids == []


@pytest.mark.usefixtures("kept_templates")
def test_a_worker_asks_its_parent_and_remembers(media_dir: Path, monkeypatch: pytest.MonkeyPatch):
    """What the parent says is what is read: qwen-vl-utils' rules, here made others."""
    totals, rule = [], sampling.num_sampled_frames

    def other(total: int, *more: float) -> int:
        totals.append(total)
        return rule(total, *more) - 6

    monkeypatch.setattr(sampling, "num_sampled_frames", other)
    monkeypatch.setattr(other, "__module__", sampling.__name__)
    monkeypatch.setattr(other, "__qualname__", "num_sampled_frames")
    with MediaLoader(MediaSettings(workers=1, min_frames=8, max_frames=8), media_dir) as loader:
        for _ in range(2):
            [media] = loader.load([MediaRef("video", "av1_video.mkv")])
            assert isinstance(media, DecodedMedia) and len(media.frames) == 2
        [media] = loader.load([MediaRef("video", "h265_video.mp4")])
    assert len(totals) == 2 and totals[0] != totals[1]


PROBED = MediaSettings(max_frames=6, max_pixels=64 * 28 * 28, image_max_pixels=64 * 28 * 28)


def probed(loader: MediaLoader, ref: MediaRef, decode: bool = False) -> MediaFacts | SampleError:
    found = loader.probe(ref, decode)
    try:
        return found.result() if isinstance(found, Future) else found
    except SampleError as fault:
        return fault


@pytest.mark.usefixtures("kept_templates")
@pytest.mark.parametrize(
    "name", ["h264_10bits.mp4", "av1_video.mkv", "video_90.mov", "unordered.mov", "corrupted.mp4", "picture.png"]
)
def test_a_file_is_probed_as_it_is_decoded(name: str, media_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "picture.png":
        Image.fromarray(np.arange(90 * 130 * 3, dtype=np.uint8).reshape(90, 130, 3)).save(path)
    else:
        path.write_bytes((media_dir / name).read_bytes())
    ref = MediaRef("image" if name == "picture.png" else "video", name)
    with MediaLoader(PROBED, tmp_path) as loader:
        media, whole, header = loader.load([ref])[0], probed(loader, ref, decode=True), probed(loader, ref)
        if isinstance(media, SampleError):
            assert name == "corrupted.mp4" and isinstance(whole, SampleError) and whole.reason == media.reason
            return
        assert isinstance(media, DecodedMedia) and isinstance(whole, MediaFacts)
        assert whole == header
        frames, _, height, width = media.frames.shape
        assert (whole.frames, whole.height, whole.width) == (frames, height, width)
        assert whole.visual_tokens == max(1, frames // 2) * (height // 28) * (width // 28)
        assert whole.content == hashlib.sha256(path.read_bytes()).hexdigest()
        assert whole.seconds >= media.frame_seconds[-1]


@pytest.mark.usefixtures("kept_templates")
def test_part_budget_and_subtitles_count(media_dir: Path, tmp_path: Path) -> None:
    source = next(path for path in sorted(media_dir.rglob("*.mp4")))
    (tmp_path / "bad.srt").write_bytes(b"\0\1\2")
    (tmp_path / "a.mp4").write_bytes(source.read_bytes())
    with MediaLoader(PROBED.model_copy(update={"video_tokens": 40}), tmp_path) as loader:
        whole = probed(loader, MediaRef("video", "a.mp4"))
        moments = probed(loader, MediaRef("video", "a.mp4", times=(0.0, 0.5)))
        assert isinstance(whole, MediaFacts) and isinstance(moments, MediaFacts)
        assert whole.visual_tokens <= 40 and moments.frames == 2
        assert whole.seconds == moments.seconds and whole.content == moments.content
        for ref, reason in (
            (MediaRef("video", "a.mp4", start=1000.0, end=1001.0), "bad_clip"),
            (MediaRef("video", "a.mp4", subtitles="bad.srt"), "bad_subtitles"),
            (MediaRef("video", "b.mp4"), "missing_media"),
            (MediaRef("image", "a.mp4"), "unsupported_media"),
        ):
            fault = probed(loader, ref)
            assert isinstance(fault, SampleError) and fault.reason == reason
