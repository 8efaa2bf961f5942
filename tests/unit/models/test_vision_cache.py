"""The vision tower's outputs: kept while valid, bounded, shared between equal media, refused when stale."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.support.groups import tiny_policy
from vlm_pg.models.tower_inputs import PixelGeometry
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
