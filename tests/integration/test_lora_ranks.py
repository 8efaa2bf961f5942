"""LoRA on two ranks, with the adapter-free policy as reference in reward and loss: the adapter of one process.

Ranks have unlike many questions. Under ZeRO-3 the base weights are scattered; ``rollout.gather=layers`` leaves them so
while the reference scores, where ranks take turns.
"""

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

pytestmark = pytest.mark.matrix

pytest.importorskip("peft")

BASE = ROOT / "assets/tiny-qwen2_5-vl"
# B begins at zero and is nothing but gradients, of which some are hardly more than their rounding.
STEPS, TOLERANCE = 3, {"lora_A": 1e-5, "lora_B": 1e-4}
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
# Beside these, test_qlora_run.py has ZeRO-2 and ZeRO-3 with the reference in the loss.
SAMPLE = [("zero3-layers", "reward")]
ALL = [(engine, reference) for engine in ENGINES for reference in REFERENCES]


@pytest.mark.parametrize(
    "cases", [pytest.param(ALL, marks=pytest.mark.matrix, id="all"), pytest.param(SAMPLE, id="some")]
)
def test_two_ranks_train_the_adapter_of_one_process(cases: list[tuple[str, str]], tmp_path: Path) -> None:
    config = write_lora_run(tmp_path)
    files = {name: _write_deepspeed(tmp_path / name, stage) for name, stage in (("zero2", 2), ("zero3", 3))}
    runs = [
        REFERENCES[reference] + [value.format_map(files) for value in ENGINES[engine]] for engine, reference in cases
    ]
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    launch_ranks(
        *("tests.integration.zero_pairs", str(tmp_path), str(tmp_path / "runs.json")),
        timeout_seconds=120 + 30 * len(runs),
    )
    expected = {name: _one_process(tmp_path, config, name) for name in {name for _, name in cases}}
    for place, (engine, reference) in enumerate(cases):
        alone, run = expected[reference], tmp_path / f"run-{place}"
        apart = distance(_adapter(run), _adapter(alone))
        print(engine, reference, f"largest relative difference of a weight {max(apart.values()):.1e}")
        far = {name: value for name, value in apart.items() if not value <= TOLERANCE[name.split(".")[-2]]}
        assert not far, (engine, reference)
        kls = [[line["kl"] for line in read_lines(folder / "metrics.jsonl")] for folder in (run, alone)]
        assert kls[0] == pytest.approx(kls[1], rel=1e-4, abs=1e-7) and kls[0][-1] > 0
        assert not list((run / f"checkpoints/step-{STEPS:06d}").glob("model*.safetensors"))
    _same_in_plain_peft(tmp_path / "run-0" / f"checkpoints/step-{STEPS:06d}")


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
        # A pass of the reference takes one group, so that ranks ask it unequally often.
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


def _write_deepspeed(folder: Path, stage: int) -> str:
    folder.mkdir()
    return str(deepspeed_config(folder, stage))


def _one_process(folder: Path, config: Path, reference: str) -> Path:
    run = folder / f"alone-{reference}"
    done = run_cli("train", str(config), f"run.dir={run}", *REFERENCES[reference])
    assert done.returncode == 0, done.stdout + done.stderr
    return run


def _adapter(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / f"checkpoints/step-{STEPS:06d}" / "adapter_model.safetensors")


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
    from vlm_pg.models.loading import load_policy

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
