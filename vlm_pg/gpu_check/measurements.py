"""What is measured by ``vlm-pg bench`` and counted by ``vlm-pg bench paper``: one description for both commands."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vlm_pg.gpu_check.packages import is_there

Command = tuple[str, ...]
PYTHON = sys.executable
VLM_PG: Command = (PYTHON, "-m", "vlm_pg.cli")
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
        """``vlm-pg bench`` into a file, which may hold other points already; ``paper_commands`` count the same."""
        common = ("--model", self.model, "--dtype", self.dtype, "--device", device, "--points", self.point)
        contestants = ("--out", str(path), "--contestants", *self.contestants)
        checkpointing = ("--checkpointing",) if self.checkpointing else ()
        return (*VLM_PG, "bench", self.kind, *common, *contestants, *checkpointing, "--no-counts", *more, RESUME)


def paper_file(folder: Path, model: str) -> Path:
    """Where ``paper_commands`` has what is counted of a model."""
    return folder / f"paper-{model}.json"


def liger_words(device: str) -> Command:
    """Of ``bench paper``, which counts what a policy runs on there by default (``model.liger``)."""
    return ("--liger",) if device == "cuda" and is_there("liger_kernel") else ()


def paper_commands(folder: Path, measurements: Sequence[Measurement], device: str) -> list[Command]:
    """``vlm-pg bench paper`` of the same models, points, contestants and settings: a command for each model."""
    commands = []
    for model in _each(one.model for one in measurements):
        mine = [one for one in measurements if one.model == model]
        words = ["--models", model, "--dtype", mine[0].dtype, "--works", *_each(one.kind for one in mine)]
        for kind, option in (("step", "--points"), ("rollout", "--rollout-points")):
            if points := _each(one.point for one in mine if one.kind == kind):
                words += [option, *points]
        words += ["--contestants", *_each(name for one in mine for name in one.contestants)]
        words += ["--checkpointing"] if any(one.checkpointing for one in mine) else []
        words += liger_words(device)
        commands.append((*VLM_PG, "bench", "paper", *words, "--out", str(paper_file(folder, model))))
    return commands


def whole_step_command(folder: Path, model: str, points: Sequence[str], device: str) -> Command:
    """``vlm-pg bench paper`` of whole steps ("frames,rollouts,new tokens"), with the settings of ``grpo_step.py``."""
    dtype = "fp32" if model in LITTLE else "bf16"
    words = ("--models", model, "--dtype", dtype, "--works", "grpo-step", "--grpo-points", *points)
    trained = ("--checkpointing", "--lora", str(LORA_RANK), *liger_words(device))
    return (*VLM_PG, "bench", "paper", *words, *trained, "--out", str(paper_file(folder, model)))


def _each(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
