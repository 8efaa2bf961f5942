"""`vlm-pg prepare --decode` beside bare decoding and resizing of the same frames, and its memory as sets grow.

    python docs/benchmarks/measure_prepare.py time --out FILE.json [--clips 1000] [--workers 2] [--repeats 3]
        [--videos FOLDER | --tiny]
    python docs/benchmarks/measure_prepare.py memory --out FILE.json [--clips 1000 10000] [--workers 2]

``time``: clips of 10 s, 320x240, 25 frames a second (H.264, a key frame at least every 10 s). Bare decoding is a pool
of as many processes without any of vlm_pg's checks: PyAV from the file's start to the last frame that is wanted, and
torch's bicubic resizing; it is told which frames these are, and their size. All sides are whole commands, start-up and
imports included, one after the other; wall time and the processor time of all their processes are taken. A further side
is ``decode_file`` in such a pool. ``--videos``: copies of the MP4 and QuickTime files of a folder that can be decoded
are the clips instead, $VLM_PG_MEDIA for example. ``--tiny``: the clips of ``memory``.

``memory``: clips of 16 frames, 64x48. Peak resident memory of the command's own process, and of any process below it,
as the kernel counts it (VmHWM).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
MOST_ENCODED = 40
BARE = """
import sys
import av, numpy, torch
def start():
    torch.set_num_threads(1)
def decode(job):
    path, wanted, height, width = job
    wanted, frames = set(wanted), []
    with av.open(path) as container:
        for place, frame in enumerate(container.decode(container.streams.best("video"))):
            if place in wanted:
                pixels = torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1)[None].float()
                small = torch.nn.functional.interpolate(
                    pixels, size=(height, width), mode="bicubic", align_corners=False, antialias=True)
                frames.append(small.clamp(0, 255).round().to(torch.uint8).numpy())
                if len(frames) == len(wanted):
                    break
    return numpy.concatenate(frames).shape[0]
"""
OURS = """
import sys
def start():
    import torch
    torch.set_num_threads(1)
    import vlm_pg.media.decode_file
def decode(job):
    from vlm_pg.media.decode_file import decode_file
    from vlm_pg.media.settings import MediaSettings
    return decode_file("video", job[0], MediaSettings(), 28).frames.shape[0]
"""
_RUN = """
import json, multiprocessing, sys
from bare import decode, start
if __name__ == "__main__":
    jobs = json.load(open(sys.argv[1]))
    with multiprocessing.get_context("spawn").Pool(int(sys.argv[2]), start) as pool:
        print(sum(pool.imap_unordered(decode, jobs, chunksize=4)))
