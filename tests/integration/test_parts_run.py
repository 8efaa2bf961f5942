"""Whole runs in which parts of the model train: their output, frozen weights, and resuming bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.runs import ROOT, read_lines
from tests.support.short_run import train_here
from tests.support.small_run import clips_run
from vlm_pg.cli import main
from vlm_pg.models.loading import load_policy
from vlm_pg.models.registry import FAMILIES

BASE = ROOT / "assets/tiny-qwen2_5-vl"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A merger that learns faster than the language model."""
    training = {"prompts_per_step": 2, "checkpoint_every": 1, "warmup_steps": 2, "learning_rates": {"merger": 4e-3}}
    model = {"train": ["merger", "language"]}
    return clips_run(tmp_path_factory.mktemp("parts"), 8, 8, run={"resume": "auto"}, model=model, training=training)


def test_a_run_says_which_parts_train_and_goes_on_bit_for_bit(config: Path, tmp_path: Path) -> None:
    whole = train_here(config, f"run.dir={tmp_path}/whole", "training.steps=3")
    assert whole.code == 0, whole.printed
    assert "parts: tower frozen, merger trained (" in whole.printed
    assert " weights, peak learning rate 0.004), language trained (" in whole.printed
    for steps in (1, 3):
        assert train_here(config, f"run.dir={tmp_path}/cut", f"training.steps={steps}").code == 0
    lines = read_lines(tmp_path / "cut" / "metrics.jsonl")
    assert [line["lr/merger"] for line in lines] == pytest.approx([2e-3, 4e-3, 4e-3])
    assert [line["lr/language"] for line in lines] == [line["lr"] for line in lines]
    for line in lines:
        norms = [line[f"grad_norm/{part}"] for part in ("merger", "language")]
        assert sum(norm**2 for norm in norms) ** 0.5 == pytest.approx(line["grad_norm"], rel=1e-5)
    last = tmp_path / "whole/checkpoints/step-000003"
    files = [str(path.relative_to(last)) for path in last.rglob("*.safetensors")]
    assert len(files) > 1, "weights and optimizer states"
    for file in files:
        ours, theirs = (load_file(tmp_path / run / "checkpoints/step-000003" / file) for run in ("cut", "whole"))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    before, after = (
        dict(load_policy(folder, dtype="fp32", device="cpu").model.named_parameters())
        for folder in (BASE, tmp_path / "whole/checkpoints/step-000003")
    )
    moved = {FAMILIES["qwen2_5_vl"].part_of(name) for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"merger", "language"}


@pytest.mark.matrix
@pytest.mark.parametrize("train", ["[merger]", "[tower]", "[tower, language]"])
def test_verify_compares_what_trains(config: Path, train: str, capsys: pytest.CaptureFixture[str]) -> None:
    short = ("--response-tokens", "8", "media.workers=0", "rollout.num_generations=2")
    assert main(["verify", str(config), f"model.train={train}", "training.learning_rates={}", *short]) == 0
    printed = capsys.readouterr().out
    assert "verify: passed, sharing is exact here" in printed and "worst of " in printed
