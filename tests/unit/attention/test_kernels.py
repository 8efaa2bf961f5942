"""Every kernel's wiring: with exact arithmetic behind it, grouped attention equals plain softmax to the last digits.

Packages and CUDA operators are replaced by stand-ins with the same argument lists; tests/gpu checks the real ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings

from tests.numerics.test_attention import differences, trees
from tests.support import flash_fakes as fakes
from tests.support.fakes import CUDA as FAKE_CUDA
from tests.support.fakes import faked
from vlm_pg.attention import PrefixTree
from vlm_pg.attention.grouped import forward_with_lse, grouped_attention, merge_
from vlm_pg.attention.kernels import KERNELS as REGISTERED
from vlm_pg.attention.kernels import Kernel, available, flash_packages, select_kernel
from vlm_pg.attention.kernels.flash_packages import EntryPointError, Flash2Kernel, Flash3Kernel, Flash4Kernel
from vlm_pg.attention.kernels.oracle import OracleKernel, oracle_attention
from vlm_pg.attention.kernels.torch_kernels import CpuFlashKernel, CudaEfficientKernel, CudaFlashKernel, _padded_rows
from vlm_pg.attention.plan import Reads, full_plan, reading_plan
from vlm_pg.attention.selfcheck import check_kernel
from vlm_pg.attention.tree import SegmentCall
from vlm_pg.errors import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# Nodes without children; a response of one token beside a group without any; more rows than a block of 32.
HARD_TREES = [
    PrefixTree([7, 3, 5, 1, 4, 2], [-1, -1, 0, 0, 1, 2]),
    PrefixTree([5, 4, 1], [-1, -1, 0]),
    PrefixTree([40, 33, 2, 35], [-1, -1, 0, 1]),
]
KERNELS = {
    "flash-attn-2": (Flash2Kernel, fakes.flash_attn_2),
    "flash-attn-3 of early 2025": (Flash3Kernel, fakes.flash_attn_3_positional),
    "flash-attn-3": (Flash3Kernel, fakes.flash_attn_3),
    "flash-attn-4": (Flash4Kernel, fakes.flash_attn_4),
    "cuda-flash": (CudaFlashKernel, None),
    "cuda-efficient": (CudaEfficientKernel, None),
    "cpu-flash": (CpuFlashKernel, None),
}


@pytest.fixture(autouse=True)
def forget_packages() -> Iterator[None]:
    flash_packages._entry_point_fault.cache_clear()
    yield
    flash_packages._entry_point_fault.cache_clear()


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    kernel_type, package = KERNELS[request.param]
    if package is not None:
        fakes.install(monkeypatch, package())
    with fakes.torch_cuda_operators_on_cpu():
        yield kernel_type()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(HARD_TREES[0])
@example(HARD_TREES[1])
@example(HARD_TREES[2])
@given(trees())
def test_output_and_gradients_equal_plain_softmax(kernel: Kernel, tree: PrefixTree) -> None:
    for name, error in differences(tree, torch.float64, kernel).items():
        assert error < 1e-11, f"{name} is off by {error:.1e} on lengths={tree.lengths} parents={tree.parents}"


@pytest.mark.parametrize("reads", [None, ("last", "none", "all", "all", "last")], ids=["all rows", "some rows"])
def test_tensors_in_transformers_layout(kernel: Kernel, reads: Sequence[Reads] | None) -> None:
    """Views of [N, T, H], which is how a layer's queries arrive; in the last layer only some rows have queries."""
    tree = PrefixTree([9, 6, 4, 1, 3], [-1, -1, 0, 0, 1])
    plan = full_plan(tree) if reads is None else reading_plan(tree, reads)
    q, k, v, upstream = (
        torch.randn(heads, rows, 8, dtype=torch.float64).transpose(0, 1)
        for heads, rows in ((4, plan.num_queries), (2, plan.num_keys), (2, plan.num_keys), (4, plan.num_queries))
    )
    results = []
    for attend in (functools.partial(grouped_attention, kernel=kernel), oracle_attention):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, plan)
        results.append((out, *torch.autograd.grad(out, leaves, upstream)))
    for got, expected in zip(*results, strict=True):
        assert torch.allclose(got, expected, atol=1e-11)


