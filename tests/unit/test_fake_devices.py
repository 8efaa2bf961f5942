"""Passes with a fault in them: what ``tests/support/fakes.py`` guards against is noticed where it happens.

Each fault is one that a CPU does not mind, put into a pass of a model that is otherwise right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from tests.support.fakes import CPU, CUDA, FaultOnDevice, as_fake, fake_policy, faked, groups_of
from vlm_pg.attention.kernels.torch_kernels import CudaFlashKernel
from vlm_pg.attention.tree import SegmentCall
from vlm_pg.models.contexts import TreeContext
from vlm_pg.models.packing import pack
from vlm_pg.models.policy import Policy

FAMILY = "qwen2"


def left_on_the_host(x: torch.Tensor) -> torch.Tensor:
    return x + torch.zeros(x.shape[-1], dtype=x.dtype)


def indexed_from_the_host(x: torch.Tensor) -> torch.Tensor:
    return x[torch.arange(len(x))]


def sent_and_waited_for(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor([1.0] * x.shape[-1], dtype=x.dtype, device=x.device)


def fetched(x: torch.Tensor) -> torch.Tensor:
    return x + x.float().mean().cpu().to(x.dtype)


def widened(x: torch.Tensor) -> torch.Tensor:
    return (x[:, 0].float() @ torch.ones(x.shape[-1], x.shape[-1], dtype=x.dtype, device=x.device))[:, None] + x


def one_value(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def decided(x: torch.Tensor) -> torch.Tensor:
    return x if bool(x.any()) else x + 1


def listed(x: torch.Tensor) -> torch.Tensor:
    return x * x[0, 0].tolist()[0]


def chosen(x: torch.Tensor) -> torch.Tensor:
    return x + x[x[:, 0, 0] > 0].sum()


def counted(x: torch.Tensor) -> torch.Tensor:
    return x + x.nonzero().shape[0]


FAULTS: dict[Callable[[torch.Tensor], torch.Tensor], Any] = {
    left_on_the_host: (FaultOnDevice, "left on the host"),
    indexed_from_the_host: (FaultOnDevice, "left on the host"),
    sent_and_waited_for: (FaultOnDevice, "blocking copy from the host"),
    fetched: (FaultOnDevice, "from the device to the host"),
    widened: (FaultOnDevice, "one dtype only"),
    one_value: (DataDependentOutputException, "_local_scalar_dense"),
    decided: (DataDependentOutputException, "_local_scalar_dense"),
    listed: (DataDependentOutputException, "_local_scalar_dense"),
    chosen: (DynamicOutputShapeException, "nonzero"),
    counted: (DynamicOutputShapeException, "nonzero"),
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
