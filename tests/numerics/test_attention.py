"""Grouped attention equals a plain masked softmax: output and gradients, any tree, queries of all or some rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_pg.attention import PrefixTree, grouped_attention
from vlm_pg.attention import grouped as grouped_module
from vlm_pg.attention.grouped import AttentionMemo
from vlm_pg.attention.kernels import Kernel, select_kernel
from vlm_pg.attention.kernels.oracle import oracle_attention
from vlm_pg.attention.kernels.torch_kernels import CpuFlashKernel
from vlm_pg.attention.plan import Reads, full_plan, reading_plan

CPU = torch.device("cpu")


@st.composite
def trees(draw: st.DrawFn) -> PrefixTree:
    """Ragged forests of up to four levels, in stream order."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    parents = [-1] * len(lengths)
    level = list(range(len(lengths)))
    for _ in range(draw(st.integers(0, 3))):
        children = []
        for parent in level:
            for _ in range(draw(st.integers(0, 3))):
                children.append(len(lengths))
                lengths.append(draw(st.integers(1, 9)))
                parents.append(parent)
        if not children or len(lengths) > 40:
            break
        level = children
    return PrefixTree(lengths, parents)


def random_inputs(tree: PrefixTree, dtype: torch.dtype, heads: int = 4, kv_heads: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tree.num_tokens)
    return [
        (2 * torch.randn(tree.num_tokens, n, 8, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    ]


def differences(tree: PrefixTree, dtype: torch.dtype, kernel: Kernel | str) -> dict[str, float]:
    """Relative error of output and gradients in ``dtype`` against the oracle in float64.

    The gradient of a token that sees itself alone is zero, as the difference of two equal terms of the upstream
    gradient's size; so an error is never divided by less than that size.
    """
    inputs = random_inputs(tree, dtype)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    out, expected = grouped_attention(*inputs, tree, kernel=kernel), oracle_attention(*wide, tree)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = [out, *torch.autograd.grad(out, inputs, upstream.to(dtype))]
    want = [expected, *torch.autograd.grad(expected, wide, upstream)]
    return {
        name: ((a.double() - b).norm() / torch.maximum(b.norm(), upstream.norm())).item()
        for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True)
    }


@pytest.mark.parametrize("kernel", ["cpu-flash", "oracle"])
@settings(max_examples=150, deadline=None)
@given(tree=trees())
def test_kernels_of_this_machine_equal_the_oracle_on_random_trees(kernel: str, tree: PrefixTree) -> None:
    for name, error in differences(tree, torch.float32, kernel).items():
        assert error < 1e-5, f"{name} is off by {error:.1e} on lengths={tree.lengths} parents={tree.parents}"


@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
def test_other_precisions(dtype: torch.dtype, bound: float) -> None:
    tree = PrefixTree([11, 4, 5, 1, 6, 2], [-1, -1, 0, 0, 0, 1])
    assert max(differences(tree, dtype, "cpu-flash").values()) < bound


def test_prefix_keys_are_attended_to_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls for any number of groups and rollouts, and prefix keys enter each call once."""
    calls = []
    original = CpuFlashKernel.segments_forward

    def counting(self, q, k, v, call, scale):  # type: ignore[no-untyped-def]
        calls.append((call.causal, k.shape[0]))
        return original(self, q, k, v, call, scale)

    monkeypatch.setattr(CpuFlashKernel, "segments_forward", counting)
    tree = PrefixTree.from_groups([(30, [2] * 8), (20, [3] * 4)])
    q, k, v = (x.detach() for x in random_inputs(tree, torch.float32))
    grouped_module.forward_with_lse(q, k, v, full_plan(tree), 1.0, CpuFlashKernel())
    assert calls == [(True, tree.num_tokens), (False, 50)]


def test_extreme_scores_stay_finite() -> None:
    tree = PrefixTree([4, 3], [-1, 0])
    q, k, v = (x.detach().double() for x in random_inputs(tree, torch.float32))
    out = grouped_attention(q * 300, k * 300, v, tree)
    assert out.isfinite().all()
    assert torch.allclose(out, oracle_attention(q * 300, k * 300, v, tree))


@pytest.mark.parametrize(
    "shapes, message",
    [
        (((6, 4, 8), (6, 2, 8)), "whole packed stream"),
        (((7, 4, 8), (7, 3, 8)), "multiple of key-value heads"),
        (((7, 4), (7, 2, 8)), r"q \[tokens, heads, dim\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes: tuple, message: str) -> None:
    q, k = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        grouped_attention(q, k, k, PrefixTree([4, 3], [-1, 0]))


@pytest.mark.parametrize(
    "name, message",
    [("flash9", "Unknown attention kernel 'flash9'"), ("cuda-flash", "cannot run here: it runs on CUDA")],
)
def test_kernels_that_cannot_run_say_why(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_kernel(CPU, torch.float32, name)


@pytest.mark.parametrize("kernel", ["cpu-flash", "oracle"])
@settings(max_examples=40, deadline=None)
@given(tree=trees(), data=st.data())
def test_rows_with_queries_equal_the_same_rows_of_the_whole(kernel: str, tree: PrefixTree, data: st.DataObject) -> None:
    count = len(tree.lengths)
    kinds: st.SearchStrategy[Reads] = st.sampled_from(("all", "last", "none"))
    reads = data.draw(st.lists(kinds, min_size=count, max_size=count).filter(lambda chosen: set(chosen) != {"none"}))
    plan = reading_plan(tree, reads)
    assert plan.rows is not None
    rows, inputs = list(plan.rows), random_inputs(tree, torch.float64)
    q, k, v = inputs
    expected = oracle_attention(q, k, v, tree)[rows]
    out = grouped_attention(q[rows], k, v, plan, kernel=kernel)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours, theirs = ((x, *torch.autograd.grad(x, inputs, upstream)) for x in (out, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("reads", "words"),
    [(["all"], "one a node"), (["first", "all"], "Unknown reads"), (["none", "none"], "at least one")],
)
def test_unusable_reads_are_refused(reads: list[Reads], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        reading_plan(PrefixTree([2, 3], [-1, 0]), reads)


def test_a_recomputation_takes_the_result_from_the_memo(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = PrefixTree([5, 3, 4], [-1, 0, 0])
    q, k, v = (torch.randn(12, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    plain = grouped_attention(q, k, v, tree)
    expected = torch.autograd.grad(plain.square().sum(), (q, k, v))
    memo = AttentionMemo()
    first = grouped_attention(q, k, v, tree, memo=memo)
    monkeypatch.setattr("vlm_pg.attention.grouped.forward_with_lse", None)
    again = grouped_attention(q, k, v, tree, memo=memo)
    assert torch.equal(first, again)
    for a, b in zip(torch.autograd.grad(again.square().sum(), (q, k, v)), expected, strict=True):
        assert torch.equal(a, b)
