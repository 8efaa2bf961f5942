"""An update of every family in bf16, with published heads and widths, on GPUs that are not there.

Forward on a fake "cuda": host synchronizations, tensors on the wrong device and wrong dtypes raise. Forward and
backward on a fake "cpu" with the CUDA kernel: gradients of every trained weight. With several sequence ranks
collectives go to torch's process group that sends nothing; two ranks must make the same collectives in one order, of
matching sizes.

"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.fakes import (
    CPU,
    CUDA,
    FaultOnDevice,
    as_fake,
    fake_policy,
    faked,
    features_of,
    groups_of,
    real_policy,
)
from tests.support.tiny import FAMILY_NAMES, VL_FAMILY_NAMES
from vlm_pg.attention.kernels.torch_kernels import CudaFlashKernel
from vlm_pg.attention.tree import SegmentCall
from vlm_pg.distributed import SequenceGroup
from vlm_pg.models.contexts import TreeContext
from vlm_pg.models.micro_batches import Streams, run_micro_batch, share_streams
from vlm_pg.models.packing import pack, pack_chunk, pack_prefixes
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import LoraSettings, Part
from vlm_pg.models.stream_share import StreamShare

ALL: tuple[Part, ...] = ("language", "tower", "merger")
CHUNKS = ([(0, 1), (0,), (), (1,)], [(2,), (), (0, 1), (0,)])


def parts_of(family: str) -> tuple[Part, ...]:
    return ALL if real_policy(family).family.reads_media else ("language",)


def packed(family: str, chunks: bool) -> Streams:
    """On the host, where lengths and rows are known."""
    groups = groups_of(family)
    if not chunks:
        return Streams((pack(groups, CPU),))
    prefixes = pack_prefixes(groups, CPU)
    return Streams(tuple(pack_chunk(prefixes, groups, chosen, CPU) for chosen in CHUNKS), prefixes)


def losses(policy: Policy, streams: Streams, device: torch.device, entropy_graph: bool = False) -> list[torch.Tensor]:
    """Loss of each pass; behind a fake CPU with its backward."""
    features = features_of(policy, groups_of(policy.family.model_type), device)
    return backward_of(policy, streams, features, device, entropy_graph)


def backward_of(
    policy: Policy, streams: Streams, features: torch.Tensor | None, device: torch.device, entropy_graph: bool = False
) -> list[torch.Tensor]:
    on_device = Streams(
        tuple(as_fake(batch, device) for batch in streams.passes),
        None if streams.prefixes is None else as_fake(streams.prefixes, device),
    )
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


def families(names: Sequence[str], *usual: str) -> pytest.MarkDecorator:
    """Of each kind of layer and tower one is in the usual run."""
    params = [pytest.param(name, marks=() if name in usual else pytest.mark.matrix) for name in names]
    return pytest.mark.parametrize("family", params)


@families(FAMILY_NAMES, "qwen2_5_vl", "qwen3_vl_moe", "qwen3_5")
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
    ids=["plain", "MLPs in tiles", "tower in pieces"],
)
@families(["qwen2_5_vl", "qwen3_vl"], "qwen3_vl")
def test_forward_with_what_saves_memory(family: str, settings: dict[str, Any]) -> None:
    streams = packed(family, chunks=False)
    with faked():
        policy = fake_policy(family, CUDA, train=ALL, **settings)
        policy.logits_chunk_rows = 50  # of 208
        losses(policy, streams, CUDA, entropy_graph=True)


@families(VL_FAMILY_NAMES, "qwen3_5")
def test_forward_in_chunks(family: str) -> None:
    streams = packed(family, chunks=True)
    with faked():
        losses(fake_policy(family, CUDA, train=ALL, gradient_checkpointing=True), streams, CUDA)


@families(VL_FAMILY_NAMES[:5], "qwen2_5_vl", "qwen3_vl_moe")
def test_backward_of_an_update(family: str) -> None:
    streams = packed(family, chunks=False)
    with faked() as strict:
        policy = fake_policy(family, CPU, train=ALL, gradient_checkpointing=True)
        losses(policy, streams, CPU)
        check_gradients(policy, ALL)
    assert "_flash_attention_backward" in strict.seen


@pytest.mark.parametrize("parts", [("language",), ("merger",), ("tower", "merger")], ids="+".join)
@families(["qwen2_5_vl", "qwen3_vl"], "qwen3_vl")
def test_backward_where_parts_are_frozen(family: str, parts: tuple[Part, ...]) -> None:
    streams = packed(family, chunks=False)
    with faked():
        policy = fake_policy(family, CPU, train=parts, gradient_checkpointing=True)
        losses(policy, streams, CPU, entropy_graph=True)
        check_gradients(policy, parts)


@families(["qwen2_5_vl", "qwen3_5"], "qwen2_5_vl")
def test_backward_in_chunks(family: str) -> None:
    streams = packed(family, chunks=True)
    with faked():
        policy = fake_policy(family, CPU, train=ALL, gradient_checkpointing=True)
        found = losses(policy, streams, CPU)
        assert len(found) == len(CHUNKS) + 1
        check_gradients(policy, ALL)


@pytest.mark.parametrize("device", [CUDA, CPU], ids=str)
@families(["qwen2_5_vl", "qwen3_5"], "qwen2_5_vl")
def test_adapters(family: str, device: torch.device) -> None:
    pytest.importorskip("peft")
    streams = packed(family, chunks=False)
    with faked():
        policy = fake_policy(family, device, train=("language",), lora=LoraSettings(), gradient_checkpointing=True)
        losses(policy, streams, device)
        if device == CPU:
            check_gradients(policy, ("language",))


@contextmanager
def ranks(size: int, rank: int) -> Iterator[SequenceGroup]:
    """Inside, this process is one of so many."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield SequenceGroup(size, rank)
    finally:
        dist.destroy_process_group()


