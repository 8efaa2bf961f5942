"""A tower attends to all its frames and windows in one call a layer, with the numbers of frame by frame."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise, product
from typing import Any

import pytest
import torch

from tests.support.fakes import CPU, CUDA, Strict, as_fake, fake_policy, faked
from tests.support.groups import tiny_policy
from tests.support.tiny import VL_FAMILY_NAMES, tiny_model
from vlm_pg.attention.kernels.oracle import OracleKernel
from vlm_pg.attention.kernels.torch_kernels import CudaFlashKernel
from vlm_pg.attention.tree import SegmentCall
from vlm_pg.models import tower_attention
from vlm_pg.models.policy import Policy
from vlm_pg.models.registry import family_of
from vlm_pg.models.tower_attention import attend_on, attend_to_all_frames, attends_to_all_frames

# A video of three frames, an image that windows of Qwen2.5-VL cut unevenly, and one of a single token.
GRIDS = torch.tensor([[3, 4, 6], [1, 12, 8], [1, 2, 2]])


class Reference(CudaFlashKernel):
    """Plain softmax by the lengths that lie on the device, in the place of torch's operator."""

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


def outcome(policy: Policy) -> list[torch.Tensor]:
    """Features, and gradients of all weights of the tower."""
    tower = policy.family.vision_tower(policy.model)
    tower.zero_grad()
    features = policy.family.encode_vision(policy.model, patches_of(policy, GRIDS).to(policy.device), GRIDS)
    weight = torch.linspace(-1, 1, features.numel(), device=features.device).view_as(features)
    (features * weight).sum().backward()
    return [features.detach(), *(p.grad.clone() for p in tower.parameters() if p.grad is not None)]


@pytest.mark.parametrize("kernel", [None, "reference"])
@pytest.mark.parametrize("family", VL_FAMILY_NAMES)
def test_numbers_are_those_of_frame_by_frame(family: str, kernel: str | None) -> None:
    """None: the kernel that a CPU has, from lengths that the host knows."""
    policy = tiny_policy(family=family, train=("language", "tower", "merger"))
    expected = outcome(policy)
    reference = Reference()
    if kernel:
        attend_on(policy.model, policy.family, reference)
    else:
        tower_attention._route_to_all_frames(policy.family.vision_tower(policy.model))
    found = outcome(policy)
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
    monkeypatch.setattr(tower_attention, "frames_kernel", lambda device, dtype: kernel)
    monkeypatch.setattr(tower_attention, "check_kernel", lambda *_: 0.0)
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
    policy.family.encode_vision(policy.model, patches_of(policy, GRIDS), GRIDS)
    calls = len(a_gpu.calls)
    assert calls
    policy.model.set_attn_implementation({"vision_config": "eager"})
    assert not at_once(policy.model)
    policy.family.encode_vision(policy.model, patches_of(policy, GRIDS), GRIDS)
    assert len(a_gpu.calls) == calls


def test_transformers_own_call_of_such_a_tower(a_gpu: Reference) -> None:
    """Without lengths that the host has made: they come from transformers, and the longest from the device."""
    policy = tiny_policy()
    tower = policy.family.vision_tower(policy.model)
    expected = policy.family.encode_vision(policy.model, patches_of(policy, GRIDS), GRIDS)
    attend_on(policy.model, policy.family, a_gpu)
    found = tower(patches_of(policy, GRIDS), grid_thw=GRIDS).pooler_output
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert a_gpu.calls


@pytest.mark.parametrize("name, value", [("HEAD_DIM_MULTIPLE", 1000), ("_IS_FLASH", "is_flash_requested_somehow")])
def test_other_head_sizes_and_other_code_stay_frame_by_frame(
    name: str, value: object, a_gpu: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that flash attention lacks; another release of transformers."""
    monkeypatch.setattr(tower_attention, name, value)
    assert not at_once(tiny_policy().model)


def test_a_kernel_that_fails_its_check_is_not_used(a_gpu: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    def differs(*_: Any) -> float:
        raise RuntimeError("Attention kernel 'cuda-flash' differs from the plain softmax by 1.")

    monkeypatch.setattr(tower_attention, "check_kernel", differs)
    with pytest.warns(UserWarning, match="frame by frame, which is slow: Attention kernel 'cuda-flash' differs"):
        policy = tiny_policy()
    assert not at_once(policy.model)
