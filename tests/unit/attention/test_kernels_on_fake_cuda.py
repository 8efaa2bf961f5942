"""Each CUDA kernel's calls, forward and backward, against torch's own operators, with published head sizes.

The operators' schemas are torch's; shapes, dtypes and devices of what they give are checked, numbers are not.
Backward is called by itself: through autograd a fake GPU would be asked for a context.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.fakes import CUDA, FaultOnDevice, faked
from vlm_pg.attention.kernels import Kernel
from vlm_pg.attention.kernels.torch_kernels import CudaEfficientKernel, CudaFlashKernel
from vlm_pg.attention.tree import SegmentCall

# Query heads, key-value heads, head dim: Qwen2.5-VL-7B, Qwen3-VL-8B, Qwen3.5-9B, and the tests' own.
HEADS = [(28, 4, 128), (32, 8, 128), (16, 4, 256), (4, 2, 16)]
CALLS: dict[str, dict[str, Any]] = {
    "own nodes": {"query_lengths": (300, 20, 50), "key_lengths": (300, 20, 50), "causal": True},
    "behind prefixes": {"query_lengths": (70, 0), "key_lengths": (300, 40), "causal": False},
    "one query each": {"query_lengths": (1, 1), "key_lengths": (300, 40), "causal": False},
}
KERNELS = [(CudaFlashKernel(), torch.bfloat16), (CudaEfficientKernel(), torch.bfloat16)]
KERNELS += [(CudaFlashKernel(), torch.float16), (CudaEfficientKernel(), torch.float32)]


def call_of(name: str) -> SegmentCall:
    """Made anew: a call keeps what it has put on a device."""
    lengths = CALLS[name]
    return SegmentCall((0, sum(lengths["query_lengths"])), (0, sum(lengths["key_lengths"])), **lengths)


def made(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=CUDA)


def operands(call: SegmentCall, heads: tuple[int, int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    query_heads, kv_heads, dim = heads
    queries, keys = sum(call.query_lengths), sum(call.key_lengths)
    return [made(rows, n, dim, dtype=dtype) for rows, n in ((queries, query_heads), (keys, kv_heads), (keys, kv_heads))]


def check(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert (tuple(tensor.shape), tensor.dtype, tensor.device) == (shape, dtype, CUDA)


@pytest.mark.parametrize("kernel, dtype", KERNELS, ids=lambda x: getattr(x, "name", str(x).removeprefix("torch.")))
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_forward_and_backward(kernel: Kernel, dtype: torch.dtype, heads: tuple[int, int, int], name: str) -> None:
    (query_heads, kv_heads, dim), call = heads, call_of(name)
    queries, keys = sum(call.query_lengths), sum(call.key_lengths)
    with faked():
        q, k, v = operands(call, heads, dtype)
        out, lse = kernel.segments_forward(q, k, v, call, dim**-0.5)
        check(out, (queries, query_heads, dim), dtype)
        check(lse, (query_heads, queries), torch.float32)
        # Strides as ``grouped_attention`` gives them: rows cut from a longer log-sum-exp.
        whole = made(query_heads, queries + 9, dtype=torch.float32)
        grads = kernel.segments_backward(torch.empty_like(out), q, k, v, out, whole[:, :queries], call, dim**-0.5)
        check(grads[0], (queries, query_heads, dim), dtype)
        for grad in grads[1:]:
            check(grad, (keys, kv_heads, dim), dtype)


@pytest.mark.parametrize("kernel, dtype", KERNELS, ids=lambda x: getattr(x, "name", str(x).removeprefix("torch.")))
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_decoding(kernel: Kernel, dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    query_heads, kv_heads, dim = heads
    with faked() as strict:
        strict.captured = True
        k, v = (made(6, 192, kv_heads, dim, dtype=dtype) for _ in range(2))
        out, lse = kernel.dense_forward(made(6, 1, query_heads, dim, dtype=dtype), k, v, dim**-0.5)
        check(out, (6, 1, query_heads, dim), dtype)
        check(lse, (6, query_heads, 1), torch.float32)
        lengths = made(6, dtype=torch.int32)
        out, lse = kernel.ragged_forward(made(6, query_heads, dim, dtype=dtype), k, v, lengths, dim**-0.5)
        check(out, (6, query_heads, dim), dtype)
        check(lse, (query_heads, 6), torch.float32)


@pytest.mark.parametrize("kernel", [CudaFlashKernel(), CudaEfficientKernel()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("spoiled, wrong", [("dtype", torch.float32), ("device", "cpu")])
def test_an_operand_of_another_dtype_or_device_is_noticed(kernel: Kernel, spoiled: str, wrong: Any) -> None:
    call = call_of("own nodes")
    with faked():
        q, k, v = operands(call, (28, 4, 128), torch.bfloat16)
        out, lse = kernel.segments_forward(q, k, v, call, 1.0)
        v = torch.empty(v.shape, **{"dtype": v.dtype, "device": CUDA, spoiled: wrong})
        with pytest.raises(FaultOnDevice, match=r"one dtype only|left on the host"):
            kernel.segments_forward(q, k, v, call, 1.0)
        with pytest.raises(FaultOnDevice, match=r"one dtype only|left on the host"):
            kernel.segments_backward(out, q, k, v, out, lse, call, 1.0)


OPERATORS = ("_flash_attention_forward", "_flash_attention_backward")
OPERATORS += ("_efficient_attention_forward", "_efficient_attention_backward")


def calls_of(operator: str) -> Any:
    """What runs the operator."""
    kernel: Kernel = CudaFlashKernel() if "flash" in operator else CudaEfficientKernel()
    call = call_of("own nodes")
    q, k, v = operands(call, (28, 4, 128), torch.bfloat16)
    if operator.endswith("forward"):
        return lambda: kernel.segments_forward(q, k, v, call, 1.0)
    lse = made(28, len(q), dtype=torch.float32)
    return lambda: kernel.segments_backward(q, q, k, v, q, lse, call, 1.0)


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_schema_that_has_changed_is_noticed(monkeypatch: pytest.MonkeyPatch, operator: str) -> None:
    """As a torch release would change it: one more argument that must be given, before those with defaults."""
    schema = str(getattr(torch.ops.aten, operator).default._schema).removeprefix("aten::")
    name, _, rest = schema.partition("(")
    library = torch.library.Library(f"vlm_pg_changed{operator}", "DEF")
    try:
        library.define(f"{name}(Tensor something_new, {rest}")
        with faked():
            run = calls_of(operator)
            run()
            changed = getattr(getattr(torch.ops, f"vlm_pg_changed{operator}"), operator)
            monkeypatch.setattr(torch.ops.aten, operator, changed)
            with pytest.raises(RuntimeError, match=r"something_new|expected|argument"):
                run()
    finally:
        library._destroy()
