"""Runs with an adapter beside weights in 4 bits: resumed, exported, evaluated, and on several ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.test_deepspeed import deepspeed_config
from tests.integration.test_lora_ranks import ENGINES, STEPS, TOLERANCE, write_lora_run
from tests.support.layouts import distance
from tests.support.processes import launch_ranks
from tests.support.runs import ROOT, read_lines
from tests.support.short_run import train_here
from vlm_pg.cli import main
from vlm_pg.models.loading import load_policy
from vlm_pg.models.lora import merge_adapter
from vlm_pg.models.settings import LoraSettings, ModelSettings

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

BASE = ROOT / "assets/tiny-qwen2_5-vl"
QUANTIZED = "model.lora.quantize=nf4"
WITH_KL = "algorithm.kl_coef=0.1"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lora_run(tmp_path_factory.mktemp("qlora"))


@pytest.fixture(scope="module")
def whole(config: Path) -> tuple[Path, str]:
    done = train_here(
        config,
        f"run.dir={config.parent}/whole",
        QUANTIZED,
        WITH_KL,
        "training.checkpoint_every=1",
        "training.keep_checkpoints=9",
    )
    assert done.code == 0, done.printed
    return config.parent / "whole", done.printed


def checkpoint(run: Path, step: int = STEPS) -> Path:
    return run / f"checkpoints/step-{step:06d}"


def adapter(run: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint(run) / "adapter_model.safetensors")


@pytest.mark.matrix
def test_a_run_says_what_is_in_4_bits_and_saves_the_adapter_alone(whole: tuple[Path, str]) -> None:
    run, printed = whole
    assert "language trained (LoRA adapter of rank 4, " in printed and " of 178,752 weights in nf4, peak" in printed
    lines = read_lines(run / "metrics.jsonl")
    assert all(line["grad_norm"] > 0 for line in lines) and lines[0]["kl"] == 0 < lines[-1]["kl"]
    assert not (checkpoint(run) / "model.safetensors").exists()
    assert all(".lora_" in name for name in adapter(run))


def test_resumed_equals_uninterrupted(config: Path, whole: tuple[Path, str], tmp_path: Path) -> None:
    resume = f"run.resume={checkpoint(whole[0], 1)}"
    assert train_here(config, f"run.dir={tmp_path}/run", QUANTIZED, WITH_KL, resume).code == 0
    files = [str(path.relative_to(checkpoint(whole[0]))) for path in checkpoint(whole[0]).rglob("*.safetensors")]
    assert len(files) > 1, "the adapter and optimizer states"
    for file in files:
        ours, theirs = (load_file(checkpoint(run) / file) for run in (tmp_path / "run", whole[0]))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    other = train_here(config, f"run.dir={tmp_path}/other", WITH_KL, resume)
    assert other.code != 0 and "cannot be continued with model.lora=" in other.printed


@pytest.mark.matrix
def test_export_merges_into_the_weights_as_they_were_read(
    whole: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(checkpoint(whole[0])), str(tmp_path / "out")]) == 0
    assert "as it was read (the adapter trained beside its weights in nf4)" in capsys.readouterr().out
    exported = load_policy(tmp_path / "out", device="cpu").model.state_dict()
    expected = load_policy(checkpoint(whole[0]), "fp32", "cpu").model  # the adapter on whole weights
    merge_adapter(expected)
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(exported[name].float(), weight, rtol=1e-2, atol=1e-3)
    base = load_policy(BASE, device="cpu").model.state_dict()
    # What 4 bits are away is some 9 % of a weight; what was merged is far less.
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    assert 0 < (exported[name] - base[name]).float().norm() < 0.03 * base[name].float().norm()


@pytest.mark.matrix
def test_a_checkpoint_is_evaluated_as_it_was_trained(whole: tuple[Path, str], config: Path) -> None:
    settings = ModelSettings(path=str(BASE), lora=LoraSettings(rank=4, alpha=8, quantize="nf4"))
    policy = load_policy(checkpoint(whole[0]), device="cpu", settings=settings)
    saved = adapter(whole[0])
    for name, weight in policy.model.named_parameters():
        if ".lora_" in name:
            assert torch.equal(weight, saved[f"base_model.model.{name.replace('.default', '')}"])
    records = str(config.parent / "clips/eval_seen.jsonl")
    short = ("eval.controls=[]", "eval.limit=2", "eval.num_generations=1", "media.workers=0")
    assert main(["eval", str(checkpoint(whole[0])), f"data.eval.seen={records}", *short]) == 0


@pytest.mark.matrix
@pytest.mark.parametrize(
    "engines",
    [
        pytest.param(("zero2", "zero3-layers"), id="some"),
        pytest.param(tuple(ENGINES), marks=pytest.mark.matrix, id="all"),
    ],
)
def test_two_ranks_train_the_adapter_of_one_process(
    engines: tuple[str, ...], config: Path, whole: tuple[Path, str], tmp_path: Path
) -> None:
    files = {}
    for name, stage in (("zero2", 2), ("zero3", 3)):
        (tmp_path / name).mkdir()
        files[name] = str(deepspeed_config(tmp_path / name, stage))
    runs = [[QUANTIZED, WITH_KL, *(value.format_map(files) for value in ENGINES[engine])] for engine in engines]
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    (tmp_path / "run.yaml").write_text(config.read_text())
    command = ("tests.integration.zero_pairs", str(tmp_path), str(tmp_path / "runs.json"))
    launch_ranks(*command, timeout_seconds=120 + 60 * len(runs))
    for place, engine in enumerate(engines):
        apart = distance(adapter(tmp_path / f"run-{place}"), adapter(whole[0]))
        print(engine, f"largest relative difference of a weight {max(apart.values()):.1e}")
        assert not {n: far for n, far in apart.items() if not far <= TOLERANCE[n.split(".")[-2]]}, engine
        kls = [
            [line["kl"] for line in read_lines(run / "metrics.jsonl")] for run in (tmp_path / f"run-{place}", whole[0])
        ]
        assert kls[0] == pytest.approx(kls[1], rel=1e-4, abs=1e-7)
