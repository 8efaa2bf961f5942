"""Optimizer states that lie on NVMe are saved, and filled from a checkpoint, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.processes import launch_ranks

pytest.importorskip("deepspeed")


def async_io_builds() -> bool:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(AsyncIOBuilder().is_compatible(verbose=False))


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_states_on_nvme_are_saved_and_loaded(dtype: str, tmp_path: Path) -> None:
    if not async_io_builds():
        pytest.skip("DeepSpeed's async_io needs libaio with its headers")
    launch_ranks("tests.integration.nvme_states", str(tmp_path), dtype, ranks=1, timeout_seconds=1800)
    said = json.loads((tmp_path / "said.json").read_text())
    assert len(said) == 5 and not any(said.values()), said