def encoded_by_ranks(policy: Policy, device: torch.device, sequence: SequenceGroup) -> torch.Tensor | None:
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
            backward_of(policy, streams, encoded_by_ranks(policy, device, sequence), device)
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


@families(FAMILY_NAMES, "qwen2_5_vl", "qwen3_5")
def test_forward_of_an_update_on_ranks(family: str) -> None:
    check_that_they_meet({rank: update(family, CUDA, 2, rank) for rank in range(2)})


@pytest.mark.matrix
@families(["qwen3_vl", "qwen2_5_vl", "qwen3_5"], "qwen3_vl")
def test_forward_in_chunks_on_four(family: str) -> None:
    check_that_they_meet({rank: update(family, CUDA, 4, rank, chunks=True) for rank in range(4)})


@families(VL_FAMILY_NAMES[:5], "qwen2_5_vl")
def test_backward_of_an_update_on_ranks(family: str) -> None:
    check_that_they_meet({rank: update(family, CPU, 2, rank) for rank in range(2)})


@families(["qwen2_5_vl", "qwen3_5"])
def test_backward_in_chunks_on_four(family: str) -> None:
    check_that_they_meet({rank: update(family, CPU, 4, rank, chunks=True) for rank in (0, 1)})


@families(["qwen2_5_vl", "qwen3_5"])
def test_adapters_on_ranks(family: str) -> None:
    pytest.importorskip("peft")
    settings = {"train": ("language",), "lora": LoraSettings()}
    check_that_they_meet({rank: update(family, CPU, 2, rank, **settings) for rank in range(2)})
    update(family, CUDA, 2, 1, **settings)


