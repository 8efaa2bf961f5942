"""However training is laid out over processes, after five steps every weight is that of one process.

Seven questions a step with five responses each, prompts of odd lengths, a trained vision tower: nothing divides. The
gradient's norm, by which it is clipped, is compared in every step.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from tests.support.layouts import LAYOUTS, MAX_GRAD_NORM, distance, trained_by_one_process
from tests.support.processes import launch_ranks

TOLERANCE = 1e-5


@pytest.mark.parametrize("ranks", sorted({layout.ranks for layout in LAYOUTS.values()}))
def test_every_layout_trains_what_one_process_trains(ranks: int, tmp_path: Path) -> None:
    layouts = [layout for layout in LAYOUTS.values() if layout.ranks == ranks]
    names = [layout.name for layout in layouts]
    launch_ranks("tests.integration.layout_run", str(tmp_path), *names, ranks=ranks, timeout_seconds=500)
    far: dict[str, dict[str, float]] = {}
    for layout in layouts:
        one = trained_by_one_process(layout.family)
        file = tmp_path / f"{layout.name}.safetensors"
        with safe_open(file, "pt") as opened:
            said = json.loads(opened.metadata()["metrics"])
        norms = [step["grad_norm"] for step in said]
        assert norms == pytest.approx([step["grad_norm"] for step in one.metrics], rel=1e-5), layout.name
        assert min(norms) > MAX_GRAD_NORM, "the gradient should be clipped"
        moved = distance(one.before, one.after)
        assert min(moved.values()) > 10 * TOLERANCE, "a weight that hardly moves would agree anyway"
        assert all(step["micro_batches"] > 1 for step in said)
        apart = distance(load_file(file), one.after)
        print(layout.name, f"largest relative difference of a weight {max(apart.values()):.1e}")
        far[layout.name] = {name: value for name, value in apart.items() if not value <= TOLERANCE}
    assert not any(far.values()), far