"""


def generated(folder: Path, count: int, frames: int, height: int, width: int) -> list[bytes]:
    """Moving gradients and noise."""
    import av

    random = np.random.default_rng(0)
    noise = random.integers(0, 40, (height + 64, width + 64, 3), dtype=np.uint8)
    ramp = np.add.outer(np.arange(height), np.arange(width)).astype(np.uint8)[..., None]
    encoded = []
    for clip in range(count):
        path = folder / "encoded.mp4"
        with av.open(str(path), "w") as output:
            stream = output.add_stream("libx264", rate=25, options={"preset": "veryfast", "g": "250"})
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            for number in range(frames):
                top, left = (number + clip) % 64, (3 * number + 5 * clip) % 64
                pixels = (ramp + np.uint8((number + 7 * clip) % 256)) // 2 + noise[top:, left:][:height, :width]
                output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            output.mux(stream.encode())
        encoded.append(path.read_bytes())
        path.unlink()
    return encoded


def found(videos: Path) -> list[bytes]:
    """The files to which a box can be added and that can be decoded."""
    from vlm_pg.errors import SampleError
    from vlm_pg.media.decode_file import decode_file
    from vlm_pg.media.settings import MediaSettings

    files = []
    for path in sorted(path for path in videos.iterdir() if path.suffix in (".mp4", ".mov")):
        try:
            decode_file("video", str(path), MediaSettings(), 28)
        except SampleError as fault:
            print(f"{path.name} is left out: {fault}")
        else:
            files.append(path.read_bytes())
    return files


def write_clips(folder: Path, count: int, contents: list[bytes]) -> None:
    """Files of different content: each ends in a box of its own that readers skip."""
    for number in range(count):
        own = (16).to_bytes(4, "big") + b"free" + number.to_bytes(8, "big")
        (folder / f"{number:06d}.mp4").write_bytes(contents[number % len(contents)] + own)


def records(folder: Path, count: int) -> Path:
    """A question on each clip."""
    path = folder / f"records-{count}.jsonl"
    with path.open("w") as file:
        for number in range(count):
            record = {"problem_id": number, "problem": f"What is {number}?", "data_type": "video", "options": []}
            record |= {"problem_type": "numerical", "process": "", "solution": f"<answer>{number}</answer>"}
            file.write(json.dumps(record | {"path": f"{number:06d}.mp4", "data_source": "made-up"}) + "\n")
    return path


def prepare_command(folder: Path, path: Path, out: Path, workers: int, *options: str) -> list[str]:
    command = [sys.executable, "-m", "vlm_pg.cli", "prepare", "video_r1", "--train", str(path), "--out", str(out)]
    return [*command, "--media-root", str(folder), "--workers", str(workers), *options]


def timed(command: list[str], folder: Path) -> dict[str, Any]:
    """Wall seconds and processor seconds of a command and all its processes."""
    environment = dict(os.environ, PYTHONPATH=f"{ROOT}:{folder}", OMP_NUM_THREADS="1")
    before, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    core = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return {"wall_seconds": time.perf_counter() - wall, "core_seconds": core}


def jobs_of(folder: Path, count: int, different: int) -> Path:
    """Path, wanted frames, height and width of each clip, of which so many have different frames."""
    from vlm_pg.media.decode_file import decode_file, survey_video
    from vlm_pg.media.sampling import WHOLE
    from vlm_pg.media.settings import MediaSettings

    wanted = []
    for number in range(min(count, different)):
        path = folder / f"{number:06d}.mp4"
        *_, choice = survey_video(path, path.name, MediaSettings(), WHOLE)
        frames = decode_file("video", str(path), MediaSettings(), 28).frames
        wanted.append([list(choice.indices), *frames.shape[2:]])
    jobs = [[str(folder / f"{number:06d}.mp4"), *wanted[number % different]] for number in range(count)]
    listed = folder / "jobs.json"
    listed.write_text(json.dumps(jobs))
    return listed


def measure_time(arguments: argparse.Namespace) -> dict[str, Any]:
    (count,) = arguments.clips
    runs = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape = (16, 48, 64) if arguments.tiny else (250, 240, 320)
        contents = found(arguments.videos) if arguments.videos else generated(folder, MOST_ENCODED, *shape)
        write_clips(folder, count, contents)
        path, jobs = records(folder, count), jobs_of(folder, count, len(contents))
        pools = {}
        for side, code in (("bare", BARE), ("decode_file", OURS)):
            (folder / side).mkdir()
            (folder / side / "bare.py").write_text(code)
            (folder / side / "run.py").write_text(_RUN)
            pools[side] = [sys.executable, str(folder / side / "run.py"), str(jobs), str(arguments.workers)]
        for repeat in range(arguments.repeats):
            out = folder / f"out-{repeat}"
            prepare = prepare_command(folder, path, out, arguments.workers, "--decode")
            for side, command in (*pools.items(), ("prepare --decode", prepare)):
                runs.append({"side": side, "repeat": repeat, **timed(command, folder)})
                print(runs[-1], flush=True)
    sides = sorted({run["side"] for run in runs})
    best = {
        kind: {side: min(run[kind] for run in runs if run["side"] == side) for side in sides}
        for kind in ("wall_seconds", "core_seconds")
    }
    print({kind: round(best[kind]["prepare --decode"] / best[kind]["bare"], 2) for kind in best})
    kind = "real" if arguments.videos else "tiny" if arguments.tiny else "of 10 s"
    return {"clips": count, "kind": kind, "workers": arguments.workers, "runs": runs}


def peak_kib(pid: int) -> int:
    """Of a process that has ended 0."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")), 0)
    except OSError:
        return 0


def below(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [one for child in children for one in (int(child), *below(int(child)))]


def peak_memory(command: list[str]) -> dict[str, float]:
    """MiB of the process itself and of the largest one below it."""
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    own = other = 0
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            own = max(own, peak_kib(process.pid))
            other = max([other, *map(peak_kib, below(process.pid))])
            time.sleep(0.05)
    assert process.returncode == 0
    return {"main_mib": own / 1024, "largest_below_mib": other / 1024}


def measure_memory(arguments: argparse.Namespace) -> dict[str, Any]:
    runs = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_clips(folder, max(arguments.clips), generated(folder, MOST_ENCODED, 16, 48, 64))
        for count in arguments.clips:
            command = prepare_command(
                folder, records(folder, count), folder / f"out-{count}", arguments.workers, "--decode"
            )
            begun = time.perf_counter()
            runs.append({"clips": count, **peak_memory(command), "wall_seconds": time.perf_counter() - begun})
            print(runs[-1], flush=True)
    return {"workers": arguments.workers, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "memory"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--clips", type=int, nargs="+")
    parser.add_argument("--videos", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    arguments.clips = arguments.clips or ([1000] if arguments.what == "time" else [1000, 10_000])
    measured = measure_time(arguments) if arguments.what == "time" else measure_memory(arguments)
    machine = {"python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count()}
    arguments.out.write_text(json.dumps({"machine": machine, **measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
