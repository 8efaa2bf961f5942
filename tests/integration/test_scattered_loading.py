"""Under ZeRO-3 a model is divided over ranks while it is read: the weights of the file, and no rank holds them all."""

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

pytestmark = pytest.mark.matrix

MIB = 2**20
LARGE = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4}


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.matrix)])
def test_what_is_read_is_what_one_process_reads(dtype: str, tmp_path: Path) -> None:
    families = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen2", "qwen3_moe")
    models = [str(save_tiny_model(tmp_path / family, family)) for family in families]
    (tmp_path / "compare").touch()
    launch_ranks("tests.integration.scattered_loading", str(tmp_path), dtype, *models, timeout_seconds=300)
    for place, model in enumerate(models):
        plain = load_policy(model, dtype, "cpu").model
        expected = dict(plain.named_parameters()) | dict(plain.named_buffers())
        found = load_file(tmp_path / f"{place}.safetensors")
        assert found.keys() == expected.keys(), model
        wrong = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor.detach())]
        assert not wrong, model


@pytest.mark.parametrize(
    "layers, ranks",
    [
        pytest.param(2, 2, id="small"),
        pytest.param(8, 2, id="2 ranks", marks=pytest.mark.matrix),
        pytest.param(8, 4, id="4 ranks", marks=pytest.mark.matrix),
    ],
)
def test_no_rank_holds_the_whole_model(layers: int, ranks: int, tmp_path: Path) -> None:
    """Its share, and a few weights at a time."""
    model = tiny_model(
        num_hidden_layers=layers,
        **LARGE,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
    )
    largest = max(p.numel() for p in model.parameters()) * 4
    model.save_pretrained(tmp_path / "model")
    tiny_processor().save_pretrained(tmp_path / "model")
    # The first one is for all that is imported and kept when a model is read for the first time.
    models = [str(save_tiny_model(tmp_path / "tiny")), str(tmp_path / "model")]
    launch_ranks(
        *("tests.integration.scattered_loading", str(tmp_path), "fp32", *models), ranks=ranks, timeout_seconds=300
    )
    for rank in range(ranks):
        said = json.loads((tmp_path / f"1.{rank}.json").read_text())
        whole = said["parameters"] * 4
        print(
            f"rank {rank} of {ranks}: model {whole / MIB:.0f} MiB, largest weight {largest / MIB:.0f}; peak while read "
            f"{said['reading'] / MIB:.0f}, mapped {said['mapped'] / MIB:.0f}; engine {said['making'] / MIB:.0f}"
        )
        assert said["held"] < 1.01 * whole / ranks
        assert said["reading"] < whole / ranks + 4 * largest, said
