"""``vlm-pg export``: what plain transformers computes with the exported folder is what the checkpoint computes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from tests.support.runs import run_cli, save_tiny_model
from tests.support.tiny import tiny_model, tiny_processor
from vlm_pg.cli import main
from vlm_pg.models.loading import load_policy
from vlm_pg.models.lora import merge_adapter
from vlm_pg.models.settings import LoraSettings, ModelSettings
from vlm_pg.training import checkpoints

PLAIN = """
import sys, torch, transformers
from safetensors.torch import save_file
assert not any(name.startswith("vlm_pg") for name in sys.modules)
folder, out = sys.argv[1:]
transformers.AutoProcessor.from_pretrained(folder)
model = transformers.AutoModelForImageTextToText.from_pretrained(folder)
with torch.no_grad():
    save_file({"logits": model(input_ids=torch.arange(5, 25)[None]).logits.float()}, out)
"""


def plain_logits(folder: Path) -> torch.Tensor:
    """Of a fresh process without this package."""
    out = folder.with_suffix(".safetensors")
    subprocess.run([sys.executable, "-c", PLAIN, str(folder), str(out)], check=True, timeout=300, cwd=folder.parent)
    return load_file(out)["logits"]


def logits(model: torch.nn.Module) -> torch.Tensor:
    model.set_attn_implementation("sdpa")  # type: ignore[operator]  # of transformers
    with torch.no_grad():
        return model(input_ids=torch.arange(5, 25)[None]).logits.float()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    """A trained one, as a checkpoint holds it."""
    pytest.importorskip("peft")
    policy = load_policy(base, device="cpu", settings=ModelSettings(path=str(base), lora=LoraSettings(rank=4, alpha=8)))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if ".lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    folder = base.parent / "adapter"
    policy.model.save_pretrained(folder)
    tiny_processor().save_pretrained(folder)
    return folder


def test_a_merged_adapter_is_the_adapter(base: Path, adapter: Path, tmp_path: Path) -> None:
    done = run_cli("export", str(adapter), str(tmp_path / "merged"))
    assert done.returncode == 0 and "merged into it" in done.stdout, done.stdout + done.stderr
    files = {path.name for path in (tmp_path / "merged").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer_config.json"} <= files
    assert not any("adapter" in name or "optimizer" in name for name in files)
    expected = logits(load_policy(adapter, device="cpu").model)
    without = logits(load_policy(base, device="cpu").model)
    torch.testing.assert_close(plain_logits(tmp_path / "merged"), expected, rtol=1e-5, atol=2e-5)
    assert (expected - without).abs().max() > 0.1


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_with_a_head_of_its_own_is_exported_as_peft_computes_it(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder = tmp_path / "base"
    tiny_model().save_pretrained(folder)
    tiny_processor().save_pretrained(folder)
    model = peft.get_peft_model(
        AutoModelForImageTextToText.from_pretrained(folder),
        peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], modules_to_save=["lm_head"]),
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.save_pretrained(tmp_path / "adapter")
    assert main(["export", str(tmp_path / "adapter"), str(tmp_path / "out")]) == 0
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(merged), logits(model.get_base_model()), rtol=1e-5, atol=5e-5)


@pytest.mark.matrix
@pytest.mark.parametrize("where", ["merging", "writing"])
def test_an_export_that_computes_something_else_is_refused(
    where: str, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    probes: list[torch.Tensor] = []

    def wrong_when_loaded_again(policy: Any) -> tuple[torch.Tensor, ...]:
        probes.append(torch.full((3,), 2.0 if len(probes) == 3 else 1.0))
        return (probes[-1],)

    def wrongly_merged(model: Any) -> None:
        merge_adapter(model)
        model.get_input_embeddings().weight.data.mul_(1.1)

    if where == "merging":
        monkeypatch.setattr("vlm_pg.training.export.merge_adapter", wrongly_merged)
    else:
        monkeypatch.setattr("vlm_pg.training.export._probe", wrong_when_loaded_again)
    assert main(["export", str(adapter), str(tmp_path / "out")]) == 2
    assert "cannot be exported: merged into its model, log-probabilities of a probe are off" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".tmp*"))


@pytest.mark.matrix
def test_a_checkpoint_of_all_weights_keeps_them_bit_for_bit(base: Path, tmp_path: Path) -> None:
    assert main(["export", str(base), str(tmp_path / "plain")]) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "plain"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert main(["export", str(base), str(tmp_path / "half"), "--dtype", "bf16"]) == 0
    half = load_file(tmp_path / "half" / "model.safetensors")
    assert all(torch.equal(tensor.bfloat16(), half[name]) for name, tensor in before.items())
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


def test_what_cannot_be_exported_is_refused(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: Path) -> str:
        assert main(["export", *map(str, arguments)]) == 2
        return capsys.readouterr().err

    taken = tmp_path / "taken"
    taken.mkdir()
    assert "taken exists already, and nothing is overwritten" in refused(base, taken)
    assert "is not a folder. Give a checkpoint" in refused(tmp_path / "nowhere", tmp_path / "out")
    assert "so it is no model. Give a checkpoint's folder" in refused(taken, tmp_path / "out")
    (taken / checkpoints.MANIFEST).write_text("{")
    (taken / "config.json").write_text("{}")
    assert "not a usable checkpoint: its manifest.json is damaged" in refused(taken, tmp_path / "out")
    lost = tmp_path / "adapter"
    lost.mkdir()
    (lost / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "gone")}))
    assert "gone', which is not a folder" in refused(lost, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".tmp*"))
