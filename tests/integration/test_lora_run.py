"""Runs with a LoRA adapter beside whole weights, or weights in 4 bits: it trains, is all that is saved, and resumes bit
for bit; it is exported and evaluated as it was trained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data_pipelines.embedded import main as prepare_embedded
from tests.integration.test_deepspeed import deepspeed_config
from tests.support.layouts import distance
from tests.support.processes import launch_ranks
from tests.support.runs import ROOT, read_lines, run_cli, write_config
from tests.support.short_run import short_run, train_here
from vlm_pg.cli import main
from vlm_pg.models.loading import load_policy
from vlm_pg.models.lora import merge_adapter
from vlm_pg.models.settings import LoraSettings, ModelSettings

peft = pytest.importorskip("peft")

STEPS = 3
BASE = ROOT / "assets/tiny-qwen2_5-vl"
QUANTIZED = "model.lora.quantize=nf4"
WITH_KL = "algorithm.kl_coef=0.1"
EACH_STEP = ("training.checkpoint_every=1", "training.keep_checkpoints=9")
PRINTED = {"lora": "language trained (LoRA adapter of rank 4", "nf4": " of 178,752 weights in nf4, peak"}


def write_lora_run(folder: Path) -> Path:
    prepare_embedded(["--out", str(folder / "clips"), "--train", "24", "--eval", "8"])
    sections = {
        "model": {"path": str(BASE), "lora": {"rank": 4, "alpha": 8}},
        "data": {"train": str(folder / "clips" / "train.jsonl")},
        "media": {"workers": 0},
        "prompt": {
            "max_prompt_tokens": 100,
            "instructions": {"multiple_choice": "Name the colours in order, then answer with a letter."},
        },
        # A pass of the reference takes one group, so that ranks call it unequally often.
        "rollout": {"num_generations": 4, "max_new_tokens": 20, "prefill_tokens": 130},
        "training": {
            "steps": STEPS,
            "prompts_per_step": 3,
            "micro_batch_tokens": 130,
            "learning_rate": 1e-3,
            "adam_epsilon": 1e-4,
            "checked_updates": 9,
        },
        "observe": {"trackers": [], "report": False},
    }
    return write_config(folder / "run.yaml", sections)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lora_run(tmp_path_factory.mktemp("lora"))


def run_of(kind: str, config: Path) -> Path:
    """The whole run, made once."""
    run = config.parent / kind
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
    if not run.exists():
        done = train_here(config, f"run.dir={run}", *overrides(kind), *EACH_STEP)
        assert done.code == 0 and PRINTED[kind] in done.printed, done.printed
    return run


def overrides(kind: str) -> list[str]:
    return [WITH_KL, *([QUANTIZED] if kind == "nf4" else [])]


@pytest.fixture(params=PRINTED)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def whole(kind: str, config: Path) -> Path:
    return run_of(kind, config)


@pytest.fixture
def whole_nf4(config: Path) -> Path:
    return run_of("nf4", config)


def checkpoint(run: Path, step: int = STEPS) -> Path:
    return run / f"checkpoints/step-{step:06d}"


def adapter(run: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    return load_file(checkpoint(run, step) / "adapter_model.safetensors")


def test_the_adapter_trains_and_is_all_that_is_saved(whole: Path) -> None:
    lines = read_lines(whole / "metrics.jsonl")
    assert all(line["grad_norm"] > 0 for line in lines)
    # At first B is zero and the policy is its reference; then it moves away.
    assert lines[0]["kl"] < 1e-9 < lines[-1]["kl"]
    first, last = adapter(whole, 1), adapter(whole)
    assert all(".lora_" in name and (first[name] != last[name]).any() for name in first)
    assert not (checkpoint(whole) / "model.safetensors").exists() and not (checkpoint(whole) / "config.json").exists()
    states = load_file(checkpoint(whole) / "optimizer/rank-00000-00000.safetensors")
    trained = {name.rsplit("/", 2)[0] for name in states}
    assert len(trained) == len(last) and all(".lora_" in name for name in trained)


def test_resumed_equals_uninterrupted(kind: str, whole: Path, config: Path, tmp_path: Path) -> None:
    resume = f"run.resume={checkpoint(whole, 1)}"
    assert train_here(config, f"run.dir={tmp_path}/run", *overrides(kind), resume).code == 0
    files = [str(path.relative_to(checkpoint(whole))) for path in checkpoint(whole).rglob("*.safetensors")]
    assert len(files) > 1, "the adapter and optimizer states"
    for file in files:
        ours, theirs = (load_file(checkpoint(run) / file) for run in (tmp_path / "run", whole))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    ours, theirs = (read_lines(run / "metrics.jsonl") for run in (tmp_path / "run", whole))
    for key in ("reward", "loss", "kl", "grad_norm"):
        assert [line[key] for line in ours] == [line[key] for line in theirs[1:]]
    other = train_here(config, f"run.dir={tmp_path}/other", WITH_KL, resume, "model.lora.rank=8")
    assert other.code != 0 and "cannot be continued with model.lora=" in other.printed


@pytest.mark.matrix
def test_a_rate_of_full_fine_tuning_is_warned_about(tmp_path: Path) -> None:
    config = short_run(tmp_path, model={"lora": {}}, training={"steps": 1, "learning_rate": 1e-6})
    ended = train_here(config)
    assert ended.code == 0 and "its peak learning rate is 1e-06, a rate of full fine-tuning" in ended.printed


@pytest.mark.matrix
def test_an_adapter_without_settings_would_not_train(config: Path, tmp_path: Path) -> None:
    path = f"model.path={checkpoint(run_of('lora', config), 1)}"
    done = train_here(config, f"run.dir={tmp_path}/other", path, "model.lora=null")
    assert done.code != 0 and "nothing would train" in done.printed


@pytest.mark.matrix
def test_export_merges_into_the_weights_as_they_were_read(
    whole_nf4: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(checkpoint(whole_nf4)), str(tmp_path / "out")]) == 0
    assert "as it was read (the adapter trained beside its weights in nf4)" in capsys.readouterr().out
    exported = load_policy(tmp_path / "out", device="cpu").model.state_dict()
    expected = load_policy(checkpoint(whole_nf4), "fp32", "cpu").model  # the adapter on whole weights
    merge_adapter(expected)
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(exported[name].float(), weight, rtol=1e-2, atol=1e-3)
    base = load_policy(BASE, device="cpu").model.state_dict()
    # What 4 bits are away is some 9 % of a weight; what was merged is far less.
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    assert 0 < (exported[name] - base[name]).float().norm() < 0.03 * base[name].float().norm()


@pytest.mark.matrix
def test_a_checkpoint_is_evaluated_as_it_was_trained(whole_nf4: Path, config: Path) -> None:
    settings = ModelSettings(path=str(BASE), lora=LoraSettings(rank=4, alpha=8, quantize="nf4"))
    policy = load_policy(checkpoint(whole_nf4), device="cpu", settings=settings)
    saved = adapter(whole_nf4)
    for name, weight in policy.model.named_parameters():
        if ".lora_" in name:
            assert torch.equal(weight, saved[f"base_model.model.{name.replace('.default', '')}"])
    records = str(config.parent / "clips/eval_seen.jsonl")
    short = ("eval.controls=[]", "eval.limit=2", "eval.num_generations=1", "media.workers=0")
    assert main(["eval", str(checkpoint(whole_nf4)), f"data.eval.seen={records}", *short]) == 0


# B begins at zero and is nothing but gradients, of which some are hardly more than their rounding.
TOLERANCE = {"lora_A": 1e-5, "lora_B": 1e-4}
REFERENCES = {
    "reward": ["algorithm.kl_coef=0.1", "algorithm.kl_in=reward"],
    "token_reward": ["algorithm.kl_coef=0.1", "algorithm.kl_in=token_reward"],
    "loss": ["algorithm.kl_coef=0.1"],
}
ENGINES = {
    "torch": [],
    "zero2": ["training.engine=deepspeed", "training.deepspeed_config={zero2}"],
    "zero3-all": ["training.engine=deepspeed", "training.deepspeed_config={zero3}", "rollout.gather=all"],
    "zero3-layers": ["training.engine=deepspeed", "training.deepspeed_config={zero3}", "rollout.gather=layers"],
}
ALL = [(engine, reference) for engine in ENGINES for reference in REFERENCES]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "cases, lora", [(ALL, []), ([(engine, "loss") for engine in ENGINES], [QUANTIZED])], ids=["lora", "nf4"]
)
def test_two_ranks_train_the_adapter_of_one_process(
    cases: list[tuple[str, str]], lora: list[str], tmp_path: Path
) -> None:
    if lora:
        pytest.importorskip("bitsandbytes")
    config = write_lora_run(tmp_path)
    files = {name: _write_deepspeed(tmp_path / name, stage) for name, stage in (("zero2", 2), ("zero3", 3))}
    runs = [
        lora + REFERENCES[reference] + [value.format_map(files) for value in ENGINES[engine]]
        for engine, reference in cases
    ]
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    launch_ranks(
        *("tests.integration.zero_pairs", str(tmp_path), str(tmp_path / "runs.json")),
        timeout_seconds=120 + 30 * len(runs),
    )
    expected = {name: _one_process(tmp_path, config, name, lora) for name in {name for _, name in cases}}
    for index, (engine, reference) in enumerate(cases):
        alone, run = expected[reference], tmp_path / f"run-{index}"
        apart = distance(adapter(run), adapter(alone))
        print(engine, reference, f"largest relative difference of a weight {max(apart.values()):.1e}")
        far = {name: value for name, value in apart.items() if not value <= TOLERANCE[name.split(".")[-2]]}
        assert not far, (engine, reference)
        kls = [[line["kl"] for line in read_lines(folder / "metrics.jsonl")] for folder in (run, alone)]
        assert kls[0] == pytest.approx(kls[1], rel=1e-4, abs=1e-7) and kls[0][-1] > 0
        assert not list((run / f"checkpoints/step-{STEPS:06d}").glob("model*.safetensors"))
    if not lora:
        _same_in_plain_peft(tmp_path / "run-0" / f"checkpoints/step-{STEPS:06d}")


def _write_deepspeed(folder: Path, stage: int) -> str:
    folder.mkdir()
    return str(deepspeed_config(folder, stage))


def _one_process(folder: Path, config: Path, reference: str, lora: list[str]) -> Path:
    run = folder / f"alone-{reference}"
    done = run_cli("train", str(config), f"run.dir={run}", *REFERENCES[reference], *lora)
    assert done.returncode == 0, done.stdout + done.stderr
    return run


PLAIN = """
import sys, torch, peft, transformers
from safetensors.torch import save_file
base, adapter, out = sys.argv[1:]
model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(base)
model = peft.PeftModel.from_pretrained(model, adapter)
with torch.no_grad():
    save_file({"logits": model(input_ids=torch.arange(5, 25)[None]).logits}, out)
"""


def _same_in_plain_peft(checkpoint: Path) -> None:
    """The same logits in a process that knows nothing of this package, and in ours."""
    out = checkpoint.parent / "logits.safetensors"
    subprocess.run([sys.executable, "-c", PLAIN, str(BASE), str(checkpoint), str(out)], check=True, timeout=300)
    policy = load_policy(checkpoint, device="cpu")
    policy.model.set_attn_implementation("sdpa")
    with torch.no_grad():
        ours = policy.model(input_ids=torch.arange(5, 25)[None]).logits
        bare = load_policy(BASE, device="cpu").model
        bare.set_attn_implementation("sdpa")
        without = bare(input_ids=torch.arange(5, 25)[None]).logits
    theirs = load_file(out)["logits"]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert (ours - without).abs().max() > 1e-3, "an adapter that does nothing would be the same anywhere"
