"""What is to be measured on a GPU, point by point, so that each command ends within ten minutes and the next goes on.

bash scripts/gpu_check.sh --plan training --minutes 9.5 --out FOLDER
bash scripts/gpu_check.sh --plan training --minutes 9.5 --out FOLDER --resume       # as often as it says so
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from vlm_pg.gpu_check.measurements import PYTHON, Measurement, whole_step_command
from vlm_pg.gpu_check.reading import read_bench_point, read_whole_step
from vlm_pg.gpu_check.stages import Stage, counted, counted_by, environment

_NEEDS = ("torch", "transformers", "pydantic")
# Time and peak memory of one group's forward and backward.
TRAINING_POINTS = ("4096,8,512", "8192,8,512", "16384,8,1024", "16384,8,64", "32768,8,512")
# The prefix repeated in one batch needs more than 80 GB beyond the first points; one sequence at a time always fits.
TRAINING_CONTESTANTS = ("grouped", "prefix-grouper-kind", "transformers-batch", "transformers-sequential")
ROLLOUT_POINTS = ("4096,8,512", "4096,32,512", "16384,8,512", "16384,32,512", "65536,8,512", "65536,32,512")
ROLLOUT_CONTESTANTS = ("ours", "transformers-generate")
# Of a point, with what is slow at long prefixes; the model's random weights alone take part of a minute.
LEAST_SECONDS = 240
# Of all points on a dozen cores.
COUNTING_SECONDS = 120
FRAMES = (64, 128, 256, 512, 1024)
GENERATIONS, NEW_TOKENS = 8, 512


def training(folder: Path, device: str, model: str) -> list[Stage]:
    """Forward and backward against transformers and prefix_grouper, with checkpointing."""
    points = [Measurement("step", model, point, TRAINING_CONTESTANTS, True) for point in TRAINING_POINTS]
    return _points(folder, device, "training", points, "grouped")


def rollouts(folder: Path, device: str, model: str) -> list[Stage]:
    """Generation against transformers' generate, and against the time to read weights, keys and values once."""
    points = [Measurement("rollout", model, point, ROLLOUT_CONTESTANTS) for point in ROLLOUT_POINTS]
    return _points(folder, device, "rollouts", points, "ours")


def grpo_step(folder: Path, device: str, model: str) -> list[Stage]:
    """A whole step with LoRA behind videos of so many frames, until one no longer fits; each as counted, too."""
    stages = [environment(folder)]
    for frames in FRAMES:
        path = folder / f"grpo-step-{frames}.json"
        options = ("--frames", str(frames), "--model", model, "--device", device, "--out", str(path))
        lengths = ("--generations", str(GENERATIONS), "--new-tokens", str(NEW_TOKENS))
        command = (PYTHON, "-m", "vlm_pg.gpu_check.grpo_step", *options, *lengths)
        title = f"A whole GRPO step, {model} dimensions, LoRA, {frames} frames, G = {GENERATIONS}"
        read = partial(read_whole_step, path)
        stages.append(
            Stage(
                f"grpo-step-{frames}", title, (command,), 1, read, (*_NEEDS, "peft"), True, least_seconds=LEAST_SECONDS
            )
        )
    points = [f"{frames},{GENERATIONS},{NEW_TOKENS}" for frames in FRAMES]
    return [*stages, counted_by(folder, 1, [whole_step_command(folder, model, points, device)], COUNTING_SECONDS)]


# Name: (what it measures in words, its stages by folder, device and model).
PLANS: dict[str, tuple[str, Callable[[Path, str, str], list[Stage]]]] = {
    "training": ("one group's forward and backward, five points", training),
    "rollouts": ("generation, six points", rollouts),
    "grpo-step": ("a whole step with LoRA, 64 to 1,024 frames", grpo_step),
}


def _points(folder: Path, device: str, name: str, points: Sequence[Measurement], ours: str) -> list[Stage]:
    """The environment, a stage for each point, all into one file, and what was counted."""
    path = folder / f"{name}.json"
    stages = [environment(folder)]
    for one in points:
        command = one.command(path, device, "--repeats", "2")
        title = f"bench {one.kind}, {one.model} dimensions, point {one.point}"
        read = partial(read_bench_point, path, one.point, ours)
        label = f"{name}-{one.point.replace(',', '-')}"
        stages.append(Stage(label, title, (command,), 1, read, _NEEDS, needs_gpu=True, least_seconds=LEAST_SECONDS))
    return [*stages, counted(folder, device, 1, points, COUNTING_SECONDS)]
