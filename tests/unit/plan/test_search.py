"""Advice of the planner, followed: its overrides, given to a configuration, make the setup and plan it announced."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2_5_VLConfig

from tests.support.processes import ROOT
from tests.support.runs import write_config
from vlm_pg.config import RunConfig, load_config
from vlm_pg.memory import GIB
from vlm_pg.plan.command import model_shape
from vlm_pg.plan.memory import plan_to_fit
from vlm_pg.plan.report import verdict, verdict_lines
from vlm_pg.plan.search import Option, first_remedy, levers, shorter_prompts
from vlm_pg.plan.setup import Setup, setup_of
from vlm_pg.plan.shape import ModelShape

pytest.importorskip("peft")
RANKS = 4
TEXT: dict[str, Any] = {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16}
TEXT |= {"num_key_value_heads": 4, "intermediate_size": 4096, "vocab_size": 32768, "tie_word_embeddings": False}
VISION = {"depth": 4, "hidden_size": 256, "num_heads": 4, "intermediate_size": 700, "out_hidden_size": 1024}
BASES: dict[str, tuple[str, ...]] = {
    "all parts in fp32": ("model.train=[tower,merger,language]", "training.learning_rates={tower: 1.0e-7}"),
    "offload refused": ("model.offload_layer_inputs=false",),
    "bf16 with a KL term": ("model.dtype=bf16", "model.gradient_checkpointing=true", "algorithm.kl_coef=0.05"),
    "ZeRO-2": ("training.engine=deepspeed", "training.deepspeed_config=configs/deepspeed/zero2.json"),
    "merger": ("model.train=[merger]",),
    "LoRA": ("model.lora.rank=4", "model.dtype=bf16"),
}


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    Qwen2_5_VLConfig(text_config=TEXT, vision_config=VISION, tie_word_embeddings=False).save_pretrained(folder)
    sections: dict[str, Any] = {
        "model": {"path": str(folder)},
        "data": {"train": "train.jsonl"},
        "media": {"max_frames": 64},
        "prompt": {"max_prompt_tokens": 12_000},
        "rollout": {"max_new_tokens": 512},
        "training": {"steps": 1, "prompts_per_step": 6, "micro_batch_tokens": 20_480},
    }
    return write_config(folder / "run.yaml", sections)


@pytest.fixture(autouse=True)
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


SHAPES: dict[str, ModelShape] = {}


def planned(config: RunConfig, ranks: int = RANKS) -> tuple[ModelShape, Setup]:
    # Of one model, a shape depends on the adapter alone.
    key = f"{config.model.path} {config.model.lora}"
    shape = SHAPES[key] = SHAPES.get(key) or model_shape(config)
    return shape, setup_of(config, shape, ranks)


def applied(setup: Setup, option: Option) -> Setup:
    return replace(setup, **option.changes)


def cost(options: Sequence[Option]) -> int:
    return sum(option.cost for option in options)


@pytest.mark.parametrize("base", BASES)
def test_each_option_is_what_its_overrides_do(run_file: Path, base: str) -> None:
    shape, setup = planned(load_config(run_file, BASES[base]))
    for name, options in levers(shape, setup).items():
        for option in options:
            followed, then = planned(load_config(run_file, [*BASES[base], *option.overrides.split()]))
            expected = applied(setup, option)
            # What is said of options that could still be added may change with them.
            assert replace(then, part_rates=setup.part_rates) == expected, (name, option.overrides)
            assert followed.weights.adapter == (shape.weights.adapter or shape.weights.default_adapter) * then.lora
            left = [later.overrides for options_then in levers(followed, then).values() for later in options_then]
            assert option.overrides not in left, name


def test_every_lever_is_followed_somewhere(run_file: Path) -> None:
    """With both states of an adapter; one process has other levers than several."""
    found = {name for base in BASES for name in levers(*planned(load_config(run_file, BASES[base])))}
    assert found == {
        "gradient checkpointing",
        "token budget",
        "ZeRO with and without offload",
        "sequence parallelism",
        "bf16",
        "parts to train",
        "LoRA and QLoRA",
        "QLoRA",
    }
    alone = levers(*planned(load_config(run_file), 1))
    assert "sequence parallelism" not in alone
    assert [option.short for option in alone["ZeRO with and without offload"]] == ["ZeRO-2, offload", "ZeRO-3, offload"]
    frozen = levers(*planned(load_config(run_file, BASES["merger"])))
    assert not frozen.keys() & {"parts to train", "LoRA and QLoRA"}


def test_of_a_deepspeed_file_of_ones_own_no_stage_is_taken_back(run_file: Path) -> None:
    """And what the shipped file that follows sets otherwise is counted."""
    own = run_file.parent / "own.json"
    own.write_text(json.dumps({"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1e6}}))
    words = ["training.engine=deepspeed", f"training.deepspeed_config={own}"]
    shape, setup = planned(load_config(run_file, words))
    (option,) = levers(shape, setup)["ZeRO with and without offload"]
    assert option.short == "ZeRO-3, offload"
    assert planned(load_config(run_file, [*words, *option.overrides.split()]))[1] == applied(setup, option)


USUAL = [("all parts in fp32", RANKS), ("bf16 with a KL term", 1), ("LoRA", RANKS)]
ROWS = [(base, ranks) for base in BASES for ranks in (1, RANKS)]


@pytest.mark.parametrize(
    ("base", "ranks"), [pytest.param(*row, marks=[] if row in USUAL else pytest.mark.matrix) for row in ROWS]
)
def test_the_advice_makes_the_run_fit(run_file: Path, base: str, ranks: int) -> None:
    """At sizes from twice too small to far too small: the sentence's overrides fit, in as much memory as it says."""
    config = load_config(run_file, BASES[base])
    shape, setup = planned(config, ranks)
    peak = plan_to_fit(shape, setup, 1e-3).peak / GIB
    seen = set()
    for share in (0.9, 0.5, 0.25, 0.12, 0.05):
        gib = peak * share
        line = verdict(shape, setup, gib)
        found = re.search(r"(?:change first|or shorter prompts): (.*) \(then ([\d.,]+) (.)iB, (.*)\)$", line)
        if found is None:
            assert "even prompts of one token do not fit" in line
            continue
        overrides, size, unit, phase = found.groups()
        seen.add(overrides)
        followed = load_config(run_file, [*BASES[base], *overrides.split()])
        plan_then = plan_to_fit(*planned(followed, ranks), gib)
        assert plan_then.fits(gib), line
        expected = float(size.replace(",", "")) * {"G": 1.0, "M": 2**-10}[unit]
        assert plan_then.peak / GIB == pytest.approx(expected, abs=0.051 if unit == "G" else 1e-4)
        assert plan_then.phase == phase
        remedy = first_remedy(shape, setup, gib) or shorter_prompts(shape, setup, gib)
        assert remedy is not None and remedy.plan == plan_then
        assert verdict(*planned(followed, ranks), gib).startswith("fits")
    assert seen