def test_dropping_the_merged_log_sum_exp_is_caught(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call differentiated with its own output and log-sum-exp: forward right, dq and dk wrong."""
    original = type(kernel).segments_backward

    def own_only(self, grad_out, q, k, v, out, lse, call, scale):  # type: ignore[no-untyped-def]
        own_out, own_lse = self.segments_forward(q, k, v, call, scale)
        share = (own_lse - lse).exp().transpose(0, 1).unsqueeze(-1)
        return original(self, grad_out * share, q, k, v, own_out, own_lse, call, scale)

    monkeypatch.setattr(type(kernel), "segments_backward", own_only)
    errors = differences(PrefixTree.from_groups([(12, [5, 3]), (7, [4])]), torch.float64, kernel)
    assert errors["out"] < 1e-11 and errors["dq"] > 0.05 and errors["dk"] > 0.01
    with pytest.raises(RuntimeError, match="differs from the plain softmax"):
        check_kernel(kernel, CPU, torch.float64, 4, 2, 8)


def test_dense_forward_equals_plain_softmax(kernel: Kernel) -> None:
    q, k, v = (torch.randn(3, length, heads, 8, dtype=torch.float64) for length, heads in ((1, 4), (9, 2), (9, 2)))
    got, expected = (x.dense_forward(q, k, v, 0.3) for x in (kernel, OracleKernel()))
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_ragged_forward_equals_plain_softmax_over_each_row_alone(kernel: Kernel, kv_heads: int) -> None:
    lengths = torch.tensor([1, 9, 40, 33, 7], dtype=torch.int32)
    q = torch.randn(5, 4, 8, dtype=torch.float64)
    k, v = (torch.randn(5, 40, kv_heads, 8, dtype=torch.float64) for _ in range(2))
    for row, length in enumerate(lengths.tolist()):
        k[row, length:], v[row, length:] = 50.0, 1e6  # would be seen
    for each in (kernel, OracleKernel()):
        out, lse = each.ragged_forward(q, k, v, lengths, 0.3)
        assert out.shape == q.shape and lse.shape == (4, 5)
        for row, length in enumerate(lengths.tolist()):
            keys, values = (x[row, :length].repeat_interleave(4 // kv_heads, dim=1) for x in (k, v))
            scores = torch.einsum("nh,knh->nk", q[row], keys) * 0.3
            assert torch.allclose(lse[:, row], scores.logsumexp(-1), atol=1e-12)
            assert torch.allclose(out[row], torch.einsum("nk,knh->nh", scores.softmax(-1), values), atol=1e-12)


def test_a_wrong_self_check_result_is_an_error_even_if_it_is_not_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    original = CpuFlashKernel.segments_backward

    def broken(self, *args):  # type: ignore[no-untyped-def]
        grad_q, grad_k, grad_v = original(self, *args)
        return grad_q, grad_k, grad_v * torch.nan

    monkeypatch.setattr(CpuFlashKernel, "segments_backward", broken)
    with pytest.raises(RuntimeError, match=r"'cpu-flash' differs from the plain softmax by nan .* Choose another"):
        check_kernel(CpuFlashKernel(), CPU, torch.float32, 4, 2, 8)


@pytest.mark.parametrize("method", ["dense_forward", "ragged_forward"])
@pytest.mark.parametrize("broken", [0, 1], ids=["output", "log-sum-exp"])
def test_the_self_check_covers_decoding(monkeypatch: pytest.MonkeyPatch, broken: int, method: str) -> None:
    original = getattr(CpuFlashKernel, method)

    def scaled(self, *args):  # type: ignore[no-untyped-def]
        results = list(original(self, *args))
        results[broken] = results[broken] * 1.01
        return tuple(results)

    monkeypatch.setattr(CpuFlashKernel, method, scaled)
    with pytest.raises(RuntimeError, match="differs from the plain softmax by 1"):
        check_kernel(CpuFlashKernel(), CPU, torch.float32, 4, 2, 8)


@pytest.mark.parametrize("kernel_type", [Flash2Kernel, CudaFlashKernel])
def test_head_dims_that_flash_kernels_lack_are_refused(
    kernel_type: type[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.install(monkeypatch, fakes.flash_attn_2())
    q = torch.zeros(3, 2, 12)
    call = SegmentCall((0, 3), (0, 3), (3,), (3,), causal=True)
    with pytest.raises(ValueError, match="got head dim 12; it takes multiples of 8 up to 256"):
        kernel_type().segments_forward(q, q, q, call, 1.0)


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> dict[str, str | None]:
    """What would be available on such a GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    return available(CUDA, torch.bfloat16)


ALL_PACKAGES = (fakes.flash_attn_2, fakes.flash_attn_3, fakes.flash_attn_4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("installed", [(), (fakes.flash_attn_2, fakes.flash_attn_4), ALL_PACKAGES])
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (12, 0)])
def test_order_of_preference(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    installed: tuple[Callable[[], ModuleType], ...],
    dtype: torch.dtype,
) -> None:
    """FlashAttention-3 on Hopper, where it is installed; else torch's own. A beta is never chosen by itself."""
    fakes.install(monkeypatch, *(package() for package in installed))
    on_gpu(monkeypatch, capability)
    if capability < (8, 0) and dtype == torch.bfloat16:
        with pytest.raises(ConfigError, match=r"No attention kernel runs on cuda in torch.bfloat16"):
            select_kernel.__wrapped__(CUDA, dtype)
        return
    half = "flash-attn-3" if capability == (9, 0) and installed == ALL_PACKAGES else "cuda-flash"
    assert select_kernel.__wrapped__(CUDA, dtype).name == ("cuda-efficient" if dtype == torch.float32 else half)


