"""An update of every family in bf16, with published heads and widths, on a GPU that is not there.

Forward on a fake "cuda": whatever the host would wait for, and whatever lies on the wrong device or has the wrong
dtype, raises. Forward and backward on a fake "cpu" with the CUDA kernel: gradients of every trained weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.support.fakes import CPU, CUDA, as_fake, fake_policy, faked, features_of, groups_of, real_policy
from tests.support.tiny import FAMILY_NAMES, VL_FAMILY_NAMES
from vlm_pg.models.micro_batches import Streams, run_micro_batch
from vlm_pg.models.packing import pack, pack_chunk, pack_prefixes
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import LoraSettings, Part

ALL: tuple[Part, ...] = ("language", "tower", "merger")
CHUNKS = ([(0, 1), (0,), (), (1,)], [(2,), (), (0, 1), (0,)])


def parts_of(family: str) -> tuple[Part, ...]:
    return ALL if real_policy(family).family.reads_media else ("language",)


def packed(family: str, chunks: bool) -> Streams:
    """On the host, where lengths and places are known."""
    groups = groups_of(family)
    if not chunks:
        return Streams((pack(groups, CPU),))
    prefixes = pack_prefixes(groups, CPU)
    return Streams(tuple(pack_chunk(prefixes, groups, chosen, CPU) for chosen in CHUNKS), prefixes)


def losses(policy: Policy, streams: Streams, device: torch.device, entropy_graph: bool = False) -> list[torch.Tensor]:
    """Loss of each pass; behind a fake CPU with its backward."""
    on_device = Streams(
        tuple(as_fake(batch, device) for batch in streams.passes),
        None if streams.prefixes is None else as_fake(streams.prefixes, device),
    )
    features = features_of(policy, groups_of(policy.family.model_type), device)
    if not policy.vision.trains and features is not None:
        features = features.detach()

    def of_pass(number: int, logprobs: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
        expected = (streams.passes[number].targets.shape[0],)
        for values in (logprobs, entropies):
            assert (tuple(values.shape), values.dtype, values.device) == (expected, torch.float32, device)
        assert entropies.requires_grad == entropy_graph
        return (logprobs + entropies).sum()

    found = []

    def backward(loss: torch.Tensor) -> None:
        if device == CPU:
            loss.backward()
        found.append(loss.detach())

    run_micro_batch(policy, on_device, features, of_pass, backward, 0.7, entropy_graph=entropy_graph)
    return found


def check_gradients(policy: Policy, parts: Sequence[Part]) -> None:
    """Of every trained weight and no other, as the weight."""
    reached = set()
    for name, weight in policy.model.named_parameters():
        if not weight.requires_grad:
            assert weight.grad is None, name
            continue
        assert weight.grad is not None, f"{name} has no gradient"
        assert (weight.grad.shape, weight.grad.dtype) == (weight.shape, torch.bfloat16), name
        reached.add(policy.family.part_of(name))
    assert reached == set(parts)


# The same layers as with a tower, and they take longest.
SLOW = ("qwen3_5_text", "qwen3_5_moe_text")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.matrix if name in SLOW else ()) for name in FAMILY_NAMES]
)
def test_forward_of_an_update(family: str) -> None:
    streams = packed(family, chunks=False)
    with faked() as strict:
        policy = fake_policy(family, CUDA, train=parts_of(family), gradient_checkpointing=True)
        losses(policy, streams, CUDA)
    assert "_flash_attention_forward" in strict.seen


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_checkpointing": False},
        {"gradient_checkpointing": True, "mlp_tile_rows": 64},
        {"gradient_checkpointing": True, "vision_piece_tokens": 16},
    ],
    ids=["kept", "MLPs in tiles", "tower in pieces"],
)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_forward_with_what_saves_memory(family: str, settings: dict[str, Any]) -> None:
    streams = packed(family, chunks=False)
    with faked():
        policy = fake_policy(family, CUDA, train=ALL, **settings)
        policy.logits_chunk_rows = 50  # of 208
        losses(policy, streams, CUDA, entropy_graph=True)


@pytest.mark.parametrize("family", VL_FAMILY_NAMES)
def test_forward_in_chunks(family: str) -> None:
    streams = packed(family, chunks=True)
    with faked():
        losses(fake_policy(family, CUDA, train=ALL, gradient_checkpointing=True), streams, CUDA)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"])
def test_backward_of_an_update(family: str) -> None:
    streams = packed(family, chunks=False)
    with faked() as strict:
        policy = fake_policy(family, CPU, train=ALL, gradient_checkpointing=True)
        losses(policy, streams, CPU)
        check_gradients(policy, ALL)
    assert "_flash_attention_backward" in strict.seen


@pytest.mark.parametrize("parts", [("language",), ("merger",), ("tower", "merger")], ids="+".join)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_backward_where_parts_are_frozen(family: str, parts: tuple[Part, ...]) -> None:
    streams = packed(family, chunks=False)
    with faked():
        policy = fake_policy(family, CPU, train=parts, gradient_checkpointing=True)
        losses(policy, streams, CPU, entropy_graph=True)
        check_gradients(policy, parts)


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("qwen3_5", marks=pytest.mark.matrix)])
def test_backward_in_chunks(family: str) -> None:
    streams = packed(family, chunks=True)
    with faked():
        policy = fake_policy(family, CPU, train=ALL, gradient_checkpointing=True)
        found = losses(policy, streams, CPU)
        assert len(found) == len(CHUNKS) + 1
        check_gradients(policy, ALL)


@pytest.mark.parametrize("device", [CUDA, CPU], ids=str)
@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("qwen3_5", marks=pytest.mark.matrix)])
def test_adapters(family: str, device: torch.device) -> None:
    pytest.importorskip("peft")
    streams = packed(family, chunks=False)
    with faked():
        policy = fake_policy(family, device, train=("language",), lora=LoraSettings(), gradient_checkpointing=True)
        losses(policy, streams, device)
        if device == CPU:
            check_gradients(policy, ("language",))