def test_a_wait_in_a_pass_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows read from the device."""
    media = StreamShare.media

    def reads(self: StreamShare, media_rows: Any, features: torch.Tensor) -> Any:
        features.cpu()
        return media(self, media_rows, features)

    monkeypatch.setattr(StreamShare, "media", reads)
    with pytest.raises(FaultOnDevice, match="from the device to the host"):
        update("qwen2_5_vl", CUDA, 2, 0)


def test_an_exchange_of_wrong_sizes_is_noticed() -> None:
    with ranks(2, 0) as sequence, faked():
        values = torch.empty(6, 4, dtype=torch.bfloat16, device=CUDA)
        with pytest.raises(FaultOnDevice, match="sizes"):
            sequence.send(values, [2, 2], [3, 3])


FAMILY = "qwen2"


def left_on_the_host(x: torch.Tensor) -> torch.Tensor:
    return x + torch.zeros(x.shape[-1], dtype=x.dtype)


def sent_and_waited_for(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor([1.0] * x.shape[-1], dtype=x.dtype, device=x.device)


def fetched(x: torch.Tensor) -> torch.Tensor:
    return x + x.float().mean().cpu().to(x.dtype)


def widened(x: torch.Tensor) -> torch.Tensor:
    return (x[:, 0].float() @ torch.ones(x.shape[-1], x.shape[-1], dtype=x.dtype, device=x.device))[:, None] + x


def one_value(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


FAULTS: dict[Callable[[torch.Tensor], torch.Tensor], Any] = {
    left_on_the_host: (FaultOnDevice, "left on the host"),
    sent_and_waited_for: (FaultOnDevice, "blocking copy from the host"),
    fetched: (FaultOnDevice, "from the device to the host"),
    widened: (FaultOnDevice, "one dtype only"),
    one_value: (DataDependentOutputException, "_local_scalar_dense"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_in_a_layer_is_noticed(fault: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    attend = TreeContext.attend

    def spoiled(self: TreeContext, layer_index: int, q: torch.Tensor, *rest: Any) -> torch.Tensor:
        return attend(self, layer_index, fault(q), *rest)

    batch = pack(groups_of(FAMILY), CPU)
    expected, words = FAULTS[fault]
    with faked():
        policy = fake_policy(FAMILY, CUDA)
        monkeypatch.setattr(TreeContext, "attend", spoiled)
        with pytest.raises(expected, match=words):
            policy(Policy.stream_logprobs, as_fake(batch, CUDA), None)


def test_a_fault_in_backward_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of another dtype than what the operator was given."""
    backward = CudaFlashKernel.segments_backward

    def spoiled(self: CudaFlashKernel, grad_out: torch.Tensor, *rest: Any) -> Any:
        return backward(self, grad_out.float(), *rest)

    monkeypatch.setattr(CudaFlashKernel, "segments_backward", spoiled)
    batch = pack(groups_of(FAMILY), CPU)
    with faked():
        logprobs, _ = fake_policy(FAMILY, CPU)(Policy.stream_logprobs, as_fake(batch, CPU), None)
        with pytest.raises(FaultOnDevice, match="one dtype only"):
            logprobs.sum().backward()


def test_a_policy_that_was_left_on_the_host_is_noticed() -> None:
    batch = pack(groups_of(FAMILY), CPU)
    with faked():
        policy = fake_policy(FAMILY, CUDA)
        norm = policy.language_model.norm
        norm.weight = torch.nn.Parameter(torch.empty(norm.weight.shape, dtype=torch.bfloat16))
        with pytest.raises(FaultOnDevice, match="left on the host"):
            policy(Policy.stream_logprobs, as_fake(batch, CUDA), None)


def test_lengths_are_sent_once_and_nobody_waits() -> None:
    """The first layer of a pass sends them; inside a captured step there must be none to send."""
    call = SegmentCall((0, 5), (0, 5), (2, 3), (2, 3), causal=True)
    with faked() as strict:
        call.cu_seqlens(CUDA)
        strict.captured = True
        call.cu_seqlens(CUDA)
        with pytest.raises(FaultOnDevice, match="which a CUDA graph cannot hold"):
            SegmentCall((0, 5), (0, 5), (5,), (5,), causal=True).cu_seqlens(CUDA)
