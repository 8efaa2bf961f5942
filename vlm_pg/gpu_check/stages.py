"""The stages of the check, and what each needs to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vlm_pg.gpu_check.counted import read_counted
from vlm_pg.gpu_check.measurements import (
    LITTLE,
    PYTHON,
    RESUME,
    VLM_PG,
    Command,
    Measurement,
    paper_commands,
)
from vlm_pg.gpu_check.reading import (
    Reading,
    read_bench,
    read_environment,
    read_kernels,
    read_tests,
    read_training,
)

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


def _bench(folder: Path, device: str, measurement: Measurement, title: str, ours: str, share: float) -> Stage:
    little, name = measurement.model in LITTLE, f"{measurement.kind}-{measurement.model}"
    path = folder / f"{name}.json"
    command = measurement.command(path, device, *(("--repeats", "1", *ON_A_CPU) if little else ("--repeats", "2")))
    words = f"{title}, {measurement.model} dimensions, random weights"
    return Stage(name, words, (command,), share, partial(read_bench, path, 1, ours), _MODEL, needs_gpu=not little)


def counted(
    folder: Path, device: str, share: float, measurements: Sequence[Measurement], least_seconds: float = 0.0
) -> Stage:
    """What ``vlm-pg bench paper`` counts of the same, beside what was measured before."""
    return counted_by(folder, share, paper_commands(folder, measurements, device), least_seconds)


def counted_by(folder: Path, share: float, commands: Sequence[Command], least_seconds: float = 0.0) -> Stage:
    """The same of commands of ``vlm-pg bench paper`` with ``--out``."""
    commands = tuple(commands)
    files = tuple(Path(command[command.index("--out") + 1]) for command in commands)
    read = partial(read_counted, files, folder)
    return Stage(
        "counted", "Counted beside measured", commands, share, read, _MODEL,
        least_seconds=least_seconds, writes=files, reads_others=True,
    )  # fmt: skip
