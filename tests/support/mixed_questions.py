"""Questions about every medium: as prompts, and as the records and configuration of a run that a server samples for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench.vllm_server import START_SECONDS
from tests.support.short_run import SPREAD
from tests.support.tiny_media import mp4
from vlm_pg.models.policy import Policy
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.prompts.settings import PromptSettings
from vlm_pg.rollout.server.messages import ChatMessages
from vlm_pg.types import DecodedMedia, MediaKind, MediaRef, Prompt, Sample

GENERATIONS, NEW_TOKENS = 4, 24
MEDIA: dict[str, tuple[MediaKind, ...]] = {
    "text": (),
    "image": ("image",),
    "images": ("image", "image"),
    "video": ("video",),
    "image and video": ("image", "video"),
}


def medium(policy: Policy, kind: MediaKind, seed: int, seconds_per_frame: float) -> DecodedMedia:
    """Random pixels; a video has 6 frames."""
    side, count = policy.pixel_factor, 6 if kind == "video" else 1
    size = (count, 3, (3 + seed) * side, 4 * side)
    pixels = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    times = tuple(frame * seconds_per_frame for frame in range(count))
    return DecodedMedia(kind, pixels, times, 1 / seconds_per_frame if kind == "video" else 0.0, "test")


def build(policy: Policy, seconds_per_frame: float = 0.5) -> tuple[list[Prompt], ChatMessages]:
    """A question with each combination of media, and the messages of all of them."""
    builder = PromptBuilder(policy.processor, PromptSettings(), policy.positions)
    samples, prompts = {}, []
    for name, kinds in MEDIA.items():
        media = tuple(medium(policy, kind, number, seconds_per_frame) for number, kind in enumerate(kinds))
        refs = tuple(MediaRef(kind, "x") for kind in kinds)
        samples[name] = Sample(name, f"What is in the {name}?", refs, (), "1", "numerical", "test", "test")
        prompts.append(builder.build(samples[name], media))
    return prompts, ChatMessages(policy, samples)


def write_records(folder: Path) -> Path:
    """Two questions each about nothing, a picture and an MP4 file, whose frames are 0.5 s apart as vLLM's are."""
    from PIL import Image

    rng = np.random.default_rng(0)
    records = []
    for number, kind in enumerate(("text", "image", "video") * 2):
        name = {"text": "", "image": f"{number}.png", "video": f"{number}.mp4"}[kind]
        if kind == "image":
            Image.fromarray(rng.integers(0, 256, (130 + number, 170, 3), dtype=np.uint8)).save(folder / name)
        if kind == "video":
            (folder / name).write_bytes(mp4(number, seconds=3 + number, rate=2, height=128, width=160))
        records.append(
            {
                "problem_id": number,
                "problem": "Which colour is shown first?",
                "data_type": kind,
                "problem_type": "multiple choice",
                "options": ["A. red", "B. green"],
                "solution": "<answer>A</answer>",
                "path": name,
            }
        )
    (folder / "records.json").write_text(json.dumps(records))
    return folder / "records.json"


def sections(model: Path, folder: Path, url: str, **others: Any) -> dict[str, Any]:
    """The configuration of a run with questions of every medium; a trained tower, and rewards that differ by text."""
    (folder / "spread.py").write_text(SPREAD)
    whole: dict[str, Any] = {
        "run": {"dir": str(folder / "run")},
        "model": {"path": str(model), "positions": "qwen", "train": ["tower", "merger", "language"]},
        "data": {"train": str(write_records(folder))},
        "media": {"workers": 0, "fps": 2, "max_frames": 16, "min_pixels": 4096, "image_min_pixels": 4096},
        "rollout": {
            "engine": "server",
            "num_generations": GENERATIONS,
            "max_new_tokens": NEW_TOKENS,
            "server": {"url": url, "retries": 1, "wait_seconds": START_SECONDS},
        },
        "reward": {"functions": [{"function": f"{folder}/spread.py:spread"}]},
        "training": {"steps": 20, "prompts_per_step": 3, "learning_rate": 1e-3, "checkpoint_every": 0},
        "observe": {"trackers": [], "report": False, "rollouts_per_step": 3, "thumbnails": 0},
    }
    return {name: whole.get(name, {}) | others.get(name, {}) for name in {**whole, **others}}
