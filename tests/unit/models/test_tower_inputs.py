"""What is made of grids beforehand is what a tower makes of them itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.groups import make_case, tiny_policy
from tests.support.tiny import VL_FAMILY_NAMES
from vlm_pg.models import family as family_file
from vlm_pg.models.tower_inputs import tower_inputs

HOST = torch.device("cpu")


@pytest.mark.parametrize("family", VL_FAMILY_NAMES)
@torch.no_grad()
def test_features_are_the_same_bits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy(family=family)
    prompt = make_case(policy, "image+video", seed=3, max_side=6).prompt
    assert prompt.pixel_values is not None and prompt.grid_thw is not None
    ours = policy.run_tower(prompt.pixel_values, prompt.grid_thw)
    monkeypatch.setattr(family_file, "tower_inputs", lambda tower, grid_thw, device: {"grid_thw": grid_thw})
    assert torch.equal(ours, policy.run_tower(prompt.pixel_values, prompt.grid_thw))


def test_by_hand_and_what_flash_attention_is_told() -> None:
    """Two frames of 4 x 8 patches; a window is 2 x 2 merged patches, 4 x 4 patches: two a frame."""
    tower = tiny_policy(family="qwen2_5_vl").model.model.visual
    grids = torch.tensor([[2, 4, 8]])
    made = tower_inputs(tower, grids, HOST)
    assert made["cu_seqlens"].tolist() == [0, 32, 64]
    assert made["cu_window_seqlens"].tolist() == [0, 16, 32, 48, 64]
    assert made["window_index"].tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    assert not any(name.startswith("max_") for name in made)
    tower.config._attn_implementation = "flash_attention_2"
    told: dict[str, Any] = tower_inputs(tower, grids, torch.device("meta"))
    assert (told["max_seqlen"], told["max_window_seqlen"]) == (32, 16)
    on_device = {name for name, value in told.items() if isinstance(value, torch.Tensor) and value.is_meta}
    assert on_device == {"cu_seqlens", "cu_window_seqlens", "window_index", "position_ids"}


def test_a_tower_that_works_otherwise_gets_its_grids() -> None:
    class Own(torch.nn.Module):
        pass

    grids = torch.tensor([[1, 4, 4]])
    assert list(tower_inputs(Own(), grids, torch.device("meta"))) == ["grid_thw"]
    assert tower_inputs(Own(), grids, torch.device("meta"))["grid_thw"].is_meta
