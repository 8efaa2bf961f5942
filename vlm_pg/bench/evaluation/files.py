"""The clips and records of a point, rendered and encoded by the measurement itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from vlm_pg.bench.evaluation.shown import OPTIONS, STORED_HEIGHT, STORED_RATE, STORED_WIDTH, Shown, question
from vlm_pg.bench.grid import EvalPoint

# Q questions on each of V videos; and as many questions, each on a video of its own.
TOGETHER, APART = "together.jsonl", "apart.jsonl"
_FIELD = 40


def write_files(folder: Path, point: EvalPoint, apart: bool) -> None:
    """Write records and clips below ``folder``; with ``apart`` those on a video each, too."""
    folder.mkdir(parents=True, exist_ok=True)
    videos = point.asked if apart else point.videos
    for number in range(videos):
        write_clip(folder / f"{number}.mp4", number, Shown.of(point.prefix).stored_frames)
    _write_records(folder / TOGETHER, [number // point.questions for number in range(point.asked)])
    if apart:
        _write_records(folder / APART, list(range(point.asked)))


def write_clip(path: Path, seed: int, frames: int) -> None:
    """A clip of coloured fields that move by a pixel or two a frame, H.264."""
    import av

    random = np.random.default_rng(seed)
    fields = random.integers(0, 256, (STORED_HEIGHT // _FIELD, STORED_WIDTH // _FIELD, 3), dtype=np.uint8)
    picture = fields.repeat(_FIELD, 0).repeat(_FIELD, 1)
    down, right = (int(step) for step in random.integers(1, 3, 2))
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=STORED_RATE, options={"preset": "veryfast", "threads": "1"})
        stream.width, stream.height, stream.pix_fmt = STORED_WIDTH, STORED_HEIGHT, "yuv420p"
        for number in range(frames):
            moved = np.roll(picture, (down * number, right * number), (0, 1))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(moved, "rgb24")))
        container.mux(stream.encode())


def _write_records(path: Path, videos: list[int]) -> None:
    records = (
        {
            "problem_id": number,
            "problem": question(number),
            "data_type": "video",
            "problem_type": "multiple choice",
            "options": list(OPTIONS),
            "solution": "<answer>A</answer>",
            "path": f"{video}.mp4",
            "data_source": "bench",
        }
        for number, video in enumerate(videos)
    )
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
