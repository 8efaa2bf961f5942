"""A run with a LoRA adapter: it trains, its checkpoints are adapters, and resumed equals uninterrupted, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from data_pipelines.embedded import main as prepare_embedded
from tests.support.runs import ROOT, read_lines, run_cli
from tests.support.short_run import short_run, train_here

peft = pytest.importorskip("peft")

STEPS = 3
BASE = ROOT / "assets/tiny-qwen2_5-vl"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lora")
    prepare_embedded(["--out", str(path / "data"), "--train", "16", "--eval", "8"])
    sections = {
        "include": [str(ROOT / "configs" / "embedded.yaml")],
        "model": {"path": str(BASE), "train": ["language"], "lora": {"rank": 4, "alpha": 8}},
        "data": {
            "train": str(path / "data/train.jsonl"),
            "eval": {name: str(path / "data/eval_seen.jsonl") for name in ("seen_orders", "unseen_orders")},
        },
        "media": {"workers": 0},
        "training": {"steps": STEPS, "prompts_per_step": 4, "checkpoint_every": 1, "keep_checkpoints": 9},
        "rollout": {"num_generations": 4},
        "algorithm": {"kl_coef": 0.05},
        "eval": {"before": False, "controls": [], "control_sets": [], "headline_set": None},
        "observe": {"trackers": [], "report": False},
    }
    (path / "run.yaml").write_text(yaml.safe_dump(sections))
    return path


def start(folder: Path, run: str, *overrides: str) -> str:
    done = run_cli("train", str(folder / "run.yaml"), f"run.dir={folder / run}", *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[Path, str]:
    return folder / "whole", start(folder, "whole")


def adapter(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / f"checkpoints/step-{step:06d}" / "adapter_model.safetensors")


def test_the_adapter_trains_and_is_all_that_is_saved(whole: tuple[Path, str]) -> None:
    run, printed = whole
    assert "LoRA adapter of rank 4" in printed
    lines = read_lines(run / "metrics.jsonl")
    assert all(line["grad_norm"] > 0 for line in lines)
    # At first B is zero and the policy is its reference; then it moves away.
    assert lines[0]["kl"] == 0 < lines[-1]["kl"]
    first, last = adapter(run, 1), adapter(run, STEPS)
    assert all((first[name] != last[name]).any() for name in first)
    checkpoint = run / f"checkpoints/step-{STEPS:06d}"
    assert not (checkpoint / "model.safetensors").exists() and not (checkpoint / "config.json").exists()
    states = {name.rsplit("/", 2)[0] for name in load_file(checkpoint / "optimizer/rank-00000-00000.safetensors")}
    assert len(states) == len(last) and all(".lora_" in name for name in states)


def test_resumed_equals_uninterrupted(folder: Path, whole: tuple[Path, str]) -> None:
    start(folder, "resumed", f"run.resume={whole[0] / 'checkpoints/step-000001'}")
    for file in ("adapter_model.safetensors", "optimizer/rank-00000-00000.safetensors"):
        ours, theirs = (
            load_file(run / f"checkpoints/step-{STEPS:06d}" / file) for run in (folder / "resumed", whole[0])
        )
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    ours, theirs = (read_lines(run / "metrics.jsonl") for run in (folder / "resumed", whole[0]))
    for key in ("reward", "loss", "kl", "grad_norm"):
        assert [line[key] for line in ours] == [line[key] for line in theirs[1:]]


@pytest.mark.matrix
def test_a_checkpoint_loads_with_peft(folder: Path, whole: tuple[Path, str]) -> None:
    from transformers import AutoModelForImageTextToText

    checkpoint = whole[0] / f"checkpoints/step-{STEPS:06d}"
    model = peft.PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(BASE), str(checkpoint))
    loaded = peft.get_peft_model_state_dict(model)
    saved = adapter(whole[0], STEPS)
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)


@pytest.mark.matrix
def test_a_rate_of_full_fine_tuning_is_warned_about(tmp_path: Path) -> None:
    config = short_run(tmp_path, model={"lora": {}}, training={"steps": 1, "learning_rate": 1e-6})
    ended = train_here(config)
    assert ended.code == 0 and "its peak learning rate is 1e-06, a rate of full fine-tuning" in ended.printed


@pytest.mark.matrix
def test_other_adapter_settings_are_refused_on_resume(folder: Path, whole: tuple[Path, str]) -> None:
    command = [f"run.dir={folder / 'other'}", f"run.resume={whole[0] / 'checkpoints/step-000001'}", "model.lora.rank=8"]
    done = run_cli("train", str(folder / "run.yaml"), *command)
    assert done.returncode != 0
    assert "cannot be continued with model.lora=" in done.stdout + done.stderr


@pytest.mark.matrix
def test_an_adapter_without_settings_would_not_train(folder: Path, whole: tuple[Path, str]) -> None:
    command = [f"run.dir={folder / 'other'}", f"model.path={whole[0] / 'checkpoints/step-000001'}", "model.lora=null"]
    done = run_cli("train", str(folder / "run.yaml"), *command)
    assert done.returncode != 0
    assert "nothing would train" in done.stdout + done.stderr
