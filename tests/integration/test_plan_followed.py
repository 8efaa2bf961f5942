"""Advice of ``vlm-pg plan``, followed and measured: before and after it an update takes what is planned."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.plan_cases import Case, live_peak, policy_of
from tests.support.runs import write_config
from vlm_pg.config import RunConfig, load_config
from vlm_pg.memory import GIB
from vlm_pg.plan.command import model_shape
from vlm_pg.plan.memory import USABLE, Plan, plan_memory
from vlm_pg.plan.report import verdict, verdict_lines
from vlm_pg.plan.setup import Setup, setup_of
from vlm_pg.plan.shape import ModelShape

pytestmark = pytest.mark.matrix

pytest.importorskip("peft")
WITHIN = 0.15
TEXT: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
TEXT |= {"intermediate_size": 1024, "vocab_size": 8192}
# Nothing that a run chooses by itself from a GPU's memory.
BASE: tuple[str, ...] = (
    "model.train=[language]",
    "model.logits_chunk_mb=4",
    "model.mlp_tile_rows=0",
    "model.vision_piece_tokens=0",
)
BASE += ("model.offload_layer_inputs=false", "model.offload_prefix_states=false")
BUDGET, CHECKPOINTING = "training.micro_batch_tokens=1153", "model.gradient_checkpointing=true"
SHORTER = "training.micro_batch_tokens=N prompt.max_prompt_tokens=N"
# A run in this dtype on a GPU with so much of what it needs is advised this; N: any number.
ADVICE = [
    ("fp32", 0.9, BUDGET),
    ("fp32", 0.7, CHECKPOINTING),
    ("fp32", 0.5, f"{BUDGET} model.lora={{}}"),
    ("fp32", 0.25, f"{CHECKPOINTING} {BUDGET} model.lora.quantize=nf4"),
    ("fp32", 0.12, f"{CHECKPOINTING} model.dtype=bf16 model.lora.quantize=nf4 {SHORTER}"),
    ("bf16", 0.6, "model.lora={}"),
    ("bf16", 0.25, f"{CHECKPOINTING} {BUDGET} model.lora={{}}"),
    ("bf16", 0.2, f"{CHECKPOINTING} {BUDGET} model.lora.quantize=nf4"),
    ("bf16", 0.15, f"{CHECKPOINTING} model.lora.quantize=nf4 {SHORTER}"),
]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    policy_of(Case(text=TEXT)).model.config.save_pretrained(folder)
    sections: dict[str, Any] = {
        "model": {"path": str(folder)},
        "data": {"train": "train.jsonl"},
        "prompt": {"max_prompt_tokens": 1024},
        "rollout": {"max_new_tokens": 129, "num_generations": 8},
        "training": {"steps": 1, "prompts_per_step": 1, "micro_batch_tokens": 8192},
    }
    return write_config(folder / "run.yaml", sections)


@cache
def planned(run_file: Path, *overrides: str) -> tuple[ModelShape, Setup, Plan]:
    """Of prompts of text; and it is what is measured."""
    config = load_config(run_file, [*BASE, *overrides])
    shape = replace(model_shape(config), tower=None)
    setup = setup_of(config, shape, 1)
    plan, found = plan_memory(shape, setup), measured(config)
    print(f"{overrides}: measured {found / 2**20:.1f} MiB, planned {plan.peak / 2**20:.1f} MiB ({plan.phase})")
    assert plan.peak == pytest.approx(found, rel=WITHIN)
    return shape, setup, plan


def measured(config: RunConfig) -> int:
    responses = (config.rollout.max_new_tokens,) * config.rollout.num_generations
    model = config.model.model_dump(exclude={"path"})
    budget = config.training.micro_batch_tokens
    return live_peak(Case(config.prompt.max_prompt_tokens, 0, responses, budget, model, text=TEXT))


@pytest.mark.parametrize(("dtype", "share", "advice"), ADVICE)
def test_advice_does_what_it_says(run_file: Path, dtype: str, share: float, advice: str) -> None:
    if "nf4" in advice:
        pytest.importorskip("bitsandbytes")
    shape, setup, before = planned(run_file, f"model.dtype={dtype}")
    gib = share * before.peak / GIB
    line = verdict(shape, setup, gib)
    pattern = re.escape(advice).replace("N", r"\d+")
    found = re.search(rf"(?:change first|shorter prompts): ({pattern}) \(then ", line)
    assert found is not None, line
    shape, setup, after = planned(run_file, f"model.dtype={dtype}", *found[1].split())
    assert after.peak < before.peak and verdict(shape, setup, gib).startswith("fits: ")


def test_the_largest_prompt_and_budget_take_what_there_is(run_file: Path) -> None:
    base = ("model.dtype=bf16", "model.lora={}", CHECKPOINTING, BUDGET)
    shape, setup, plan = planned(run_file, *base)
    gib = 1.2 * plan.peak / GIB
    printed = "\n".join(verdict_lines(shape, setup, gib))
    numbers = re.findall(r"largest .* that fits: ([\d,]+) tokens", printed)
    prompt, budget = (int(number.replace(",", "")) for number in numbers)
    assert prompt > setup.prefix and budget > setup.budget
    for words in (
        (f"prompt.max_prompt_tokens={prompt}", f"training.micro_batch_tokens={prompt + 129}"),
        (f"training.micro_batch_tokens={budget}",),
    ):
        *_, followed = planned(run_file, *base, *words)
        assert followed.fits(gib) and followed.peak == pytest.approx(USABLE * gib * GIB, rel=0.03)
