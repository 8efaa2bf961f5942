"""Of linear attention torch's operators are counted, whatever is installed beside them, and the table says so."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest

from tests.support.groups import tiny_policy
from vlm_pg.bench.paper.fake import reference_operators
from vlm_pg.bench.paper.table import markdown


def test_a_packages_function_gives_way_while_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy(family="qwen3_5")
    module: Any = sys.modules[type(policy.model).__module__]
    name = "torch_chunk_gated_delta_rule"
    there = getattr(module, name)

    @functools.wraps(there)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it needs a GPU")

    monkeypatch.setattr(module, name, compiled)
    with reference_operators(policy.model):
        inside = getattr(module, name)
        assert inside.__name__ == name and not hasattr(inside, "__wrapped__")
    assert getattr(module, name) is compiled


@pytest.mark.parametrize("linear", [False, True])
def test_the_table_says_what_was_counted(linear: bool) -> None:
    counts: dict[str, Any] = {"flops": {"matmul": 1}, "bytes": {"elementwise": 1}, "waits": {}, "launches": 1}
    entry: dict[str, Any] = {"model": "M", "work": "step", "point": {"prefix": 1, "generations": 1, "response": 1}}
    entry |= {"contestant": "grouped", "weights_bytes": 1, "peak_bytes": 1, "counts": counts, "roofline": {}}
    if linear:
        entry["linear_attention"] = "reference"
    settings: dict[str, Any] = {
        "dtype": "bf16",
        "checkpointing": False,
        "liger": False,
        "lora": None,
        "launch_seconds": 5e-6,
    }
    said = markdown({"devices": {}, "settings": settings, "entries": [entry]})
    assert ("Linear attention is counted as torch's reference operators" in said) is linear
