"""Record the positions that Qwen's published code computes, into ``positions.npz`` beside this file.

Needs releases of transformers that this project does not run with, so each in a virtual environment of its own:

    python3 -m venv /tmp/t457 && /tmp/t457/bin/pip install transformers==4.57.6 torch torchvision numpy
    python3 -m venv /tmp/t449 && /tmp/t449/bin/pip install transformers==4.49.0 torch torchvision numpy
    /tmp/t449/bin/python tests/recordings/record_positions.py fractional /tmp/fractional.json
    /tmp/t457/bin/python tests/recordings/record_positions.py whole /tmp/whole.json
    /tmp/t457/bin/python tests/recordings/record_positions.py join /tmp/whole.json /tmp/fractional.json

Two releases, because 4.57 cuts the seconds of a temporal grid to whole ones before it multiplies, which 4.49, the first
with Qwen2.5-VL, does not: ``whole`` records 500 layouts of all families, with whole seconds, from 4.57, and
``fractional`` records 200 of Qwen2.5-VL, at any frame rate, from 4.49. Only ``get_rope_index`` runs, on a bare
configuration; no weights are needed.
"""

from __future__ import annotations

import itertools
import json
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

RECORDING = Path(__file__).with_name("positions.npz")
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
WHOLE_LAYOUTS, FRACTIONAL_LAYOUTS = 500, 200
CLASSES = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "qwen3_vl_moe": "Qwen3VLMoe"}
IMAGE, VIDEO, START, END = 151655, 151656, 151652, 151653
FRAMES_PER_GRID, MERGE = 2, 2
# Frame rates at which two frames take whole seconds, and others.
WHOLE_FPS = (2.0, 1.0, 2 / 3, 0.5, 0.4, 0.25, 0.2)
FRACTIONAL_FPS = (3.0, 4.0, 5.0, 7.5, 8.0, 12.0, 23.976, 25.0, 29.97, 30.0, 60.0)


def make_layout(rng: np.random.Generator, family: str, fractional: bool) -> dict[str, Any]:
    """Text, images and videos in random order: ids, grids in order of appearance, frames per second of each video."""
    text_only, at_end = rng.random() < 0.05, rng.random() < 0.1
    ids: list[int] = rng.integers(0, 1000, rng.integers(1, 30)).tolist()
    kinds, grids, fps = [], [], []
    for _ in range(0 if text_only else rng.integers(1, 6)):
        if rng.random() < 0.4:
            grid = [1, *(MERGE * rng.integers(1, 13, 2)).tolist()]
            kinds.append("image")
            ids += [START, *[IMAGE] * (grid[1] * grid[2] // MERGE**2), END]
        else:
            grid = [int(rng.integers(1, 41)), *(MERGE * rng.integers(1, 6, 2)).tolist()]
            kinds.append("video")
            any_rate = float(rng.uniform(0.3, 30)) if rng.random() < 0.5 else float(rng.choice(FRACTIONAL_FPS))
            fps.append(any_rate if fractional else float(rng.choice(WHOLE_FPS)))
            ids += _video_ids(rng, family, grid)
        grids.append(grid)
        # Media may follow each other with nothing but their own marks between them.
        ids += rng.integers(0, 1000, rng.integers(0, 30)).tolist()
    while at_end and ids[-1] not in (IMAGE, VIDEO) and len(ids) > 1:
        ids.pop()
    # Processors of other families than Qwen2.5-VL hand over no seconds, and somebody may leave them out.
    timed = family == "qwen2_5_vl" and (fractional or rng.random() < 0.9)
    positions_per_second = int(rng.choice([1, 2, 2, 4, 25])) if family == "qwen2_5_vl" else None
    return {
        "family": family,
        "ids": ids,
        "kinds": kinds,
        "grids": grids,
        "tokens_per_second": positions_per_second,
        "seconds": [float(np.float32(FRAMES_PER_GRID / rate)) for rate in fps] if timed else [],
    }


def _video_ids(rng: np.random.Generator, family: str, grid: list[int]) -> list[int]:
    tokens = [VIDEO] * (grid[1] * grid[2] // MERGE**2)
    if family.startswith("qwen3"):
        frames = [[*rng.integers(0, 1000, rng.integers(3, 8)).tolist(), START, *tokens, END] for _ in range(grid[0])]
        return list(itertools.chain.from_iterable(frames))
    return [START, *tokens * grid[0], END]


def compute(layout: dict[str, Any]) -> tuple[list[list[int]], int]:
    """What the installed transformers makes of it: positions [3, P], and the position of the first response token."""
    family = layout["family"]
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    owner = getattr(module, f"{CLASSES[family]}Model")
    if not hasattr(owner, "get_rope_index"):
        owner = getattr(module, f"{CLASSES[family]}ForConditionalGeneration")
    vision = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=layout["tokens_per_second"])
    marks = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
    model = SimpleNamespace(config=SimpleNamespace(vision_config=vision, **marks))
    ids = torch.tensor([layout["ids"]])
    of = {kind: [g for k, g in zip(layout["kinds"], layout["grids"]) if k == kind] for kind in ("image", "video")}
    seconds = {"second_per_grid_ts": torch.tensor(layout["seconds"])} if layout["seconds"] else {}
    positions, deltas = owner.get_rope_index(
        model,
        ids,
        image_grid_thw=torch.tensor(of["image"]) if of["image"] else None,
        video_grid_thw=torch.tensor(of["video"]) if of["video"] else None,
        attention_mask=torch.ones_like(ids),
        **seconds,
    )
    return positions[:, 0].tolist(), int(deltas) + ids.shape[1]


def record(part: str) -> list[dict[str, Any]]:
    rng = np.random.default_rng(20260101 if part == "whole" else 20260102)
    count = WHOLE_LAYOUTS if part == "whole" else FRACTIONAL_LAYOUTS
    records = []
    for index in range(count):
        family = FAMILIES[index % len(FAMILIES)] if part == "whole" else "qwen2_5_vl"
        layout = make_layout(rng, family, fractional=part == "fractional")
        positions, following = compute(layout)
        codes = {IMAGE: 1, VIDEO: 2}
        runs = [(code, len(list(run))) for code, run in itertools.groupby(codes.get(t, 0) for t in layout.pop("ids"))]
        records.append({**layout, "part": part, "runs": runs, "next": following, "positions": positions})
    return records


def join(parts: list[str]) -> None:
    """One file: a line of JSON per layout, and all positions one after the other as differences along the prompt."""
    records = [record for part in parts for record in json.loads(Path(part).read_text())]
    positions = [np.array(record.pop("positions")) for record in records]
    differences = np.concatenate([np.diff(p, prepend=0, axis=1) for p in positions], axis=1)
    layouts = "\n".join(json.dumps(record) for record in records).encode()
    np.savez_compressed(RECORDING, differences=differences.astype(np.int16), layouts=np.frombuffer(layouts, np.uint8))
    print(f"{len(records)} layouts, {differences.shape[1]} tokens, {RECORDING.stat().st_size} bytes")


if __name__ == "__main__":
    if sys.argv[1] == "join":
        join(sys.argv[2:])
    else:
        Path(sys.argv[2]).write_text(json.dumps(record(sys.argv[1])))
