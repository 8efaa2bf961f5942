"""Every kernel's wiring: with exact arithmetic behind it, grouped attention equals plain softmax to the last digits.

Packages and CUDA operators are replaced by stand-ins with the same argument lists; tests/gpu checks the real ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings

from tests.numerics.test_attention import differences, trees
from tests.support import flash_fakes as fakes
from vlm_pg.attention import PrefixTree, grouped_attention
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


def test_log_sum_exp_is_heads_by_rows(kernel: Kernel) -> None:
    call = SegmentCall((0, 6), (0, 9), (2, 0, 4), (3, 5, 1), causal=False)
    q, k, v = (torch.randn(rows, heads, 8, dtype=torch.float64) for rows, heads in ((6, 4), (9, 2), (9, 2)))
    got, expected = (x.segments_forward(q, k, v, call, 1.0) for x in (kernel, OracleKernel()))
    assert got[1].shape == (4, 6)
    assert torch.allclose(got[1], expected[1]) and torch.allclose(got[0], expected[0])


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
