"""Supervised runs of a few seconds: chains of thought on clips of the embedded task, several questions on each clip."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor

from tests.support.runs import ROOT
from tests.support.small_run import clips_run
from vlm_pg.data.records import read_records, write_records

TINY = ROOT / "assets/tiny-qwen2_5-vl"


def supervised_run(
    folder: Path, questions: int = 3, clips: int = 8, pairs: bool = False, **sections: dict[str, Any]
) -> Path:
    """A configuration in ``folder`` that trains on ``questions`` records on each clip; the file has clip after clip,
    first all first questions. The last one of each clip is a conversation; or all are preference ``pairs``."""
    config = clips_run(folder, train=clips, evaluation=4, **sections)
    samples, _ = read_records(folder / "clips" / "train.jsonl")
    records = []
    for number in range(questions):
        for sample in samples:
            one = replace(
                sample, sample_id=f"{sample.sample_id}-{number}", question=f"{sample.question} {'now ' * number}"
            )
            thought = f"<think> red blue {'white ' * number}</think>"
            if pairs:
                one = replace(one, process=thought, rejected=f"<think>green</think> {'yes ' * number}")
            elif number == questions - 1:
                one = replace(one, turns=(f"{thought} yes", "And then?", "blue, then white"), answer="", options=())
                one = replace(one, answer_kind="free_form")
            else:
                one = replace(one, process=thought)
            records.append(one)
    write_records(folder / "clips" / "cot.jsonl", records)
    return config


def sections_of(objective: str, folder: Path, **training: Any) -> dict[str, dict[str, Any]]:
    """Sections of ``supervised_run``; the teacher of distill is the shipped model with noise."""
    others: dict[str, Any] = {}
    rollout: dict[str, Any] = {"num_generations": 8, "max_new_tokens": 60}
    if objective == "distill":
        others = {"distillation": {"teacher": str(save_teacher(folder / "teacher")), "top_k": 12}}
        rollout = {"num_generations": 3, "max_new_tokens": 12}
    return others | {
        "run": {"resume": "auto"},
        "data": {"train": str(folder / "clips" / "cot.jsonl")},
        "media": {"min_pixels": 19600, "max_pixels": 19600},  # 100 visual tokens, else there is too little to share
        "prompt": {"max_prompt_tokens": 200},
        "rollout": rollout,
        "training": {"objective": objective, "prompts_per_step": 7, "micro_batch_tokens": 480, **training},
    }


def save_teacher(folder: Path) -> Path:
    """The shipped tiny model with noise on its weights."""
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(TINY)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * weight.std() * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(folder)
    Qwen2_5_VLProcessor.from_pretrained(TINY).save_pretrained(folder)
    return folder
