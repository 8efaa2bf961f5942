"""A policy's decode step on a GPU that is not there: fake tensors on "cuda", and a guard against what a graph refuses.

Shapes, dtypes and devices are checked as on a GPU; nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scripts.bench.counting import fake_mode
from vlm_pg.attention.kernels.torch_kernels import CudaFlashKernel
from vlm_pg.models.linear_attention import LinearStates
from vlm_pg.models.policy import Policy
from vlm_pg.rollout import graphs, ragged
from vlm_pg.rollout.fused.choice import FusedStep, fused_unchecked
from vlm_pg.rollout.kv import PrefixStore

CUDA = torch.device("cuda", 0)


class NothingWaits(TorchDispatchMode):
    """Raises AssertionError where the host would read from the device or write to it, as a capture does."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.operators.append(name)
        assert name not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::lift_fresh"), f"{name} waits"
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        away = {str(x.device) for x in tensors} - {str(CUDA)}
        assert not away, f"{name} has a tensor on {away}"
        return out


class GuardedMemory:
    """In place of ``GraphMemory``: ``work`` must be fit to be recorded, and makes the same operators each time."""

    operators: list[str]

    def __init__(self, *_: Any) -> None:
        pass

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        work()
        found = []
        for _ in range(2):
            with NothingWaits() as guard:
                work()
            found.append(guard.operators)
        assert found[0] == found[1]
        GuardedMemory.operators = found[0]
        return work


@contextmanager
def on_fake_cuda(policy: Policy, monkeypatch: pytest.MonkeyPatch, fused: bool = False) -> Iterator[None]:
    """Inside, the policy's weights are fake tensors on "cuda"; what would ask a driver is answered for Hopper.

    ``fused``: Triton's kernels stand for small operations of a step, as where they agree with torch's.
    """
    chosen = fused_unchecked if fused else lambda _: FusedStep("torch")
    monkeypatch.setattr(ragged, "fused_step", lambda policy, _: chosen(policy))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(ragged, "GraphMemory", GuardedMemory)
    monkeypatch.setattr(graphs, "LEAST_REPLAYS", 1)
    with fake_mode(allow_non_fake_inputs=False), torch.no_grad():
        for module in policy.model.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA)
                        held[name] = torch.nn.Parameter(fake, False) if held is module._parameters else fake
        monkeypatch.setattr(policy, "kernel", CudaFlashKernel())
        yield


def stored_prompts(policy: Policy, lengths: dict[int, int]) -> PrefixStore:
    """Nodes of so many tokens with keys, values and states as a prefill would leave them."""
    store, text = PrefixStore(), policy.model.config.get_text_config()
    store.rearrange((), lengths)
    _, heads, head_dim = policy.family.head_shape(policy.model.config)
    for layer, kind in enumerate(policy.family.layer_kinds(policy.model.config)):
        if kind == "linear_attention":
            keys = text.linear_num_key_heads * text.linear_key_head_dim
            values = text.linear_num_value_heads * text.linear_value_head_dim
            tail = torch.empty(
                1, text.linear_conv_kernel_dim - 1, 2 * keys + values, dtype=policy.dtype, device=policy.device
            )
            sizes = (text.linear_num_value_heads, text.linear_key_head_dim, text.linear_value_head_dim)
            for node in lengths:
                store.write_states(layer, node, LinearStates(tail, torch.empty(1, *sizes, device=policy.device)))
        else:
            for node, length in lengths.items():
                rows = torch.empty(length, heads, head_dim, dtype=policy.dtype, device=policy.device)
                store.write(layer, node, 0, rows, rows)
    return store


class Elsewhere:
    """A policy that says it is on another device."""

    def __init__(self, policy: Any, device: str):
        self._policy, self.device = policy, torch.device(device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)
