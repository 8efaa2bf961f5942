"""An update of every family as one of several sequence ranks makes it, on GPUs that are not there.

Forward on a fake "cuda", forward and backward on a fake "cpu" with the CUDA kernel, as in
``test_passes_on_fake_cuda.py``; collectives go to torch's process group that sends nothing. What two ranks send each
other must be what the other one waits for: the same collectives in one order, of the same sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.fakes import (
    CPU,
    CUDA,
    FaultOnDevice,
    as_fake,
    fake_policy,
    faked,
    groups_of,
)
from tests.support.tiny import FAMILY_NAMES
from tests.unit.models.test_passes_on_fake_cuda import SLOW, check_gradients, packed, parts_of
from vlm_pg.distributed import SequenceGroup
from vlm_pg.models.micro_batches import Streams, run_micro_batch, share_streams
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import LoraSettings, Part
from vlm_pg.models.stream_share import StreamShare

# One of each kind of layer and tower stays; the others differ in what a whole stream's tests see, too.
LONG = (*SLOW, "qwen2", "qwen3_moe", "qwen3_5_moe")


@contextmanager
def ranks(size: int, rank: int) -> Iterator[SequenceGroup]:
    """Inside, this process is one of so many."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield SequenceGroup(size, rank)
    finally:
        dist.destroy_process_group()


def features_of(policy: Policy, device: torch.device, sequence: SequenceGroup) -> torch.Tensor | None:
    """Of the groups' media, of which each rank encodes a part; pixels come from the host."""
    prompts = [group.prompt for group in groups_of(policy.family.model_type)]
    shown = [prompt for prompt in prompts if prompt.pixel_values is not None]
    if not shown:
        return None
    pixels = torch.cat([as_fake(prompt.pixel_values, CPU) for prompt in shown])
    grids = [prompt.grid_thw for prompt in shown]
    with torch.utils._python_dispatch._disable_current_modes():
        grid_thw = torch.cat([grid for grid in grids if grid is not None])
    features = policy.vision._encoded(pixels, grid_thw, sequence)
    assert (features.dtype, features.device) == (policy.dtype, device)
    return features


def update(
    family: str, device: torch.device, size: int, rank: int, chunks: bool = False, **settings: Any
) -> list[tuple[str, list[int], list[int]]]:
    """The collectives of one rank's update, in order: name, elements to each rank, and from each."""
    parts: tuple[Part, ...] = settings.pop("train", parts_of(family))
    with ranks(size, rank) as sequence:
        streams = share_streams(packed(family, chunks), sequence)
        with faked() as strict:
            policy = fake_policy(family, device, train=parts, gradient_checkpointing=True, **settings)
            policy.logits_chunk_rows = 50
            on_device = Streams(
                tuple(as_fake(batch, device) for batch in streams.passes),
                None if streams.prefixes is None else as_fake(streams.prefixes, device),
            )
            features = features_of(policy, device, sequence)
            if not policy.vision.trains and features is not None:
                features = features.detach()

            def of_pass(number: int, logprobs: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
                expected = (streams.passes[number].targets.shape[0],)
                for values in (logprobs, entropies):
                    assert (tuple(values.shape), values.dtype, values.device) == (expected, torch.float32, device)
                return (logprobs + entropies).sum()

            def backward(loss: torch.Tensor) -> None:
                if device == CPU:
                    loss.backward()

            run_micro_batch(policy, on_device, features, of_pass, backward, 0.7)
            if device == CPU:
                check_gradients(policy, parts)
        return strict.sent


def check_that_they_meet(found: dict[int, list[tuple[str, list[int], list[int]]]]) -> None:
    """Each rank of ``found`` makes the same collectives as the others, and gets from each what that one sends."""
    (first, *_), lists = found, [*found.values()]
    assert lists[0] and all([name for name, *_ in each] == [name for name, *_ in lists[0]] for each in lists)
    for number, (name, *_) in enumerate(found[first]):
        for sender, of_sender in found.items():
            for receiver, of_receiver in found.items():
                sent, awaited = of_sender[number][1][receiver], of_receiver[number][2][sender]
                assert sent == awaited, f"{name} {number}: rank {sender} sends {sent}, {receiver} waits for {awaited}"


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.matrix if name in LONG else ()) for name in FAMILY_NAMES]
)
def test_forward_of_an_update(family: str) -> None:
    check_that_they_meet({rank: update(family, CUDA, 2, rank) for rank in range(2)})


@pytest.mark.parametrize(
    "family", ["qwen3_vl", *(pytest.param(n, marks=pytest.mark.matrix) for n in ("qwen2_5_vl", "qwen3_5"))]
)
def test_forward_in_chunks_on_four(family: str) -> None:
    check_that_they_meet({rank: update(family, CUDA, 4, rank, chunks=True) for rank in range(4)})


@pytest.mark.parametrize(
    "family",
    ["qwen2_5_vl"]
    + [pytest.param(n, marks=pytest.mark.matrix) for n in ("qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")],
)
def test_backward_of_an_update(family: str) -> None:
    check_that_they_meet({rank: update(family, CPU, 2, rank) for rank in range(2)})


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("qwen3_5", marks=pytest.mark.matrix)])
def test_backward_in_chunks_on_four(family: str) -> None:
    check_that_they_meet({rank: update(family, CPU, 4, rank, chunks=True) for rank in (0, 1)})


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("qwen3_5", marks=pytest.mark.matrix)])
def test_adapters(family: str) -> None:
    pytest.importorskip("peft")
    settings = {"train": ("language",), "lora": LoraSettings()}
    check_that_they_meet({rank: update(family, CPU, 2, rank, **settings) for rank in range(2)})
    update(family, CUDA, 2, 1, **settings)


def test_a_wait_in_a_pass_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows asked of the device, as they once were."""
    media = StreamShare.media

    def asks(self: StreamShare, media_rows: Any, features: torch.Tensor) -> Any:
        features.cpu()
        return media(self, media_rows, features)

    monkeypatch.setattr(StreamShare, "media", asks)
    with pytest.raises(FaultOnDevice, match="from the device to the host"):
        update("qwen2_5_vl", CUDA, 2, 0)


def test_an_exchange_of_wrong_sizes_is_noticed() -> None:
    with ranks(2, 0) as sequence, faked():
        values = torch.empty(6, 4, dtype=torch.bfloat16, device=CUDA)
        with pytest.raises(FaultOnDevice, match="sizes"):
            sequence.send(values, [2, 2], [3, 3])
