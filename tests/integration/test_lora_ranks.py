"""LoRA and QLoRA on two ranks, with the adapter-free policy as reference in reward and loss: one process's adapter.

Ranks have unlike many questions. Under ZeRO-3 the base weights are scattered; ``rollout.gather=layers`` leaves them so
while the reference scores, where ranks run in lockstep.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.test_deepspeed import deepspeed_config
from tests.integration.test_lora_run import BASE, QUANTIZED, STEPS, write_lora_run
from tests.support.layouts import distance
from tests.support.processes import launch_ranks
from tests.support.runs import read_lines, run_cli
from vlm_pg.models.loading import load_policy

pytestmark = pytest.mark.matrix

pytest.importorskip("peft")

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
        apart = distance(_adapter(run), _adapter(alone))
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
