"""A run whose update leaves NaN or infinities in a weight ends on all ranks, with every engine, and saves nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support.processes import launch_ranks
from tests.support.runs import save_tiny_model
from tests.support.short_run import short_run, train_here

pytestmark = pytest.mark.matrix

LAYOUTS = ("torch-2", "zero2-offload-2", "zero3-2", "zero1-2", "zero2-2", "zero3-offload-2")


def test_weights_without_bound_are_not_saved(tmp_path: Path) -> None:
    """Loss and gradient are finite; a norm's weight of 1 becomes -3.3e38 by its decay, and Adam takes 3e37 of some."""
    config = short_run(tmp_path, training={"steps": 1, "learning_rate": 3e37, "weight_decay": 11.0})
    ended = train_here(config)
    assert ended.code == 2 and "Traceback" not in ended.printed, ended.printed
    assert "Update 1 has left NaN or infinities in " in ended.printed
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


def test_all_ranks_end_whichever_has_the_weight(tmp_path: Path) -> None:
    file = save_tiny_model(tmp_path / "model") / "model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[5]
    tensors[name].view(-1)[-1] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    launch_ranks("tests.integration.not_finite_updates", str(tmp_path), *LAYOUTS, ranks=2)
    for layout in LAYOUTS:
        first, last = (json.loads((tmp_path / f"update-{layout}-{rank}.json").read_text()) for rank in range(2))
        assert first["message"] == last["message"], layout
        assert f"NaN or infinities in 1 weights (the first is {last['weight']})" in last["message"], layout
    # ZeRO-3: each rank has read its shard of every weight.
    first, last = (json.loads((tmp_path / f"read-{rank}.json").read_text()) for rank in range(2))
    assert not first and f"in 1 of its weights (the first is {name} in model.safetensors)" in last
