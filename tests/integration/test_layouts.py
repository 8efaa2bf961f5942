"""However training is laid out over processes, after five steps every weight is that of one process.

Seven questions a step with five responses each, prompts of odd lengths, a trained vision tower: nothing divides. The
gradient's norm, by which it is clipped, is compared in every step.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.support.layouts import LAYOUTS, Layout, distance, trained_by_one_process
from tests.support.processes import launch_ranks
from vlm_pg.models.registry import FAMILIES

TOLERANCE = 1e-5
# In bf16 rounding differs by order.
ALL = tuple(name for name, layout in LAYOUTS.items() if layout.dtype == "fp32")
# What no table of one thing has: sequence ranks, ZeRO, dealing, parts and families together. Stages and offload alone
# are in test_zero_table.py, adapters in test_lora_run.py, families on sequence ranks in test_sequence_ranks.py.
SOME = (
    *("sequence2-zero3-qwen3_5", "merger-sequence2-zero3", "dealt-zero2-qwen3_vl", "dealt-zero3-2"),
    *("sequence2-zero2-data2", "dealt-sequence2-data2"),
)


@pytest.mark.parametrize(
    "names", [pytest.param(ALL, marks=pytest.mark.matrix, id="all"), pytest.param(SOME, id="some")]
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_layout_trains_what_one_process_trains(ranks: int, names: tuple[str, ...], tmp_path: Path) -> None:
    layouts = [LAYOUTS[name] for name in names if LAYOUTS[name].ranks == ranks]
    chosen = [layout.name for layout in layouts]
    launch_ranks("tests.integration.layout_run", str(tmp_path), *chosen, ranks=ranks, timeout_seconds=500)
    far: dict[str, dict[str, float]] = {}
    for layout in layouts:
        one = trained_by_one_process(layout)
        file = tmp_path / f"{layout.name}.safetensors"
        with safe_open(file, "pt") as opened:
            said = json.loads(opened.metadata()["metrics"])
        norms = [step["grad_norm"] for step in said]
        assert norms == pytest.approx([step["grad_norm"] for step in one.metrics], rel=1e-5), layout.name
        assert max(norms) > layout.max_grad_norm, "some gradient should be clipped"
        assert all(step["micro_batches"] > 1 for step in said)
        if layout.dealt:
            assert sum(step["moved"] for step in said), "some prompt should be trained on where it was not encoded"
            least, most = (said[-1][f"patches/{name}"] for name in ("least", "most"))
            assert most < 1.2 * least, "a tower has equally much to do on every rank, up to a frame a step"
        found, moved = load_file(file), distance(one.before, one.after)
        frozen = [name for name in found if not _trains(layout, name)]
        assert all(torch.equal(found[name], one.before[name]) for name in frozen), "frozen weights stay as they are"
        found, moved = ({name: of[name] for name in of if name not in frozen} for of in (found, moved))
        assert min(moved.values()) > 10 * TOLERANCE, "a weight that hardly moves would agree anyway"
        apart = distance(found, {name: one.after[name] for name in found})
        print(layout.name, f"largest relative difference of a weight {max(apart.values()):.1e}")
        # B begins at zero and is nothing but gradients, of which some are hardly more than their rounding.
        allowed = {name: TOLERANCE * (10 if ".lora_B" in name else 1) for name in apart}
        far[layout.name] = {name: value for name, value in apart.items() if not value <= allowed[name]}
    assert not any(far.values()), far


def _trains(layout: Layout, name: str) -> bool:
    return ".lora_" in name if layout.lora else FAMILIES[layout.family].part_of(name) in layout.train
