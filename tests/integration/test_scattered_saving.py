"""Under ZeRO-3 weights are saved as ``save_pretrained`` saves them, and no rank holds more of them than one file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.test_scattered_loading import LARGE, MIB
from tests.support.processes import launch_ranks
from tests.support.runs import save_tiny_model
from tests.support.tiny import tiny_model, tiny_processor
from vlm_pg.models.loading import load_policy
from vlm_pg.models.lora import add_lora
from vlm_pg.models.settings import LoraSettings

pytestmark = pytest.mark.matrix

# Several files for each of the tiny models, and tensors that are larger than a file should be.
SHARD_BYTES = 60_000
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen2", "qwen3_moe")


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
    of_text = [name for name in names[1] if name.endswith(".json")]
    assert names[0] == names[1] or "experts.0" in str(expected), names
    for name in of_text:
        if name != "model.safetensors.index.json":
            found_text, expected_text = (json.loads((folder / name).read_text()) for folder in (ours, theirs))
            for text in (found_text, expected_text):
                text["target_modules"] = sorted(text.get("target_modules", ()))  # peft writes a set
            assert found_text == expected_text, name
    if (theirs / "model.safetensors.index.json").exists():
        index = json.loads((ours / "model.safetensors.index.json").read_text())
        assert index["metadata"] == json.loads((theirs / "model.safetensors.index.json").read_text())["metadata"]
        for tensor, file in index["weight_map"].items():
            assert tensor in load_file(ours / file)
        assert index["weight_map"].keys() == expected.keys()


@pytest.mark.parametrize(
    "families", [FAMILIES[:1], pytest.param(FAMILIES, marks=pytest.mark.matrix)], ids=["one", "all families"]
)
def test_the_files_are_those_of_save_pretrained(families: tuple[str, ...], tmp_path: Path) -> None:
    models = [save_tiny_model(tmp_path / family, family) for family in families]
    adapted = save_tiny_model(tmp_path / "adapted")
    (adapted / "lora").touch()
    names = [*map(str, models), str(adapted)]
    launch_ranks("tests.integration.scattered_saving", str(tmp_path), str(SHARD_BYTES), *names, timeout_seconds=300)
    for place, model in enumerate(models):
        # What the model was read from decides its names: neither a round trip nor ZeRO-3 changes them.
        expected = tmp_path / f"expected-{place}"
        load_policy(model, "fp32", "cpu").model.save_pretrained(expected, max_shard_size=SHARD_BYTES)
        assert len(list((tmp_path / f"saved-{place}").glob("model-*.safetensors"))) > 3
        assert_saved_alike(tmp_path / f"saved-{place}", expected)
        load_policy_equal(tmp_path / f"saved-{place}", model)
    policy = load_policy(adapted, "fp32", "cpu")
    add_lora(policy.model, LoraSettings(rank=4, alpha=8))
    policy.model.save_pretrained(tmp_path / "expected-adapter")
    saved = tmp_path / f"saved-{len(models)}"
    assert (saved / "adapter_model.safetensors").exists() and not (saved / "config.json").exists()
    assert tensors_of(saved).keys() == tensors_of(tmp_path / "expected-adapter").keys()
    assert_saved_alike(saved, tmp_path / "expected-adapter")


def load_policy_equal(saved: Path, model: Path) -> None:
    """What was saved loads as what it was saved from."""
    for file in ("tokenizer.json", "tokenizer_config.json", "processor_config.json", "chat_template.jinja"):
        if (model / file).exists():
            (saved / file).write_bytes((model / file).read_bytes())
    ours, theirs = (dict(load_policy(path, "fp32", "cpu").model.named_parameters()) for path in (saved, model))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    "layers, ranks",
    [
        pytest.param(2, 2, id="small"),
        pytest.param(8, 2, id="2 ranks", marks=pytest.mark.matrix),
        pytest.param(8, 4, id="4 ranks", marks=pytest.mark.matrix),
    ],
)
def test_no_rank_holds_more_than_a_file_beside_its_share(layers: int, ranks: int, tmp_path: Path) -> None:
    model = tiny_model(
        num_hidden_layers=layers,
        **LARGE,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
    )
    largest = max(p.numel() for p in model.parameters()) * 4
    model.save_pretrained(tmp_path / "model")
    tiny_processor().save_pretrained(tmp_path / "model")
    shard = 2 * largest
    # The first one is for all that is imported when a model is saved for the first time.
    models = [str(save_tiny_model(tmp_path / "tiny")), str(tmp_path / "model")]
    launch_ranks(
        *("tests.integration.scattered_saving", str(tmp_path), str(shard), *models), ranks=ranks, timeout_seconds=300
    )
    files = list((tmp_path / "saved-1").glob("model-*.safetensors"))
    assert len(files) > 2 * layers / 3
    for rank in range(ranks):
        said = json.loads((tmp_path / f"1.{rank}.json").read_text())
        whole = said["parameters"] * 4
        print(
            f"rank {rank} of {ranks}: model {whole / MIB:.0f} MiB in {len(files)} files of up to {shard / MIB:.0f}; "
            f"largest weight {largest / MIB:.0f}; peak while saved {said['saving'] / MIB:.0f}"
        )
        # What is gathered, what is padded on the way, and on rank 0 its copy.
        assert said["saving"] < (shard + 3 * largest if rank == 0 else 3 * largest), said
        if layers > 2:
            assert shard + 3 * largest < whole / 4, "the whole model should be far too large"
