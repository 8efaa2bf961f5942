"""Attention in which only some rows ask: equal to those rows of the whole, values and gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vlm_pg.attention.grouped import AttentionMemo, grouped_attention
from vlm_pg.attention.kernels import available
from vlm_pg.attention.kernels.oracle import oracle_attention
from vlm_pg.attention.plan import Reads, reading_plan
from vlm_pg.attention.tree import PrefixTree

KERNELS = [name for name, reason in available(torch.device("cpu"), torch.float64).items() if reason is None]


def random_tree(rng: np.random.Generator) -> PrefixTree:
    """A forest of up to four levels, breadth first."""
    lengths, parents = [], []
    level = [-1] * int(rng.integers(1, 4))
    for _ in range(int(rng.integers(1, 5))):
        nodes = []
        for parent in level:
            nodes.append(len(lengths))
            lengths.append(int(rng.integers(1, 9)))
            parents.append(parent)
        level = [node for node in nodes for _ in range(int(rng.integers(0, 4)))]
        if not level:
            break
    return PrefixTree(lengths, parents)


def random_reads(tree: PrefixTree, rng: np.random.Generator) -> list[Reads]:
    reads: list[Reads] = [("all", "last", "none")[int(rng.integers(3))] for _ in tree.lengths]  # type: ignore[misc]
    reads[int(rng.integers(len(reads)))] = "all"
    return reads


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("seed", range(40))
def test_rows_that_ask_equal_the_same_rows_of_the_whole(seed: int, kernel: str) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng)
    plan = reading_plan(tree, random_reads(tree, rng))
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(tree.num_tokens, heads, 8, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (4, 2, 2)
    )
    assert plan.rows is not None
    rows = list(plan.rows)
    expected = oracle_attention(q, k, v, tree)[rows]
    out = grouped_attention(q[rows], k, v, plan, kernel=kernel)
    upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    for ours, theirs in zip(
        (out, *torch.autograd.grad(out, (q, k, v), upstream)),
        (expected, *torch.autograd.grad(expected, (q, k, v), upstream)),
        strict=True,
    ):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-10)


def test_what_is_read_of_each_node() -> None:
    tree = PrefixTree([3, 2, 2, 1], [-1, -1, 0, 1])
    assert reading_plan(tree, ["last", "none", "all", "all"]).rows == (2, 5, 6, 7)
    order = reading_plan(tree, ["last", "none", "all", "all"]).stream_order(torch.device("cpu"))
    assert torch.tensor([2, 5, 6, 7, 0, 1, 3, 4])[order].tolist() == list(range(8))


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
