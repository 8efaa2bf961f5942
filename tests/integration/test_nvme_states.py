"""Optimizer states on NVMe are saved, and filled from a checkpoint, bit for bit; NaN in weights on NVMe is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.processes import launch_ranks

op_builder = pytest.importorskip("deepspeed.ops.op_builder")

pytestmark = pytest.mark.matrix


@pytest.fixture(autouse=True)
def async_io() -> None:
    if not op_builder.AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("DeepSpeed's async_io needs libaio with its headers")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_states_on_nvme_are_saved_and_loaded(dtype: str, tmp_path: Path) -> None:
    arguments = (str(tmp_path), "states", dtype)
    launch_ranks("tests.integration.nvme_runs", *arguments, ranks=1, timeout_seconds=1800)
    differ = json.loads((tmp_path / "differ.json").read_text())
    assert len(differ) == 5 and not any(differ.values()), differ


def test_nan_in_weights_on_nvme_is_found_by_the_rank_that_has_it(tmp_path: Path) -> None:
    """More weights than DeepSpeed has buffers for them; each rank reads its own part."""
    launch_ranks("tests.integration.nvme_runs", str(tmp_path), "weights", ranks=2, timeout_seconds=1800)
    first, last = (json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(2))
    assert len(first["on nvme"]) == 6 and all(first["on nvme"].values()) and first["on nvme"] == last["on nvme"]
    assert "NaN or infinities in 1 weights" in first["update"] and first["update"] == last["update"]
    assert "down_proj" in first["update"]
    assert "read" not in first and "NaN or infinities in 1 of its weights" in last["read"]
    assert "model.layers.1.mlp.down_proj.weight in model.safetensors" in last["read"]
