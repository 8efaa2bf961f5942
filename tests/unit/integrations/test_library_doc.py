"""The code in docs/library.md runs as it stands, block after block, on the tiny model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.support.runs import ROOT, save_tiny_model
from vlm_pg.models import registry

# The example with TRL's trainer runs in a process of its own: tests/numerics/test_trl_options.py.
BLOCKS = [
    block
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs/library.md").read_text(), re.DOTALL)
    if "GroupedGRPOTrainer" not in block
]


def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "FAMILIES", dict(registry.FAMILIES))  # what the page registers is made up
    save_tiny_model(tmp_path)
    names: dict = {}
    for block in BLOCKS:
        exec(compile(block.replace("Qwen/Qwen2.5-VL-3B-Instruct", str(tmp_path)), "docs/library.md", "exec"), names)
    logprobs, responses = names["logprobs"], names["responses"]
    assert [len(x) for x in logprobs[0]] == [len(response) for response in responses]
    names["loss"].backward()
    assert names["model"].lm_head.weight.grad.norm() > 0
    assert torch.equal(names["position_ids"][1:, 0], names["prompt"].positions_3P)
    assert names["position_ids"].shape == (4, 1, names["prompt"].num_tokens)
    assert registry.FAMILIES["my_vl"].model_class is names["MyVL"]
    assert names["out"].shape == names["q"].shape
    assert torch.isfinite(names["k"].grad).all()