def test_a_beta_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.install(monkeypatch, fakes.flash_attn_4())
    on_gpu(monkeypatch, (10, 0))
    assert isinstance(select_kernel.__wrapped__(CUDA, torch.bfloat16, "flash-attn-4"), Flash4Kernel)


def test_every_kernel_is_listed_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = on_gpu(monkeypatch, (8, 0))
    assert list(reasons) == list(REGISTERED)
    assert reasons["cuda-flash"] is None
    assert reasons["flash-attn-3"] == "it runs on compute capability 9.x, this GPU has 8.x"
    assert reasons["flash-attn-2"] == (
        "it does not import (flash_attn.flash_attn_interface: No module named 'flash_attn')"
    )
    on_cpu = available(CPU, torch.float32)
    assert [name for name, reason in on_cpu.items() if reason is None] == ["cpu-flash", "oracle"]


def without(module: ModuleType, name: str) -> ModuleType:
    delattr(module, name)
    return module


def renamed_argument() -> ModuleType:
    module = fakes.flash_attn_4()
    module._flash_attn_bwd = lambda q, k, v, out, dout, log_sum_exp, softmax_scale, causal, **_: None  # type: ignore[attr-defined]
    return module


def new_required_argument() -> ModuleType:
    module = fakes.flash_attn_4()
    original = module._flash_attn_fwd

    # fmt: off
    def _flash_attn_fwd(
        q, k, v, sink, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, return_lse,
    ):
        return original(q, k, v)
    # fmt: on

    module._flash_attn_fwd = _flash_attn_fwd  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize(
    "package, message",
    [
        (lambda: without(fakes.flash_attn_4(), "_flash_attn_bwd"), "has no _flash_attn_bwd"),
        (renamed_argument, r"another signature .*not found: .*lse"),
        (new_required_argument, r"another signature .*not known: sink"),
    ],
)
def test_an_unknown_version_says_what_differs(
    monkeypatch: pytest.MonkeyPatch, package: Callable[[], ModuleType], message: str
) -> None:
    fakes.install(monkeypatch, package())
    with pytest.raises(EntryPointError, match=message):
        Flash4Kernel()
    assert "_flash_attn" in str(on_gpu(monkeypatch, (10, 0))["flash-attn-4"])
    with pytest.raises(ValueError, match=r"'flash-attn-4' cannot run here: .*_flash_attn"):
        select_kernel.__wrapped__(CUDA, torch.bfloat16, "flash-attn-4")


def test_tensors_that_a_graph_reads_live_as_long_as_their_call() -> None:
    def call(length: int) -> SegmentCall:
        return SegmentCall((0, length), (0, length), (length,), (length,), causal=True)

    def tensors(of: SegmentCall) -> list[torch.Tensor]:
        cu_q, cu_k = of.cu_seqlens(CPU)
        return [cu_q, cu_k, _padded_rows(of.query_lengths[0], cu_q, of)]

    recorded = call(5)
    read = tensors(recorded)
    for length in range(1, 200):
        tensors(call(length))
    assert all(a is b for a, b in zip(read, tensors(recorded), strict=True))


# Query heads, key-value heads, head dim: Qwen2.5-VL-7B, Qwen3.5-9B, and the tests' own.
HEADS = [(28, 4, 128), (16, 4, 256), (4, 2, 16)]
CALLS: dict[str, dict[str, Any]] = {
    "own nodes": {"query_lengths": (300, 20, 50), "key_lengths": (300, 20, 50), "causal": True},
    "behind prefixes": {"query_lengths": (70, 0), "key_lengths": (300, 40), "causal": False},
    "one query each": {"query_lengths": (1, 1), "key_lengths": (300, 40), "causal": False},
}
CUDA_KERNELS = [(CudaFlashKernel(), torch.bfloat16), (CudaEfficientKernel(), torch.bfloat16)]
CUDA_KERNELS += [(CudaFlashKernel(), torch.float16), (CudaEfficientKernel(), torch.float32)]


