"""The stages of the check, and what each needs to run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vlm_pg.gpu_check.counted import read_counted
from vlm_pg.gpu_check.reading import (
    Reading,
    read_bench,
    read_environment,
    read_kernels,
    read_tests,
    read_training,
)

Command = tuple[str, ...]
PYTHON = sys.executable
VLM_PG: Command = (PYTHON, "-m", "vlm_pg.cli")
ENVIRONMENT = "environment"
_MODEL = ("torch", "transformers", "pydantic")
_TRAINING = (*_MODEL, "av", "qwen_vl_utils", "requests", "torchvision", "xxhash", "rich", "yaml", "jinja2")
# The classes are Qwen2.5-VL's in both (vlm_pg/bench/shapes.py).
MODELS = ("small", "mid", "3b", "7b", "8b")
# Models that are for a CPU: seconds there, no gain from bf16.
LITTLE = ("small", "mid")
ON_A_CPU = ("--no-memory", "--threads", "1")
# Stands for --resume where the file after --out exists when the command begins.
RESUME = "{--resume}"
TRAINING_STEPS, PROMPTS, EVALUATED = 4, 8, 32


@dataclass(frozen=True)
class Stage:
    """Commands that run one after another until one fails.

    ``share``: of the time that is left, compared with the stages that follow. ``least_seconds``: it does not begin with
    less, unless it is the first. ``read``: what they have found; it is asked also where they failed. ``asks``: a
    command without which it is left out, if its --help does not end well.
    """

    name: str
    title: str
    commands: tuple[Command, ...]
    share: float
    read: Callable[[], Reading]
    needs: tuple[str, ...] = ()
    needs_gpu: bool = False
    least_seconds: float = 0.0
    asks: Command = ()


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
    on_gpu = device == "cuda"
    stages = [environment(folder), _tests(folder), _kernels(folder, device), _training(folder, "fp32")]
    stages.append(_training(folder, "bf16"))
    for model in models:
        stages += [_step(folder, device, model), _rollout(folder, device, model)]
    # What is counted is counted for a GPU, wherever that happens.
    stages.append(counted(folder, 10 if on_gpu else 1))
    return stages


def environment(folder: Path) -> Stage:
    path = folder / "environment.json"
    command = (PYTHON, "-m", "vlm_pg.gpu_check.environment", str(path))
    return Stage(ENVIRONMENT, "Environment and versions", (command,), 8, partial(read_environment, path))


def _tests(folder: Path) -> Stage:
    command = (PYTHON, "-m", "pytest", "-v", "-rfE", "--tb=short", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu")
    needs = (*_MODEL, "pytest", "hypothesis")
    read = partial(read_tests, log_of(folder, "tests"))
    return Stage("tests", "Tests on the GPU (tests/gpu)", (command,), 32, read, needs, needs_gpu=True)


def _kernels(folder: Path, device: str) -> Stage:
    dtype = "bf16" if device == "cuda" else "fp32"
    path = folder / "kernels.json"
    command = (PYTHON, "-m", "vlm_pg.gpu_check.kernels", device, dtype, str(path))
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


def bench_command(folder: Path, kind: str, name: str, model: str, device: str, point: str, *more: str) -> Command:
    """``vlm-pg bench KIND`` of one point into ``NAME.json``, which may hold other points already."""
    path = folder / f"{name}.json"
    dtype = "fp32" if model in LITTLE else "bf16"
    common = ("--model", model, "--dtype", dtype, "--device", device, "--points", point, "--out", str(path))
    return (*VLM_PG, "bench", kind, *common, *more, RESUME)


def _step(folder: Path, device: str, model: str) -> Stage:
    little, name = model in LITTLE, f"step-{model}"
    more = [
        "--repeats",
        "1" if little else "2",
        "--contestants",
        "grouped",
        "transformers-batch",
        "prefix-grouper-kind",
    ]
    more += [*ON_A_CPU] if little else ["--checkpointing"]
    command = bench_command(folder, "step", name, model, device, "64,2,8" if little else "4096,8,512", *more)
    title = f"One group's forward and backward, {model} dimensions, random weights"
    read = partial(read_bench, folder / f"{name}.json", 1, "grouped")
    return Stage(name, title, (command,), 14, read, _MODEL, needs_gpu=not little)


def _rollout(folder: Path, device: str, model: str) -> Stage:
    little, name = model in LITTLE, f"rollout-{model}"
    more = ["--repeats", "1" if little else "2", "--contestants", "ours", "transformers-generate"]
    more += [*ON_A_CPU] if little else []
    command = bench_command(folder, "rollout", name, model, device, "64,2,4" if little else "4096,8,128", *more)
    title = f"Generation, {model} dimensions, random weights"
    read = partial(read_bench, folder / f"{name}.json", 1, "ours")
    return Stage(name, title, (command,), 12, read, _MODEL, needs_gpu=not little)


def counted(folder: Path, share: float) -> Stage:
    """What ``vlm-pg bench paper`` counts, beside what was measured before."""
    path = folder / "paper.json"
    command = (*VLM_PG, "bench", "paper", "--json", str(path))
    read = partial(read_counted, path, folder)
    return Stage("counted", "Counted beside measured", (command,), share, read, _MODEL, asks=command[:-2])
