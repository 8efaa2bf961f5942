"""Seconds of a core that decoding a video takes: this checkout beside another one, and the decoders beside each other.

    python docs/benchmarks/measure_media.py --out FILE.json [--before FOLDER] [--videos FOLDER] [--repeats 3]

``--before``: a folder with the package ``vlm_pg`` of another commit (``git archive COMMIT vlm_pg | tar -x -C FOLDER``).
Each side is a process of its own; they take turns, video by video, and processor time is counted, so that other
programs matter little. What is timed is ``decode_video`` at default settings: header, index, 4 to 16 frames, resized.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

_SIDE = """
import json, sys, time
from pathlib import Path
import torch
from vlm_pg.media.decode_file import decode_video
from vlm_pg.media.settings import MediaSettings
torch.set_num_threads(1)
settings = MediaSettings(decoder=sys.argv[1])
for line in sys.stdin:
    wall, core = time.perf_counter(), time.process_time()
    try:
        media = decode_video(Path(line.rstrip("\\n")), settings, 28)
        media = media[0] if isinstance(media, tuple) else media
        said = media.decoder
    except ValueError as error:
        said = str(error)[:200]
    print(json.dumps({"core_seconds": time.process_time() - core, "wall_seconds": time.perf_counter() - wall,
                      "decoder": said}), flush=True)
"""
GENERATED = (
    ("h264-gop30.mp4", "libx264", {"preset": "veryfast", "g": "30", "bf": "2", "x264-params": "open-gop=0"}),
    ("h264-gop250.mp4", "libx264", {"preset": "veryfast", "g": "250", "bf": "2", "x264-params": "open-gop=0"}),
    ("hevc-gop60.mkv", "libx265", {"preset": "ultrafast", "x265-params": "keyint=60:open-gop=0:log-level=none"}),
    ("vp9-gop60.webm", "libvpx-vp9", {"g": "60", "cpu-used": "8", "deadline": "realtime", "b": "1M"}),
)


def make(folder: Path, width: int = 640, height: int = 360, frames: int = 900) -> list[Path]:
    """Half a minute of moving gradients and noise in each codec."""
    import av

    random = np.random.default_rng(0)
    noise = random.integers(0, 40, (height + 64, width + 64, 3), dtype=np.uint8)
    ramp = np.add.outer(np.arange(height), np.arange(width)).astype(np.uint8)[..., None]
    paths = []
    for name, codec, options in GENERATED:
        paths.append(folder / name)
        with av.open(str(paths[-1]), "w") as output:
            stream = output.add_stream(codec, rate=30, options=options)
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            for number in range(frames):
                top, left = number % 64, (3 * number) % 64
                pixels = (ramp + np.uint8(number % 256)) // 2 + noise[top : top + height, left : left + width]
                output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            output.mux(stream.encode())
    return paths


def side(root: Path, decoder: str) -> subprocess.Popen[str]:
    """A process that decodes the paths it is sent."""
    environment = dict(os.environ, PYTHONPATH=str(root), OMP_NUM_THREADS="1")
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _SIDE, decoder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment,
    )  # fmt: skip


def ask(process: subprocess.Popen[str], path: Path) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{path}\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--videos", type=Path, help="further videos, for example $VLM_PG_MEDIA")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    here = Path(__file__).resolve().parents[2]
    sides = {"auto": side(here, "auto"), "decord": side(here, "decord")}
    if arguments.before:
        sides["auto before"] = side(arguments.before, "auto")
    with tempfile.TemporaryDirectory() as folder:
        videos = make(Path(folder))
        if arguments.videos:
            videos += sorted(p for p in arguments.videos.iterdir() if p.suffix in (".mp4", ".mkv", ".mov", ".webm"))
        runs = [
            {"video": path.name, "repeat": repeat, "side": name, **ask(process, path)}
            for path in videos
            for repeat in range(-1, arguments.repeats)  # the first is a warm-up
            for name, process in sides.items()
        ]
    for process in sides.values():
        process.communicate()
    runs = [run for run in runs if run["repeat"] >= 0]
    machine = {"python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count()}
    arguments.out.write_text(json.dumps({"machine": machine, "runs": runs}, indent=1) + "\n")
    for path in videos:
        cells = []
        for name in sides:
            mine = [run for run in runs if run["video"] == path.name and run["side"] == name]
            cells.append(f"{name} {1000 * min(run['core_seconds'] for run in mine):.0f} ms ({mine[0]['decoder'][:40]})")
        print(f"{path.name}: {', '.join(cells)}")


if __name__ == "__main__":
    main()
