"""A whole GRPO step is the tower, the rollouts and the update of one question, each as it is counted alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlm_pg.bench.flops import forward_done_flops
from vlm_pg.bench.paper import main
from vlm_pg.bench.paper.contestants import counted
from vlm_pg.bench.paper.trees import extrapolated
from vlm_pg.bench.paper.whole_step import PAIR_TOKENS, WORDS, WholeStepPoint
from vlm_pg.bench.shapes import SIZES
from vlm_pg.bench.work import ForwardDone
from vlm_pg.errors import ConfigError

pytestmark = pytest.mark.usefixtures("thawed")

SETTINGS = ["--dtype", "bf16", "--checkpointing", "--lora", "4", "--jobs", "1"]


def paper(path: Path, *words: str) -> dict[str, Any]:
    assert main(["small", *words, *SETTINGS, "--out", str(path)]) == 0
    entries = json.loads(path.read_text())["entries"]
    return {entry["work"]: entry for entry in entries if "counts" in entry}


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    works = ["--works", "grpo-step", "step", "rollout", "--contestants", "grouped", "ours", "--reference"]
    points = ["--grpo-points", "2,2,3", "--points", "140,2,3", "--rollout-points", "140,2,3"]
    return paper(tmp_path_factory.mktemp("paper") / "paper.json", *works, *points)


def test_phases_are_what_they_are_alone(entries: dict[str, Any]) -> None:
    step, parts = entries["grpo-step"], entries["grpo-step"]["parts"]
    assert step["point"] == {"frames": 2, "prefix": PAIR_TOKENS + WORDS, "generations": 2, "new_tokens": 3}
    assert parts["update"] == entries["step"]["counts"]
    assert {name: parts[name] for name in ("prefill", "steps")} == entries["rollout"]["parts"]
    whole = sum(sum(part["flops"].values()) for part in parts.values())
    assert sum(step["counts"]["flops"].values()) == whole
    assert list(step["phases"]) == ["vision", "rollout", "reference", "update"]
    h100 = {name: phase["roofline"]["H100 SXM"]["seconds"] for name, phase in step["phases"].items()}
    assert step["roofline"]["H100 SXM"]["seconds"] == pytest.approx(sum(h100.values()))
    assert h100["rollout"] == pytest.approx(entries["rollout"]["roofline"]["H100 SXM"]["seconds"])


def test_visual_features_stand_beside_the_phases_behind_the_tower(entries: dict[str, Any]) -> None:
    phases = entries["grpo-step"]["phases"]
    # 128 visual tokens of 256 numbers in two bytes each.
    features = 128 * 256 * 2
    assert phases["update"]["peak_bytes"] == entries["step"]["peak_bytes"] + features
    assert phases["rollout"]["peak_bytes"] == entries["rollout"]["peak_bytes"] + features
    assert entries["grpo-step"]["peak_bytes"] == max(phase["peak_bytes"] for phase in phases.values())


def test_a_reference_is_a_forward_without_the_adapter(entries: dict[str, Any]) -> None:
    # The prompt and two tokens of each rollout; of the last layer the prompt's last row and those.
    alone, behind = 140 * 141 // 2, 2 * (2 * 140 + 3)
    done = ForwardDone(140 + 2 * 2, 2 * 2 + 1, 139, alone + behind, 140 + behind, 2 * 3)
    found = sum(entries["grpo-step"]["phases"]["reference"]["counts"]["flops"].values())
    assert found == pytest.approx(forward_done_flops(SIZES["small"], done), rel=1e-4)


def test_a_tower_is_affine_in_frames() -> None:
    """What 64 and 1,024 frames cost follows from two short videos."""
    spec = {"model": "small", "work": "tower", "dtype": "bf16", "checkpointing": False, "lora": None, "liger": False}
    two, four, nine = (counted(spec | {"layers": None, "point": {"pairs": pairs}}) for pairs in (2, 4, 9))
    follows = extrapolated(two, four, (2, 4), 9)
    for key in ("counts", "peak_bytes", "end_bytes", "weights_bytes"):
        assert follows[key] == nine[key], key


def test_without_an_adapter_a_reference_has_weights_of_its_own() -> None:
    from vlm_pg.bench.paper.whole_step import whole_step

    part = {"counts": {"flops": {"matmul": 1}}, "peak_bytes": 10.0, "end_bytes": 1.0, "weights_bytes": 100.0}
    part |= {"parts": {}, "middle": {}, "captured_launches": 0, "replays": 0, "eager_steps": 0}
    spec = {"point": {"frames": 8}, "phases": {name: {} for name in ("rollout", "reference", "update")}}
    peaks = {rank: whole_step(spec | {"lora": rank}, lambda _: part)["peak_bytes"] for rank in (None, 4)}
    assert peaks == {None: 10 + 1 + 100, 4: 10 + 1}


def test_that_linear_attention_was_torchs_is_said_of_a_whole_step() -> None:
    from vlm_pg.bench.paper.whole_step import whole_step

    part = {"counts": {}, "peak_bytes": 1.0, "end_bytes": 1.0, "weights_bytes": 1.0, "parts": {}, "middle": {}}
    part |= {"captured_launches": 0, "replays": 0, "eager_steps": 0}
    spec = {"point": {"frames": 8}, "phases": {name: {"linear": True} for name in ("rollout", "update")}, "lora": 4}
    found = whole_step(spec, lambda one: part | ({"linear_attention": "reference"} if "linear" in one else {}))
    assert found["linear_attention"] == "reference"


@pytest.mark.parametrize("numbers", [(3, 8, 512), (0, 8, 512), (4, 0, 512), (4, 8, 1)])
def test_points_that_cannot_be(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="an even number of frames"):
        WholeStepPoint(*numbers)
