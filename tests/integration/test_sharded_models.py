"""Under ZeRO-3 a model is sharded while it is read, and saved as ``save_pretrained`` saves it; no rank holds it
whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.processes import launch_ranks
from tests.support.runs import save_tiny_model
from tests.support.tiny import tiny_model, tiny_processor
from vlm_pg.models.loading import load_policy
from vlm_pg.models.lora import add_lora
from vlm_pg.models.settings import LoraSettings

pytestmark = pytest.mark.matrix

MIB = 2**20
# Several files for each of the tiny models, and tensors that are larger than a file should be.
SHARD_BYTES = 60_000
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen2", "qwen3_moe")
INDEX = "model.safetensors.index.json"


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        of_file = load_file(file)
        assert not of_file.keys() & found.keys()
        found |= of_file
    return found


def assert_saved_alike(ours: Path, theirs: Path) -> None:
    found, expected = tensors_of(ours), tensors_of(theirs)
    assert found.keys() == expected.keys() and found
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]
    names = [sorted(path.name for path in folder.iterdir()) for folder in (ours, theirs)]
    assert names[0] == names[1] or "experts.0" in str(expected), names
    for name in names[1]:
        if name.endswith(".json") and name != INDEX:
            texts = [json.loads((folder / name).read_text()) for folder in (ours, theirs)]
            for text in texts:
                text["target_modules"] = sorted(text.get("target_modules", ()))  # peft writes a set
            assert texts[0] == texts[1], name
    if (theirs / INDEX).exists():
        index = json.loads((ours / INDEX).read_text())
        assert index["metadata"] == json.loads((theirs / INDEX).read_text())["metadata"]
        assert all(tensor in load_file(ours / file) for tensor, file in index["weight_map"].items())
        assert index["weight_map"].keys() == expected.keys()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_is_read_and_saved_is_what_one_process_reads_and_saves(dtype: str, tmp_path: Path) -> None:
    models = [save_tiny_model(tmp_path / family, family) for family in FAMILIES]
    adapted = save_tiny_model(tmp_path / "adapted")
    (adapted / "lora").touch()
    (tmp_path / "compare").touch()
    arguments = (str(tmp_path), dtype, str(SHARD_BYTES), *map(str, models), str(adapted))
    launch_ranks("tests.integration.sharded_models", *arguments, timeout_seconds=400)
    for number, model in enumerate(models):
        plain = load_policy(model, dtype, "cpu").model
        weights, buffers = dict(plain.named_parameters()), dict(plain.named_buffers())
        read = load_file(tmp_path / f"{number}.safetensors")
        assert read.keys() == weights.keys() | buffers.keys(), model
        assert not [name for name, tensor in (weights | buffers).items() if not torch.equal(read[name], tensor)], model
        # The files the model was read from decide its names: neither a round trip nor ZeRO-3 changes them.
        expected, saved = tmp_path / f"expected-{number}", tmp_path / f"saved-{number}"
        plain.save_pretrained(expected, max_shard_size=SHARD_BYTES)
        assert dtype == "bf16" or len(list(saved.glob("model-*.safetensors"))) > 3
        assert_saved_alike(saved, expected)
        for file in ("tokenizer.json", "tokenizer_config.json", "processor_config.json", "chat_template.jinja"):
            if (model / file).exists():
                (saved / file).write_bytes((model / file).read_bytes())
        again = dict(load_policy(saved, dtype, "cpu").model.named_parameters())
        assert again.keys() == weights.keys() and all(torch.equal(again[name], weights[name]) for name in weights)
    if dtype == "fp32":
        policy = load_policy(adapted, dtype, "cpu")
        add_lora(policy.model, LoraSettings(rank=4, alpha=8))
        policy.model.save_pretrained(tmp_path / "expected-adapter")
        saved = tmp_path / f"saved-{len(models)}"
        assert (saved / "adapter_model.safetensors").exists() and not (saved / "config.json").exists()
        assert_saved_alike(saved, tmp_path / "expected-adapter")


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_rank_holds_the_whole_model(ranks: int, tmp_path: Path) -> None:
    """Its shard and a few weights at a time; while it saves, one file more on rank 0."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
    model = tiny_model(num_hidden_layers=8, **sizes, rope_parameters=rope)
    largest = max(p.numel() for p in model.parameters()) * 4
    shard = 2 * largest
    model.save_pretrained(tmp_path / "model")
    tiny_processor().save_pretrained(tmp_path / "model")
    # The first one is for all that is imported and cached when a model is read and saved for the first time.
    models = [str(save_tiny_model(tmp_path / "tiny")), str(tmp_path / "model")]
    arguments = (str(tmp_path), "fp32", str(shard), *models)
    launch_ranks("tests.integration.sharded_models", *arguments, ranks=ranks, timeout_seconds=300)
    assert len(list((tmp_path / "saved-1").glob("model-*.safetensors"))) > 5
    for rank in range(ranks):
        facts = json.loads((tmp_path / f"1.{rank}.json").read_text())
        whole = facts["parameters"] * 4
        print(f"rank {rank} of {ranks}: model {whole / MIB:.0f} MiB, largest weight {largest / MIB:.0f}, {facts}")
        assert facts["held"] < 1.01 * whole / ranks
        assert facts["reading"] < whole / ranks + 4 * largest, facts
        # Gathered weights, padding, and on rank 0 its copy.
        assert facts["saving"] < (shard + 3 * largest if rank == 0 else 3 * largest), facts
        assert shard + 3 * largest < whole / 4, "the whole model should be far too large"
