"""The vision tower: its cache, its input in pieces, and attention to all frames in one call a layer."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fakes import CPU, CUDA, Strict, as_fake, fake_policy, faked
from tests.support.groups import make_case, tiny_policy
from tests.support.tiny import VL_FAMILY_NAMES, tiny_model
from vlm_pg.attention.kernels.oracle import OracleKernel
from vlm_pg.attention.kernels.torch_kernels import CudaFlashKernel
from vlm_pg.attention.tree import SegmentCall
from vlm_pg.models import family as family_file
from vlm_pg.models import tower as tower_module
from vlm_pg.models.policy import Policy
from vlm_pg.models.registry import family_of
from vlm_pg.models.tower import (
    PixelGeometry,
    VisionPiece,
    attend_on,
    attend_to_all_frames,
    attends_to_all_frames,
    pieces,
    shares,
    tower_inputs,
)
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
    (cached,) = vision.encode([prompt("a")], with_graph=True, keep_graph=True)
    assert vision.encode([prompt("a")])[0] is cached, "generation uses what training will differentiate"
    cached.features.sum().backward()
    assert tower.weight.grad is not None
    vision.weights_changed()
    vision.encode([prompt("a")], with_graph=True)
    assert tower.calls == [8, 8]


def test_outputs_of_a_tower_that_begins_or_stops_to_train_are_dropped() -> None:
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
    assert tower.calls == [8, 8], "no reference any more, and no room in the cache"


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
    bounds = [0, *(piece.stop for piece in found)]
    assert [piece.start for piece in found] == bounds[:-1]
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


def test_by_hand_and_with_flash_attention() -> None:
    """Two frames of 4 x 8 patches; a window is 2 x 2 merged patches, 4 x 4 patches: two a frame."""
    tower = tiny_policy(family="qwen2_5_vl").model.model.visual
    grids = torch.tensor([[2, 4, 8]])
    made = tower_inputs(tower, grids, HOST)
    assert made["cu_seqlens"].tolist() == [0, 32, 64]
    assert made["cu_window_seqlens"].tolist() == [0, 16, 32, 48, 64]
    assert made["window_index"].tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    assert not any(name.startswith("max_") for name in made)
    tower.config._attn_implementation = "flash_attention_2"
    made_there: dict[str, Any] = tower_inputs(tower, grids, torch.device("meta"))
    assert (made_there["max_seqlen"], made_there["max_window_seqlen"]) == (32, 16)
    on_device = {name for name, value in made_there.items() if isinstance(value, torch.Tensor) and value.is_meta}
    assert on_device == {"cu_seqlens", "cu_window_seqlens", "window_index", "position_ids"}


def test_a_tower_that_works_otherwise_gets_its_grids() -> None:
    class Own(torch.nn.Module):
        pass

    grids = torch.tensor([[1, 4, 4]])
    assert list(tower_inputs(Own(), grids, torch.device("meta"))) == ["grid_thw"]
    assert tower_inputs(Own(), grids, torch.device("meta"))["grid_thw"].is_meta


# A video of three frames, an image that windows of Qwen2.5-VL cut unevenly, and one of a single token.
UNEVEN_GRIDS = torch.tensor([[3, 4, 6], [1, 12, 8], [1, 2, 2]])


class Reference(CudaFlashKernel):
    """Plain softmax by the lengths that lie on the device, instead of torch's operator."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def segments_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: SegmentCall, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cumulative, of_keys = call.cu_seqlens(q.device)
        assert cumulative is of_keys and cumulative.dtype == torch.int32 and not call.causal
        lengths = [end - start for start, end in pairwise(cumulative.tolist())]
        assert call.max_query_length == call.max_key_length == max(lengths)
        self.calls.append(lengths)
        known = SegmentCall((0, len(q)), (0, len(q)), tuple(lengths), tuple(lengths), causal=False)
        return OracleKernel().segments_forward(q, k, v, known, scale)

    def segments_backward(self, grad_out: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        inputs, (_, _, call, scale) = rest[:3], rest[3:]
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in inputs)
            out, _ = self.segments_forward(q, k, v, call, scale)
            dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad_out)
        return dq, dk, dv


def patches_of(policy: Policy, grids: torch.Tensor) -> torch.Tensor:
    pixels = policy.pixels
    width = pixels.channels * pixels.temporal_patch_size * pixels.patch_size**2
    return torch.randn(int(grids.prod(-1).sum()), width, generator=torch.Generator().manual_seed(1))


def features_and_gradients(policy: Policy) -> list[torch.Tensor]:
    """Features, and gradients of all weights of the tower."""
    tower = policy.family.vision_tower(policy.model)
    tower.zero_grad()
    features = policy.family.encode_vision(
        policy.model, patches_of(policy, UNEVEN_GRIDS).to(policy.device), UNEVEN_GRIDS
    )
    weight = torch.linspace(-1, 1, features.numel(), device=features.device).view_as(features)
    (features * weight).sum().backward()
    return [features.detach(), *(p.grad.clone() for p in tower.parameters() if p.grad is not None)]


