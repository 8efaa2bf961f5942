"""The vision tower's outputs: kept while valid, bounded, shared between equal media, refused when stale."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.groups import make_case, tiny_policy
from tests.support.tiny import VL_FAMILY_NAMES
from vlm_pg.models import family as family_file
from vlm_pg.models.tower_inputs import PixelGeometry, VisionPiece, pieces, shares, tower_inputs
from vlm_pg.models.vision import VisionEncoder
from vlm_pg.types import Prompt


class Tower:
    """Stands in for the vision tower: one 4-number feature per 4 patches, and a count of what went through."""

    def __init__(self) -> None:
        self.weight = torch.ones((), requires_grad=True)
        self.calls: list[int] = []

    def __call__(self, pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(pixels))
        return self.weight * pixels.unflatten(0, (-1, 4)).mean(1)


def prompt(name: str, media: str | None = None) -> Prompt:
    pixels = torch.full((8, 4), float(len(media or name)))
    return Prompt(
        name,
        torch.zeros(3, dtype=torch.long),
        torch.tensor([2, 2, 0]),
        torch.zeros(3, 3, dtype=torch.long),
        pixel_values=pixels,
        grid_thw=torch.tensor([[1, 4, 2]]),
        media_kinds=("video",),
        content_key=media or name,
    )


def encoder(trains: bool, cache_bytes: int = 10_000) -> tuple[VisionEncoder, Tower]:
    tower = Tower()
    return VisionEncoder(tower, PixelGeometry(merge_size=2), trains, cache_bytes, lambda: torch.device("cpu")), tower


def test_a_frozen_tower_sees_each_video_once_over_the_whole_run() -> None:
    vision, tower = encoder(trains=False)
    for _ in range(3):
        found = vision.encode([prompt("a"), prompt("b")])
        vision.weights_changed()
    assert tower.calls == [8, 8]
    assert all(vision.is_current(one) for one in found) and not vision.is_current(None)
    assert not encoder(trains=False)[0].is_current(found[0]), "another encoder's"


def test_two_questions_about_one_video_share_it() -> None:
    vision, tower = encoder(trains=False)
    first, second = vision.encode([prompt("q1", media="v"), prompt("q2", media="v")])
    assert tower.calls == [8]
    assert first.features is second.features


def test_a_trained_tower_runs_once_per_version_with_its_graph() -> None:
    vision, tower = encoder(trains=True)
    (kept,) = vision.encode([prompt("a")], with_graph=True, keep_graph=True)
    assert vision.encode([prompt("a")])[0] is kept, "generation uses what training will differentiate"
    kept.features.sum().backward()
    assert tower.weight.grad is not None
    vision.weights_changed()
    vision.encode([prompt("a")], with_graph=True)
    assert tower.calls == [8, 8]


def test_outputs_of_a_tower_that_begins_or_stops_to_train_are_let_go_of() -> None:
    vision, tower = encoder(trains=False)
    versions = [vision.version]
    for trains in (False, True, True, False, False):
        vision.weights_changed(trains)
        assert vision.trains is trains
        vision.encode([prompt("a")], with_graph=trains)
        versions.append(vision.version)
    changed = [later > earlier for earlier, later in pairwise(versions)]
    assert changed == [False, True, True, True, False] and len(tower.calls) == 4
    with pytest.raises(AttributeError):
        vision.trains = True  # type: ignore[misc]


def test_the_cache_is_bounded_and_forgets_the_least_recently_used() -> None:
    vision, tower = encoder(trains=False, cache_bytes=2 * 2 * 4 * 4)  # two prompts of two features of four fp32 numbers
    for name in ("a", "b", "a", "c", "a", "b"):
        vision.encode([prompt(name)])
    assert len(tower.calls) == 4, "a, b, c, and b again, which c had pushed out"


def test_text_only_prompts_have_no_features() -> None:
    vision, tower = encoder(trains=False)
    text = Prompt("t", torch.zeros(2), torch.zeros(2), torch.zeros(3, 2))
    assert vision.encode([text])[0].features is None
    assert tower.calls == []


def test_a_graph_cannot_be_asked_of_a_frozen_tower() -> None:
    with pytest.raises(ValueError, match=r"frozen vision tower; name tower or merger in model\.train"):
        encoder(trains=False)[0].encode([prompt("a")], with_graph=True)


def test_what_is_in_use_is_not_encoded_again_even_without_a_cache() -> None:
    vision, tower = encoder(trains=False, cache_bytes=0)
    held = vision.encode([prompt("a")])
    assert vision.encode([prompt("a")])[0] is held[0]
    assert tower.calls == [8]
    del held
    vision.encode([prompt("a")])
    assert tower.calls == [8, 8], "nobody held it any more, and the cache has no room"


def test_pixels_follow_a_policy_that_moves() -> None:
    policy = tiny_policy()
    seen: list[torch.device] = []

    def tower(pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        seen.append(pixels.device)
        return pixels.new_zeros(int(grids.prod(-1).sum()) // 4, 8)

    policy.vision._run_tower = tower
    policy.vision.encode([prompt("a")])
    policy.to("meta")
    policy.vision.forget()
    policy.vision.encode([prompt("a")])
    assert [device.type for device in seen] == ["cpu", "meta"]


GRIDS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4)), max_size=5)


def frames_of(grids: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    return [(h, w) for t, h, w in grids for _ in range(t)]


def covered(found: list[VisionPiece], grids: list[tuple[int, int, int]]) -> bool:
    """No gap, no overlap, every piece's patches are those of its grids, and the frames are the media's own."""
    places = [0, *(piece.stop for piece in found)]
    assert [piece.start for piece in found] == places[:-1]
    assert all(piece.patches == sum(t * h * w for t, h, w in piece.grids) for piece in found)
    return frames_of([grid for piece in found for grid in piece.grids]) == frames_of(grids)


def test_hand_checked() -> None:
    # 5 frames of 4 patches, then an image of 6: at most 8 patches a piece.
    assert pieces([(5, 2, 2), (1, 2, 3)], 8) == [
        VisionPiece(((2, 2, 2),), 0, 8),
        VisionPiece(((2, 2, 2),), 8, 16),
        VisionPiece(((1, 2, 2),), 16, 20),
        VisionPiece(((1, 2, 3),), 20, 26),
    ]
    assert pieces([(5, 2, 2), (1, 2, 3)], 10)[-1] == VisionPiece(((1, 2, 2), (1, 2, 3)), 16, 26)
    assert pieces([(1, 4, 4), (2, 1, 2)], 1) == [
        VisionPiece(((1, 4, 4),), 0, 16),
        VisionPiece(((1, 1, 2),), 16, 18),
        VisionPiece(((1, 1, 2),), 18, 20),
    ]
    assert pieces([], 8) == []


@given(GRIDS, st.integers(1, 60))
def test_every_frame_once_and_no_piece_too_large(grids: list[tuple[int, int, int]], most: int) -> None:
    found = pieces(grids, most)
    assert covered(found, grids)
    for piece in found:
        assert piece.patches <= most or frames_of(list(piece.grids)) == [piece.grids[0][1:]]


@given(GRIDS, st.integers(1, 6))
def test_shares_are_as_many_as_asked_for_and_even(grids: list[tuple[int, int, int]], parts: int) -> None:
    found = shares(grids, parts)
    assert len(found) == parts
    assert covered(found, grids)
    largest = max(piece.patches for piece in found)
    # No cut into so many pieces has a smaller largest one.
    if largest > 1:
        smaller = pieces(grids, largest - 1)
        assert len(smaller) > parts or max(piece.patches for piece in smaller) >= largest


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="most_patches is 0; it must be at least 1"):
        pieces([(1, 2, 2)], 0)
    with pytest.raises(ValueError, match="parts is 0; it must be at least 1"):
        shares([(1, 2, 2)], 0)


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
