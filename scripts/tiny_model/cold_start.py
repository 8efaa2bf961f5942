"""Supervised training that starts the tiny model off (``training.objective=sft``): it answers in the right form, and
reads the video poorly.

Two stages, because two things have to be learnt and only one of them well:

1. Form and look-up, from questions shown beside the *wrong* video: list some colours, pick the one asked for, find its
   letter among the options. The list is drawn at random, with repeats: neither pixels nor which orders exist can be
   learnt from it, and a list the model has not seen before is as good to it as any.
2. Reading the video, from questions beside their own video, up to the step at which greedy accuracy on other clips
   reaches the target. What is left to learn is to see: that is what reinforcement learning is then for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data_pipelines.embedded import FIRST_FREE_KEY, thought, to_sample, write_clip
from data_pipelines.flashes import POSITIONS, SEEN_ORDERS, UNSEEN_ORDERS, Clip, Order, make_clips
from vlm_pg.config import load_config
from vlm_pg.data.records import write_records
from vlm_pg.progress import Bar
from vlm_pg.training.main import train
from vlm_pg.types import MediaRef, Sample

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "embedded_task.yaml"


@dataclass(frozen=True)
class Recipe:
    """Sizes, steps and learning rates of both stages, and the range of greedy accuracy in which the second ends.

    ``lookup_nats``: how far above the entropy of its random lists the loss of the first may end, per token.
    """

    seed: int = 0
    clips: int = 2048
    held_out_clips: int = 512
    wrong_videos: int = 512
    lookup_records: int = 32_768
    batch: int = 64
    lookup_steps: int = 1000
    lookup_learning_rate: float = 2e-3
    lookup_nats: float = 0.02
    video_steps: int = 150
    video_learning_rate: float = 5e-4
    target_accuracy: float = 0.43
    highest_accuracy: float = 0.50
    check_every: int = 5


def clips_of(recipe: Recipe, count: int, orders: Sequence[Order], number: int) -> list[Clip]:
    """Clips that no data set contains: their keys are free ones."""
    return make_clips(count, tuple(orders), POSITIONS, (recipe.seed, FIRST_FREE_KEY, number))


def lookup_samples(recipe: Recipe) -> list[Sample]:
    """Stage 1: questions beside a random video, with random colours as what is seen in it."""
    rng = np.random.default_rng(recipe.seed)
    samples = []
    for index, clip in enumerate(clips_of(recipe, recipe.lookup_records, SEEN_ORDERS, 4)):
        while (listed := tuple(map(str, rng.choice(clip.options, len(clip.order))))) in UNSEEN_ORDERS:
            pass
        media = MediaRef("video", f"train/{rng.integers(recipe.wrong_videos):05d}.mp4")
        letter = "ABCD"[clip.options.index(listed[POSITIONS.index(clip.position)])]
        sample = to_sample(clip, f"lookup-{index}", media, "cold start")
        samples.append(replace(sample, process=thought(listed, clip.position), answer=letter))
    return samples


def write_sets(recipe: Recipe, folder: Path) -> None:
    """Clips, and records of both stages (``lookup``, ``train``) and of evaluation (``held_out``, ``unseen``)."""
    write_records(folder / "lookup.jsonl", lookup_samples(recipe))
    sets = (
        ("train", recipe.clips, SEEN_ORDERS),
        ("held_out", recipe.held_out_clips, SEEN_ORDERS),
        ("unseen", recipe.held_out_clips, UNSEEN_ORDERS),
    )
    for number, (name, count, orders) in enumerate(sets, start=1):
        (folder / name).mkdir(parents=True, exist_ok=True)
        samples = []
        with Bar(f"Rendering {name} clips", count) as bar:
            for index, clip in enumerate(clips_of(recipe, count, orders, number)):
                media = MediaRef("video", f"{name}/{index:05d}.mp4")
                write_clip(clip, folder / media.path)
                samples.append(to_sample(clip, f"{name}-{index}", media, name))
                bar.advance(1)
        write_records(folder / f"{name}.jsonl", samples)


def train_stage(recipe: Recipe, model: Path, run: Path, records: Path, steps: int, rate: float, **others: Any) -> Path:
    """One supervised run from ``model`` in the folder ``run``; the folder of its checkpoints."""
    settings: dict[str, Any] = {
        "run.dir": run,
        "run.seed": recipe.seed,
        "model.path": model,
        "data.train": records,
        "data.eval": {},
        "rollout.max_new_tokens": 32,
        "training.objective": "sft",
        "training.steps": steps,
        "training.prompts_per_step": recipe.batch,
        "training.learning_rate": rate,
        "training.warmup_steps": 20,
        "training.schedule": "constant",
        "observe.report": False,
        "observe.print_rollouts_every": 0,
        "eval.headline_set": None,
        **others,
    }
    if train(load_config(CONFIG, [f"{key}={json.dumps(value, default=str)}" for key, value in settings.items()])):
        raise RuntimeError(f"the run in {run} did not end well")
    return run / "checkpoints"


def learn_lookup(recipe: Recipe, model: Path, folder: Path) -> Path:
    """Stage 1; its checkpoint. Raises RuntimeError if the letter does not follow from the thought afterwards."""
    run, steps, rate = folder / "lookup", recipe.lookup_steps, recipe.lookup_learning_rate
    own = {"model.train": ["language"], "data.media_together": False, "training.checkpoint_every": 0}
    checkpoints = train_stage(recipe, model, run, folder / "lookup.jsonl", steps, rate, **own)
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-20:]
    tokens, nll = (sum(line[key] for line in last) / len(last) for key in ("response_tokens_mean", "nll"))
    floor = len(SEEN_ORDERS[0]) * math.log(len(SEEN_ORDERS[0])) / tokens
    if nll > floor + recipe.lookup_nats:
        raise RuntimeError(
            f"after {steps} steps the look-up's loss is {nll:.3f} nat per token, and that of its random lists alone "
            f"{floor:.3f}. Change the seed, the steps or the learning rate."
        )
    return checkpoints / f"step-{steps:06d}"


def learn_video(recipe: Recipe, model: Path, folder: Path) -> tuple[Path, dict[str, float]]:
    """Stage 2; the first checkpoint in the range of accuracies, and what it reached. Raises RuntimeError: none is."""
    run, every = folder / "video", recipe.check_every
    sets = {name: str(folder / f"{name}.jsonl") for name in ("held_out", "unseen")}
    own = {
        "data.eval": sets, "eval.every": every, "eval.before": False, "eval.after": False, "eval.temperature": 0.0,
        "eval.headline_set": "held_out", "training.checkpoint_every": every, "training.keep_checkpoints": 10_000,
    }  # fmt: skip
    steps, rate = recipe.video_steps, recipe.video_learning_rate
    checkpoints = train_stage(recipe, model, run, folder / "train.jsonl", steps, rate, **own)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    accuracies = {line["step"]: line["eval/accuracy/held_out"] for line in lines if "eval/accuracy" in line}
    lowest, highest = recipe.target_accuracy, recipe.highest_accuracy
    step = next((step for step, accuracy in accuracies.items() if lowest <= accuracy <= highest), None)
    if step is None:
        raise RuntimeError(
            f"greedy accuracy was never between {lowest} and {highest}: {accuracies}. Change the seed, the steps or "
            "the learning rate."
        )
    unseen = next(line["eval/accuracy/unseen"] for line in lines if line["step"] == step)
    return checkpoints / f"step-{step:06d}", {
        "steps": step, "accuracy_seen": accuracies[step], "accuracy_unseen": unseen,
    }  # fmt: skip