def test_the_cheapest_combination_comes_first(run_file: Path) -> None:
    """No cheaper one fits, so that nothing that is set could be left out."""
    shape, setup = planned(load_config(run_file, BASES["all parts in fp32"]))
    choices = itertools.product(*[(None, *options) for options in levers(shape, setup).values()])
    combinations = [[option for option in chosen if option is not None] for chosen in choices]
    peak = plan_to_fit(shape, setup, 1e-3).peak / GIB
    counts = set()
    for share in (0.9, 0.6, 0.4, 0.2, 0.1):
        remedy = first_remedy(shape, setup, peak * share)
        if remedy is None:
            continue
        counts.add(len(remedy.options))
        for options in combinations:
            if cost(options) < cost(remedy.options):
                less = replace(setup, **{k: v for option in options for k, v in option.changes.items()})
                adapter = shape.weights.default_adapter * less.lora
                adapted = replace(shape, weights=replace(shape.weights, adapter=adapter))
                assert not plan_to_fit(adapted, less, peak * share).fits(peak * share)
    assert len(counts) > 1


def test_the_longest_prompts_that_fit_are_the_last_ones(run_file: Path) -> None:
    config = load_config(run_file, BASES["LoRA"])
    shape, setup = planned(config, 1)
    gib = next(g for g in (0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15) if first_remedy(shape, setup, g) is None)
    shorter = shorter_prompts(shape, setup, gib)
    assert shorter is not None
    line = verdict(shape, setup, gib)
    assert f"; use more GPUs, or shorter prompts: {shorter.overrides} (then " in line
    searched = "gradient checkpointing, token budget, ZeRO with and without offload, QLoRA"
    assert f"no combination of {searched} makes it fit with prompts of {setup.prefix:,} tokens" in line
    keys = [word.partition("=")[0] for word in shorter.overrides.split()]
    assert len(keys) == len(set(keys))
    followed = load_config(run_file, [*BASES["LoRA"], *shorter.overrides.split()])
    assert plan_to_fit(*planned(followed, 1), gib).fits(gib)
    longer = load_config(run_file, [*BASES["LoRA"], f"prompt.max_prompt_tokens={shorter.setup.prefix + 1}"])
    assert first_remedy(*planned(longer, 1), gib) is None
    with_nothing = verdict(shape, setup, 0.01)
    assert with_nothing.endswith("use more GPUs: even prompts of one token do not fit")