@pytest.mark.parametrize("kernel", [None, "reference"])
@pytest.mark.parametrize("family", VL_FAMILY_NAMES)
def test_numbers_are_those_of_frame_by_frame(family: str, kernel: str | None) -> None:
    """None: the kernel that a CPU has, from lengths that the host knows."""
    policy = tiny_policy(family=family, train=("language", "tower", "merger"))
    expected = features_and_gradients(policy)
    reference = Reference()
    if kernel:
        attend_on(policy.model, policy.family, reference)
    else:
        tower_module._route_to_all_frames(policy.family.vision_tower(policy.model))
    found = features_and_gradients(policy)
    assert len(found) == len(expected) > 10
    for got, wanted in zip(found, expected, strict=True):
        assert (got - wanted).norm() <= 2e-5 * wanted.norm()
    if kernel:
        frames = [24, 24, 24, 96, 4]
        assert frames in reference.calls and all(sum(lengths) == 172 for lengths in reference.calls)
        # Qwen2.5-VL alone has layers that attend within windows.
        assert any(lengths != frames for lengths in reference.calls) == (family == "qwen2_5_vl")


USUAL = (("qwen2_5_vl", CPU), ("qwen2_5_vl", CUDA), ("qwen3_vl", CUDA))


class Counted(Strict):
    """Notes every operator that attends."""

    def __init__(self) -> None:
        super().__init__()
        self.attends: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in func._schema.name:
            self.attends.append(func._schema.name.split("::")[1])
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize(
    "family, device",
    [
        pytest.param(family, device, marks=() if (family, device) in USUAL else pytest.mark.matrix)
        for family, device in product(VL_FAMILY_NAMES, (CUDA, CPU))
    ],
)
def test_one_kernel_a_layer_however_long_the_video(family: str, device: torch.device) -> None:
    """With published widths, in bf16; gradients too, behind the fake CPU."""
    real = tiny_policy(family=family)
    for frames in (1, 40):
        grids = torch.tensor([[frames, 8, 12]])
        patches = patches_of(real, grids)
        with faked(counted := Counted()):
            policy = fake_policy(family, device, train=("language", "tower", "merger"))
            tower = policy.family.vision_tower(policy.model)
            features = policy.family.encode_vision(policy.model, as_fake(patches, device), grids)
            assert (features.dtype, features.shape[0]) == (torch.bfloat16, frames * 24)
            forward = ["_flash_attention_forward"] * len(tower.blocks)
            assert counted.attends == forward
            if device == CPU:
                features.sum().backward()
                assert counted.attends == forward + ["_flash_attention_backward"] * len(tower.blocks)
                assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in tower.blocks.parameters())


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Reference:
    """A kernel for all frames, as on a GPU in half precision."""
    kernel = Reference()
    monkeypatch.setattr(tower_module, "frames_kernel", lambda device, dtype: kernel)
    monkeypatch.setattr(tower_module, "check_kernel", lambda *_: 0.0)
    return kernel


def at_once(model: Any) -> bool:
    return attends_to_all_frames(family_of(model.config).vision_tower(model))


def test_a_policy_on_a_gpu_chooses_it(a_gpu: Reference) -> None:
    policy = tiny_policy()
    assert at_once(policy.model) and policy.language_model.config._attn_implementation == "vlm_pg_grouped"
    # Its copy too; and a model that is made of the same configuration is transformers' own.
    assert at_once(deepcopy(policy.model)) and not at_once(type(policy.model)(policy.model.config))
    tiny_policy(family="qwen2")  # without a tower


def test_the_users_choice_of_attention_wins_before_and_after(a_gpu: Reference) -> None:
    model = tiny_model()
    model.set_attn_implementation({"vision_config": "eager"})
    attend_to_all_frames(model, family_of(model.config))
    assert not at_once(model)
    policy = tiny_policy()
    attend_on(policy.model, policy.family, a_gpu)
    policy.family.encode_vision(policy.model, patches_of(policy, UNEVEN_GRIDS), UNEVEN_GRIDS)
    calls = len(a_gpu.calls)
    assert calls
    policy.model.set_attn_implementation({"vision_config": "eager"})
    assert not at_once(policy.model)
    policy.family.encode_vision(policy.model, patches_of(policy, UNEVEN_GRIDS), UNEVEN_GRIDS)
    assert len(a_gpu.calls) == calls


def test_transformers_own_call_of_such_a_tower(a_gpu: Reference) -> None:
    """Without lengths that the host has made: they come from transformers, and the longest from the device."""
    policy = tiny_policy()
    tower = policy.family.vision_tower(policy.model)
    expected = policy.family.encode_vision(policy.model, patches_of(policy, UNEVEN_GRIDS), UNEVEN_GRIDS)
    attend_on(policy.model, policy.family, a_gpu)
    found = tower(patches_of(policy, UNEVEN_GRIDS), grid_thw=UNEVEN_GRIDS).pooler_output
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert a_gpu.calls


@pytest.mark.parametrize("name, value", [("HEAD_DIM_MULTIPLE", 1000), ("_IS_FLASH", "is_flash_requested_somehow")])
def test_other_head_sizes_and_other_code_stay_frame_by_frame(
    name: str, value: object, a_gpu: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that flash attention lacks; another release of transformers."""
    monkeypatch.setattr(tower_module, name, value)
    assert not at_once(tiny_policy().model)


def test_a_kernel_that_fails_its_check_is_not_used(a_gpu: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    def differs(*_: Any) -> float:
        raise RuntimeError("Attention kernel 'cuda-flash' differs from the plain softmax by 1.")

    monkeypatch.setattr(tower_module, "check_kernel", differs)
    with pytest.warns(UserWarning, match="frame by frame, which is slow: Attention kernel 'cuda-flash' differs"):
        policy = tiny_policy()
    assert not at_once(policy.model)