def call_of(name: str) -> SegmentCall:
    """Made anew: a call keeps what it has put on a device."""
    lengths = CALLS[name]
    return SegmentCall((0, sum(lengths["query_lengths"])), (0, sum(lengths["key_lengths"])), **lengths)


def made(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=FAKE_CUDA)


def operands(call: SegmentCall, heads: tuple[int, int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    query_heads, kv_heads, dim = heads
    queries, keys = sum(call.query_lengths), sum(call.key_lengths)
    return [made(rows, n, dim, dtype=dtype) for rows, n in ((queries, query_heads), (keys, kv_heads), (keys, kv_heads))]


def check_fake(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert (tuple(tensor.shape), tensor.dtype, tensor.device) == (shape, dtype, FAKE_CUDA)


@pytest.mark.parametrize("kernel, dtype", CUDA_KERNELS, ids=lambda x: getattr(x, "name", str(x).removeprefix("torch.")))
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_forward_and_backward(kernel: Kernel, dtype: torch.dtype, heads: tuple[int, int, int], name: str) -> None:
    (query_heads, kv_heads, dim), call = heads, call_of(name)
    queries, keys = sum(call.query_lengths), sum(call.key_lengths)
    with faked():
        q, k, v = operands(call, heads, dtype)
        out, lse = kernel.segments_forward(q, k, v, call, dim**-0.5)
        check_fake(out, (queries, query_heads, dim), dtype)
        check_fake(lse, (query_heads, queries), torch.float32)
        # Strides as ``grouped_attention`` gives them: rows cut from a longer log-sum-exp.
        whole = made(query_heads, queries + 9, dtype=torch.float32)
        grads = kernel.segments_backward(torch.empty_like(out), q, k, v, out, whole[:, :queries], call, dim**-0.5)
        check_fake(grads[0], (queries, query_heads, dim), dtype)
        for grad in grads[1:]:
            check_fake(grad, (keys, kv_heads, dim), dtype)


@pytest.mark.parametrize("kernel, dtype", CUDA_KERNELS, ids=lambda x: getattr(x, "name", str(x).removeprefix("torch.")))
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_decoding(kernel: Kernel, dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    query_heads, kv_heads, dim = heads
    with faked() as strict:
        strict.captured = True
        k, v = (made(6, 192, kv_heads, dim, dtype=dtype) for _ in range(2))
        out, lse = kernel.dense_forward(made(6, 1, query_heads, dim, dtype=dtype), k, v, dim**-0.5)
        check_fake(out, (6, 1, query_heads, dim), dtype)
        check_fake(lse, (6, query_heads, 1), torch.float32)
        lengths = made(6, dtype=torch.int32)
        out, lse = kernel.ragged_forward(made(6, query_heads, dim, dtype=dtype), k, v, lengths, dim**-0.5)
        check_fake(out, (6, query_heads, dim), dtype)
        check_fake(lse, (query_heads, 6), torch.float32)


def test_three_levels_take_one_call_per_level_and_ancestor_level() -> None:
    video_question_responses = PrefixTree([6, 2, 3, 1, 1, 2], [-1, 0, 0, 1, 1, 2])
    calls = video_question_responses.ancestor_calls
    assert [(c.query_range, c.key_range) for c in calls] == [((6, 11), (0, 6)), ((11, 15), (0, 6)), ((11, 15), (6, 11))]
    assert calls[1].query_lengths == (4,)
    assert calls[2].query_lengths == (2, 2)


def test_an_ancestor_without_descendants_keeps_an_empty_segment() -> None:
    tree = PrefixTree([3, 2, 4], [-1, -1, 1])
    (cross,) = tree.ancestor_calls
    assert cross.query_lengths == (0, 4)
    first, second = cross.cu_seqlens(torch.device("cpu"))
    assert first.tolist() == [0, 0, 4] and second.tolist() == [0, 3, 5]


def test_mask_is_ancestors_plus_causal_self() -> None:
    mask = PrefixTree([2, 1, 2], [-1, 0, 0]).mask()
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]]
    assert mask.int().tolist() == expected


@pytest.mark.parametrize(
    "lengths, parents, message",
    [
        ([], [], "at least one node"),
        ([3, 2], [-1], "one parent per node"),
        ([3, 0], [-1, 0], "Node 1 has 0 tokens"),
        ([3, 2], [-1, 1], "Node 1 has parent 1"),
        ([3, 2, 2], [-1, 0, -1], "breadth first"),
        ([3, 3, 2, 2], [-1, -1, 1, 0], "breadth first"),
    ],
)
def test_other_layouts_are_refused(lengths: list[int], parents: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrefixTree(lengths, parents)


def test_two_results_are_merged_with_one_rounding() -> None:
    """Log-sum-exps ln 1 and ln 3: a quarter of the first and three quarters of the second, here exact in fp32."""
    out = torch.tensor([[[1.0, -2.0, 0.50390625]]], dtype=torch.bfloat16)
    other = torch.tensor([[[3.0, 2.0, 0.5]]], dtype=torch.bfloat16)
    lse = torch.zeros(1, 1)
    merge_(out, lse, other, torch.tensor([[math.log(3.0)]]))
    # 0.25 * 0.50390625 + 0.75 * 0.5 = 0.5009765625, whose neighbours in bf16 are 0.5 and 0.50390625.
    assert out.dtype == torch.bfloat16 and out.tolist() == [[[2.5, 1.0, 0.5]]]
    assert lse.item() == pytest.approx(math.log(4.0), rel=1e-6)


@pytest.mark.parametrize(
    "lengths, parents, merges_once, keys_read_once",
    [
        ([9, 4, 5], [-1, 0, 0], True, True),
        ([9, 7, 4, 5], [-1, -1, 0, 1], True, True),
        # Video, questions, responses: a response meets two levels, two levels meet the video.
        ([9, 4, 3, 2], [-1, 0, 1, 1], False, False),
    ],
)
def test_how_often_rows_meet(lengths: list[int], parents: list[int], merges_once: bool, keys_read_once: bool) -> None:
    plan = full_plan(PrefixTree(lengths, parents))
    assert (plan.merges_once, plan.keys_read_once) == (merges_once, keys_read_once)


def test_only_the_last_of_three_levels_has_queries() -> None:
    """Only responses have queries: each meets two levels, but no level is met twice."""
    plan = reading_plan(PrefixTree([9, 4, 3, 2], [-1, 0, 1, 1]), ["none", "none", "all", "all"])
    assert (plan.merges_once, plan.keys_read_once) == (False, True)


@pytest.mark.parametrize("levels, between", [(2, torch.bfloat16), (3, torch.float32), (4, torch.float32)])
def test_rows_of_several_levels_are_not_rounded_in_between(
    levels: int, between: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def noted(out: torch.Tensor, *others: torch.Tensor) -> None:
        found.append((out.dtype, len(out)))
        merge_(out, *others)

    monkeypatch.setattr("vlm_pg.attention.grouped.merge_", noted)
    tree = PrefixTree([6] * levels, list(range(-1, levels - 1)))
    q, k, v = (torch.randn(tree.num_tokens, heads, 8, dtype=torch.bfloat16) for heads in (4, 2, 2))
    out, _ = forward_with_lse(q, k, v, full_plan(tree), 0.3, OracleKernel())
    # One merge for each level above each level, of that level's rows only.
    assert found == [(between, 6)] * (levels * (levels - 1) // 2)
    wide, _ = forward_with_lse(q.double(), k.double(), v.double(), full_plan(tree), 0.3, OracleKernel())
    # Parts and result are rounded once each: half a unit of bf16's 8 bits, of values of at most that size.
    assert out.dtype == torch.bfloat16 and (out - wide).abs().max() < 2 * 2**-9 * v.abs().max()


def test_with_few_queries_gradients_of_parts_are_joined_and_none_added_to_zeros(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last layer: one query a prompt, all of responses; together they meet every key."""
    plan = reading_plan(PrefixTree([6, 9, 4, 5], [-1, -1, 0, 1]), ["last", "last", "all", "all"])
    generator = torch.Generator().manual_seed(0)
    rows = ((plan.num_queries, 4), (plan.num_keys, 2), (plan.num_keys, 2))
    q, k, v = (torch.randn(*shape, 8, generator=generator).requires_grad_() for shape in rows)
    upstream = torch.randn(plan.num_queries, 4, 8, generator=generator)
    want = torch.autograd.grad(grouped_attention(q, k, v, plan, kernel="oracle"), (q, k, v), upstream)

    def refused(*_: object) -> torch.Tensor:
        raise AssertionError("zeros were made for gradients that are written whole")

    monkeypatch.setattr(torch, "zeros", refused)
    out = grouped_attention(q, k, v, plan, kernel="cpu-flash")
    got = torch.autograd.grad(out, (q, k, v), upstream)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