def test_prompts_are_shortened_where_nothing_else_is_left_to_change(run_file: Path) -> None:
    """Of a model of text, too."""
    shape, setup = planned(load_config(run_file, [*BASES["LoRA"], "model.lora.quantize=nf4"]), 1)
    least = setup.prefix + setup.response + 1
    setup = replace(setup, checkpointing=True, budget=least, least_budget=least)
    setup = replace(setup, stage=3, offload_optimizer=True, offload_parameters=True)
    assert not levers(shape, setup)
    for each in (shape, replace(shape, tower=None)):
        shorter = shorter_prompts(each, setup, 0.9 * plan_to_fit(each, setup, 1e-3).peak / GIB)
        assert shorter is not None
        assert re.fullmatch(r"training\.micro_batch_tokens=\d+ prompt\.max_prompt_tokens=\d+", shorter.overrides)


def test_the_largest_prompt_and_budget_are_followed(run_file: Path) -> None:
    """Frames that make such a prompt, of which a tenth more is too much; and a budget for prompts as they are."""
    base, gib = [*BASES["bf16 with a KL term"], "media.max_frames=16", "prompt.max_prompt_tokens=100000"], 8.0
    base += ["training.micro_batch_tokens=100512", "training.prompts_per_step=60"]
    printed = "\n".join(verdict_lines(*planned(load_config(run_file, base), 1), gib))
    numbers = re.findall(r"largest .* that fits: ([\d,]+) tokens", printed)
    prompt, budget = (int(number.replace(",", "")) for number in numbers)
    for factor, fits in ((1.0, True), (1.1, False)):
        tokens = int(prompt * factor)
        # 64 visual tokens a frame, 512 of text.
        words = [f"media.max_frames={(tokens - 512) // 128 * 2}", f"prompt.max_prompt_tokens={tokens}"]
        words += [f"training.micro_batch_tokens={tokens + 512}"]
        assert plan_to_fit(*planned(load_config(run_file, [*base, *words]), 1), gib).fits(gib) is fits
    # Whatever budget is set; a step's prompts would fill either.
    wide = [*base, "training.micro_batch_tokens=200000"]
    again = "\n".join(verdict_lines(*planned(load_config(run_file, wide), 1), gib))
    assert re.findall(r"largest .* that fits: ([\d,]+) tokens", again) == numbers
    for factor, fits in ((1.0, True), (1.1, False)):
        words = [f"training.micro_batch_tokens={int(budget * factor)}", "prompt.max_prompt_tokens=2000"]
        assert plan_to_fit(*planned(load_config(run_file, [*base, *words]), 1), gib).fits(gib) is fits
    # Fewer prompts leave room for what their features take, and are no reason to fill less.
    few = "\n".join(verdict_lines(*planned(load_config(run_file, [*base, "training.prompts_per_step=6"]), 1), gib))
    largest = int(re.findall(r"micro_batch_tokens that fits: ([\d,]+)", few)[0].replace(",", ""))
    assert budget <= largest <= 1.1 * budget
