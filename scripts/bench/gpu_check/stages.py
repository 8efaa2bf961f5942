"""Stages of the check and of plans of measurements: their commands, and the packages that each needs.

bash scripts/gpu_check.sh --plan training --minutes 9.5 --out FOLDER
bash scripts/gpu_check.sh --plan training --minutes 9.5 --out FOLDER --resume       # until all stages are ok
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from scripts.bench.gpu_check.counted import read_counted
from scripts.bench.gpu_check.machine import is_there
from scripts.bench.gpu_check.reading import (
    Reading,
    read_bench_point,
    read_environment,
    read_kernels,
    read_tests,
    read_training,
    read_whole_step,
)

Command = tuple[str, ...]
PYTHON = sys.executable
VLM_PG: Command = (PYTHON, "-m", "vlm_pg.cli")
OTHERS: Command = (PYTHON, "-m", "scripts.bench.others")
# Models that are for a CPU: seconds there, no gain from bf16.
LITTLE = ("small", "mid")
# Of the adapter that a whole step trains.
LORA_RANK = 16
# Stands for --resume where the file after --out exists when the command begins.
RESUME = "{--resume}"


@dataclass(frozen=True)
class Measurement:
    """Contestants at one point.

    Args:
        point: as ``bench`` takes it, such as "4096,8,512".
        checkpointing: of a step alone.
    """

    kind: Literal["step", "rollout"]
    model: str
    point: str
    contestants: tuple[str, ...]
    checkpointing: bool = False

    @property
    def dtype(self) -> str:
        return "fp32" if self.model in LITTLE else "bf16"

    def command(self, path: Path, device: str, *more: str) -> Command:
        """Measure into a file, which may hold other points already; ``paper_commands`` count the same."""
        common = ("--model", self.model, "--dtype", self.dtype, "--device", device, "--points", self.point)
        contestants = ("--out", str(path), "--contestants", *self.contestants)
        checkpointing = ("--checkpointing",) if self.checkpointing else ()
        program = OTHERS if self.kind == "step" else (*VLM_PG, "bench", "rollout")
        return (*program, *common, *contestants, *checkpointing, *more, RESUME)


def paper_file(folder: Path, model: str) -> Path:
    """The file of ``paper_commands`` for a model."""
    return folder / f"paper-{model}.json"


def paper_commands(folder: Path, measurements: Sequence[Measurement], device: str) -> list[Command]:
    """``scripts.bench.paper`` of the same models, points, contestants and settings: a command for each model."""
    commands = []
    for model in _each(one.model for one in measurements):
        mine = [one for one in measurements if one.model == model]
        words = ["--models", model, "--dtype", mine[0].dtype]
        for kind, option in (("step", "--points"), ("rollout", "--rollout-points")):
            if points := _each(one.point for one in mine if one.kind == kind):
                words += [option, *points]
        words += ["--contestants", *_each(name for one in mine for name in one.contestants)]
        words += ["--checkpointing"] if any(one.checkpointing for one in mine) else []
        # A policy's default there (model.liger).
        words += ["--liger"] if device == "cuda" and is_there("liger_kernel") else []
        commands.append((PYTHON, "-m", "scripts.bench.paper", *words, "--out", str(paper_file(folder, model))))
    return commands


def _each(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


ENVIRONMENT = "environment"
_MODEL = ("torch", "transformers", "pydantic")
_TRAINING = (*_MODEL, "av", "qwen_vl_utils", "requests", "torchvision", "xxhash", "rich", "yaml", "jinja2")
# The classes are Qwen2.5-VL's in both (vlm_pg/bench/shapes.py).
MODELS = ("small", "mid", "3b", "7b", "8b")
ON_A_CPU = ("--no-memory", "--threads", "1")
STEP_CONTESTANTS = ("grouped", "transformers-batch", "prefix-grouper-kind")
ROLLOUT_CONTESTANTS = ("ours", "transformers-generate")
TRAINING_STEPS, PROMPTS, EVALUATED = 4, 8, 32


@dataclass(frozen=True)
class Stage:
    """Commands that run one after another until one fails.

    ``share``: of the time that is left, compared with the stages that follow. ``least_seconds``: it does not begin with
    less, unless it is the first. ``read``: what they have found; it is asked also where they failed. ``writes``: files
    of an earlier try that its commands would not write over. ``reads_others``: it reads what other stages have left,
    so it is asked again where the commands have been done before.
    """

    name: str
    title: str
    commands: tuple[Command, ...]
    share: float
    read: Callable[[], Reading]
    needs: tuple[str, ...] = ()
    needs_gpu: bool = False
    least_seconds: float = 0.0
    writes: tuple[Path, ...] = ()
    reads_others: bool = False


def as_begun(command: Command) -> Command:
    """The command with ``RESUME`` replaced or left out."""
    if RESUME not in command:
        return command
    is_there = Path(command[command.index("--out") + 1]).exists()
    return tuple("--resume" if word == RESUME else word for word in command if is_there or word != RESUME)


def log_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.log"


def check(folder: Path, device: str, models: tuple[str, ...]) -> list[Stage]:
    """Everything, once, briefly.

    Args:
        device: cpu or cuda.
        models: whose dimensions ``bench`` takes.
    """
    stages = [environment(folder), _tests(folder), _kernels(folder, device), _training(folder, "fp32")]
    stages.append(_training(folder, "bf16"))
    measured = []
    for model in models:
        little = model in LITTLE
        step = Measurement("step", model, "64,2,8" if little else "4096,8,512", STEP_CONTESTANTS, not little)
        rollout = Measurement("rollout", model, "64,2,4" if little else "4096,8,128", ROLLOUT_CONTESTANTS)
        stages.append(_bench(folder, device, step, "One group's forward and backward", "grouped", 14))
        stages.append(_bench(folder, device, rollout, "Generation", "ours", 12))
        measured += [step, rollout]
    # What is counted is counted for a GPU, wherever that happens.
    stages.append(counted(folder, device, 16, measured))
    return stages


def environment(folder: Path) -> Stage:
    path = folder / "environment.json"
    command = (PYTHON, "-m", "scripts.bench.gpu_check.machine", str(path))
    return Stage(ENVIRONMENT, "Environment and versions", (command,), 8, partial(read_environment, path))


def _tests(folder: Path) -> Stage:
    command = (PYTHON, "-m", "pytest", "-v", "-rfE", "--tb=short", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu")
    needs = (*_MODEL, "pytest", "hypothesis")
    read = partial(read_tests, log_of(folder, "tests"))
    return Stage("tests", "Tests on the GPU (tests/gpu)", (command,), 32, read, needs, needs_gpu=True)


def _kernels(folder: Path, device: str) -> Stage:
    dtype = "bf16" if device == "cuda" else "fp32"
    path = folder / "kernels.json"
    command = (PYTHON, "-m", "scripts.bench.gpu_check.kernels", device, dtype, str(path))
    title = f"Attention kernels against plain softmax at real head sizes, {dtype}"
    return Stage("kernels", title, (command,), 8, partial(read_kernels, path), _MODEL)


def _training(folder: Path, dtype: str) -> Stage:
    """The embedded task from rendered clips to accuracy after training; ``bf16`` on a GPU alone."""
    data, name = folder / "embedded", f"training-{dtype}"
    overrides = {
        "run.dir": folder / name,
        "run.name": name,
        "model.dtype": dtype,
        "data.train": data / "train.jsonl",
        "data.eval.seen_orders": data / "eval_seen.jsonl",
        "data.eval.unseen_orders": data / "eval_unseen.jsonl",
        "eval.limit": EVALUATED,
        "eval.controls": "[]",
        "eval.control_sets": "null",
        "training.steps": TRAINING_STEPS,
        "training.prompts_per_step": PROMPTS,
        "observe.trackers": "[]",
    }
    # A few clips; equal arguments find the set of an earlier stage ready.
    prepare = (*VLM_PG, "prepare", "embedded", "--out", str(data), "--train", "128", "--eval", str(EVALUATED))
    train = (*VLM_PG, "train", "configs/embedded.yaml", *(f"{key}={value}" for key, value in overrides.items()))
    title = f"{TRAINING_STEPS} training steps of the embedded task, {dtype}"
    read = partial(read_training, folder / name, TRAINING_STEPS)
    return Stage(name, title, (prepare, train), 12, read, _TRAINING, needs_gpu=dtype != "fp32")


def _bench(folder: Path, device: str, measurement: Measurement, title: str, ours: str, share: float) -> Stage:
    little, name = measurement.model in LITTLE, f"{measurement.kind}-{measurement.model}"
    path = folder / f"{name}.json"
    command = measurement.command(path, device, *(("--repeats", "1", *ON_A_CPU) if little else ("--repeats", "2")))
    words = f"{title}, {measurement.model} dimensions, random weights"
    return Stage(
        name,
        words,
        (command,),
        share,
        partial(read_bench_point, path, measurement.point, ours),
        _MODEL,
        needs_gpu=not little,
    )


def counted(
    folder: Path, device: str, share: float, measurements: Sequence[Measurement], least_seconds: float = 0.0
) -> Stage:
    """Counts of ``scripts.bench.paper``, beside the figures that were measured before."""
    commands = tuple(paper_commands(folder, measurements, device))
    files = tuple(Path(command[command.index("--out") + 1]) for command in commands)
    read = partial(read_counted, files, folder)
    return Stage(
        "counted", "Counted beside measured", commands, share, read, _MODEL,
        least_seconds=least_seconds, writes=files, reads_others=True,
    )  # fmt: skip


# Time and peak memory of one group's forward and backward.
TRAINING_POINTS = ("4096,8,512", "8192,8,512", "16384,8,1024", "16384,8,64", "32768,8,512")
# The prefix repeated in one batch needs more than 80 GB beyond the first points; one sequence at a time always fits.
TRAINING_CONTESTANTS = ("grouped", "prefix-grouper-kind", "transformers-batch", "transformers-sequential")
ROLLOUT_POINTS = ("4096,8,512", "4096,32,512", "16384,8,512", "16384,32,512", "65536,8,512", "65536,32,512")
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
    """A whole step with LoRA behind videos of so many frames, until one no longer fits."""
    stages = [environment(folder)]
    for frames in FRAMES:
        path = folder / f"grpo-step-{frames}.json"
        options = ("--frames", str(frames), "--model", model, "--device", device, "--out", str(path))
        lengths = ("--generations", str(GENERATIONS), "--new-tokens", str(NEW_TOKENS))
        command = (PYTHON, "-m", "scripts.bench.gpu_check.grpo_step", *options, *lengths)
        title = f"A whole GRPO step, {model} dimensions, LoRA, {frames} frames, G = {GENERATIONS}"
        read = partial(read_whole_step, path)
        stages.append(
            Stage(
                f"grpo-step-{frames}", title, (command,), 1, read, (*_MODEL, "peft"), True, least_seconds=LEAST_SECONDS
            )
        )
    return stages


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
        stages.append(Stage(label, title, (command,), 1, read, _MODEL, needs_gpu=True, least_seconds=LEAST_SECONDS))
    return [*stages, counted(folder, device, 1, points, COUNTING_SECONDS)]
