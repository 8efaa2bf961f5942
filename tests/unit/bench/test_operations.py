"""What one operation costs, against sizes worked out by hand: fp32 is 4 bytes, bf16 2, int64 8, a mask 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from scripts.bench.counting import Counts, count, fake_mode

pytestmark = pytest.mark.usefixtures("thawed")


def counted(run: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Counts:
    """Of ``run`` on fake tensors of these shapes."""
    fakes = fake_mode()
    with fakes:
        operands = [torch.empty(shape, dtype=dtype) for shape in shapes]
    return count(lambda: run(*operands), fakes)


ROWS = torch.tensor([3, 1])

# Name, what runs, shapes, bytes, kernels.
BYTES: list[tuple[str, Callable[..., Any], list[tuple[int, ...]], int, int]] = [
    ("views", lambda x: x.view(6, 4)[1:3].t().unsqueeze(0).expand(5, 4, 2), [(4, 6)], 0, 0),
    ("memory that is reserved", lambda x: torch.empty_like(x), [(4, 6)], 0, 0),
    ("two read, one written", lambda x, y: x * y, [(4, 6), (4, 6)], 3 * 96, 1),
    ("a row for all rows is read once", lambda x, y: x + y.expand(4, 6), [(4, 6), (6,)], 2 * 96 + 24, 1),
    ("a cast", lambda x: x.to(torch.bfloat16), [(4, 6)], 96 + 48, 1),
    ("a copy writes and reads its source", lambda x, y: x.copy_(y), [(4, 6), (4, 6)], 2 * 96, 1),
    ("a fill writes", lambda x: x.zero_(), [(4, 6)], 96, 1),
    ("joined", lambda x, y: torch.cat([x, y]), [(4, 6), (2, 6)], 2 * (96 + 48), 1),
    ("a sum", lambda x: x.sum(0), [(4, 6)], 96 + 24, 1),
    ("two results", lambda x: x.max(0), [(4, 6)], 96 + 24 + 48, 1),
    # Two of four rows are read and written, and their two numbers read.
    ("rows that are picked", lambda x: x[ROWS], [(4, 6)], 2 * 48 + 16, 1),
    ("rows of an embedding", lambda x: F.embedding(ROWS, x), [(4, 6)], 2 * 48 + 16, 1),
    ("one of each row", lambda x: x.gather(1, torch.zeros(4, 1, dtype=torch.int64)), [(4, 6)], 2 * 16 + 32 + 32, 2),
    ("rows that are put", lambda x, y: x.index_copy_(0, ROWS, y), [(4, 6), (2, 6)], 2 * 48 + 16, 1),
    ("rows that are added to", lambda x, y: x.index_add_(0, ROWS, y), [(4, 6), (2, 6)], 3 * 48 + 16, 1),
    ("elements that are added to", lambda x, y: x.index_put_((ROWS,), y, True), [(4, 6), (2, 6)], 3 * 48 + 16, 6),
    # Backward of a slice of 2 of 4 rows: zeros everywhere, then the slice.
    ("zeros around", lambda x: torch.ops.aten.slice_backward(x, [4, 6], 0, 0, 2, 1), [(2, 6)], 96 + 2 * 48, 2),
    ("many at once in place", lambda x, y: torch._foreach_mul_([x, y], 2.0), [(4, 6), (2, 6)], 2 * (96 + 48), 1),
    ("a softmax", lambda x: x.softmax(-1), [(4, 6)], 2 * 96, 1),
    # Top; its absolute, infinite or not, and zero where it is; difference, exponentials in place, sum, logarithm in
    # place, plus top in place. A column is 16 bytes, a column of bits 4.
    (
        "log-sum-exp",
        lambda x: x.logsumexp(-1),
        [(4, 6)],
        (96 + 16) + (32 + 20 + 36) + (96 + 16 + 96) + 192 + (96 + 16) + 32 + 48,
        9,
    ),
    ("nothing", lambda x: x[:0] + 1, [(4, 6)], 0, 0),
    ("sums of all before in rows", lambda x: x.cumsum(1), [(4, 6)], 2 * 96, 1),
    ("short rows in order", lambda x: x.sort(-1), [(4, 6)], 2 * 96 + 192, 3),
    ("filled where a mask is", lambda x: x.masked_fill(x > 0, 1.0), [(4, 6)], (96 + 24) + (96 + 24 + 96), 3),
]


@pytest.mark.parametrize("run,shapes,num_bytes,kernels", [case[1:] for case in BYTES], ids=[case[0] for case in BYTES])
def test_bytes_and_kernels(
    run: Callable[..., Any], shapes: list[tuple[int, ...]], num_bytes: int, kernels: int
) -> None:
    found = counted(run, *shapes)
    assert (found.bytes.total(), found.launches.total()) == (num_bytes, kernels)


def test_an_embeddings_gradient_is_zeros_and_rows() -> None:
    """[2, 6] gradients of [4, 6] weights: all of these written as zeros; those and two numbers read, and their rows of
    the weights' read and written."""
    found = counted(lambda x: torch.ops.aten.embedding_dense_backward(x, ROWS, 4, -1, False), (2, 6))
    assert found.bytes["other", "embedding_dense_backward"] == 96 + (48 + 16) + 2 * 48
    assert found.launches["embedding_dense_backward"] == 2


def test_tensors_of_two_dtypes_are_added_one_by_one() -> None:
    def run(x: torch.Tensor, y: torch.Tensor) -> None:
        torch._foreach_add_([x, x], [y.bfloat16()] * 2)

    assert counted(run, (4,), (4,)).launches["_foreach_add_"] == 2


def test_autocast_casts_are_counted() -> None:
    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ y

    found = counted(run, (4, 6), (6, 2))
    # Each operand read in fp32 and written in bf16; then the product of both in bf16.
    assert found.bytes["other", "_to_copy"] == (96 + 48) + (48 + 24)
    assert found.bytes["matmul", "mm"] == 48 + 24 + 16
    assert found.flops["matmul"] == 2 * 4 * 6 * 2


OPERATIONS: list[tuple[str, Callable[..., Any], list[tuple[int, ...]], int]] = [
    ("product", lambda x, y: x @ y, [(4, 6), (6, 2)], 2 * 4 * 6 * 2),
    ("with a bias", lambda x, w, b: F.linear(x, w, b), [(4, 6), (2, 6), (2,)], 2 * 4 * 6 * 2),
    ("with a vector", lambda x, y: x @ y, [(4, 6), (6,)], 2 * 4 * 6),
    # A tower's patches: 5 of 3 x 2 x 4 x 4 numbers, to 7.
    ("patches", lambda x, w: F.conv3d(x, w, stride=(2, 4, 4)), [(5, 3, 2, 4, 4), (7, 3, 2, 4, 4)], 5 * 2 * 96 * 7),
    # 8 channels each for itself, 4 wide, 10 tokens and 3 before them: 13 - 4 + 1 + 3 windows.
    ("each channel", lambda x, w: F.conv1d(x, w, padding=3, groups=8), [(1, 8, 10), (8, 1, 4)], 2 * 8 * 4 * 13),
    ("transposed", lambda x, w: F.conv_transpose1d(x, w), [(1, 2, 5), (2, 3, 4)], 2 * 5 * 2 * 3 * 4),
]


@pytest.mark.parametrize("run,shapes,flops", [case[1:] for case in OPERATIONS], ids=[case[0] for case in OPERATIONS])
def test_operations(run: Callable[..., Any], shapes: list[tuple[int, ...]], flops: int) -> None:
    assert counted(run, *shapes).flops.total() == flops


def test_backward_of_a_convolution_is_one_product_for_each_gradient() -> None:
    def run(x: torch.Tensor, weight: torch.Tensor) -> None:
        weight.requires_grad_()
        F.conv3d(x, weight, stride=(2, 4, 4)).sum().backward()
        x.requires_grad_()
        F.conv3d(x, weight, stride=(2, 4, 4)).sum().backward()

    one = 5 * 2 * 96 * 7
    assert counted(run, (5, 3, 2, 4, 4), (7, 3, 2, 4, 4)).flops["matmul"] == (1 + 1) * one + (1 + 2) * one


def test_products_of_experts() -> None:
    """7 rows of 16 in three groups through three experts of 16 x 32; and those weights' gradients."""
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)

    def forward(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._grouped_mm(x, weights, offs=ends)

    assert counted(forward, (7, 16), (3, 16, 32), dtype=torch.bfloat16).flops.total() == 2 * 7 * 16 * 32


# Lengths of queries and keys, causal, pairs: the last query sees the last key.
SEGMENTS = [
    ([3, 2], [3, 2], True, 6 + 3),
    ([2, 0], [5, 4], False, 10),
    ([2, 1], [5, 4], True, (4 + 5) + 4),
    ([3], [2], True, 1 + 2),
]


@pytest.mark.parametrize("queries,keys,causal,pairs", SEGMENTS)
def test_pairs_of_segments(queries: list[int], keys: list[int], causal: bool, pairs: int) -> None:
    """4 query heads over 2 key-value heads of 8: forward 2 products a pair, backward 5."""
    bounds = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (queries, keys)]
    most = max(queries), max(keys)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *bounds, *most, 0.0, causal, False)
        state = torch.empty(2, dtype=torch.uint64)
        rest = (*bounds, *most, 0.0, causal, state, state)
        torch.ops.aten._flash_attention_backward(out, q, k, v, out, lse, *rest)

    q, k = (sum(queries), 4, 8), (sum(keys), 2, 8)
    assert counted(run, q, k, k, dtype=torch.bfloat16).flops["attention"] == (2 + 5) * 2 * pairs * 4 * 8


def test_a_backward_of_flash_attention_has_sums_of_its_own() -> None:
    """5 queries of 4 heads, 7 keys of 2 heads, H = 8, bf16, two segments: three kernels, and sums for dk and dv."""
    bounds = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in ([3, 2], [4, 3])]
    state = torch.empty(2, dtype=torch.uint64)

    def run(q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor) -> Any:
        rest = (*bounds, 3, 4, 0.0, False, state, state)
        return torch.ops.aten._flash_attention_backward(q, q, k, k, q, lse, *rest)

    fakes = fake_mode()
    with fakes:
        q, k = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((5, 4, 8), (7, 2, 8)))
        lse = torch.empty(4, 5)
    found = count(lambda: run(q, k, lse), fakes)
    assert found.launches == Counter(_flash_attention_backward=3, sum=2)
    queries, keys, rows, wide = 5 * 4 * 8 * 2, 7 * 2 * 8 * 2, 4 * 5 * 4, 5 * 4 * 8 * 4
    sums = 2 * queries + rows + wide
    gradients = (2 * queries + 2 * keys) + 2 * rows + 2 * wide + 2 * (2 * keys)
    assert found.bytes["attention", "_flash_attention_backward"] == sums + gradients + (wide + queries)
    assert found.bytes["other", "sum"] == 2 * (2 * keys + keys)
    # In fp32 with 128 rows more for each segment; dk and dv by query head; and the gradients.
    held = [261 * 4 * 8 * 4, 261 * 4 * 4, 2 * keys, 2 * keys, queries, keys, keys]
    assert found.peak_bytes == sum(-(-size // 512) * 512 for size in held)
    # On a CPU attention is another operation, without any of it.
    assert count(lambda: run(q, k, lse), fakes, on_gpu=False).launches == Counter(_flash_attention_backward=3)


# Segments, keys of each; parts of keys. Blocks are segments x 2 heads that share keys; 264 run at a time, a part has
# 128 keys or more. 2 blocks x 4 parts leave most of a GPU idle either way, 8 x 32 fill it well, 256 need no parts.
DECODING = [(1, 512, 4), (4, 4096, 32), (128, 4096, 1)]


@pytest.mark.parametrize("segments,keys,parts", DECODING)
def test_decoding_cuts_keys_into_parts_that_fill_the_device(segments: int, keys: int, parts: int) -> None:
    """One query of 4 heads each, over 2 heads of keys: copies of queries there and back, and of the output back."""
    bounds = [torch.arange(segments + 1, dtype=torch.int32) * length for length in (1, keys)]

    def run(q: torch.Tensor, k: torch.Tensor) -> None:
        torch.ops.aten._flash_attention_forward(q, k, k, *bounds, 1, keys, 0.0, False, False)

    q, k = (segments, 4, 128), (segments * keys, 2, 128)
    found = counted(run, q, k, dtype=torch.bfloat16)
    assert found.launches["_flash_attention_forward"] == 1 + 3 + (parts > 1)
    queries = segments * 4 * 128 * 2
    partial = 2 * parts * 4 * (segments * 4 * 128 + segments * 4) if parts > 1 else 0
    least = 2 * queries + segments * 4 * 4 + 2 * segments * keys * 2 * 128 * 2
    assert 0 <= found.bytes.total() - (least + 6 * queries + partial) <= 64  # the state of a random generator


def test_pairs_of_keys_that_are_in_use() -> None:
    used = torch.tensor([3, 1], dtype=torch.int32)
    bounds = [torch.tensor(values, dtype=torch.int32) for values in ([0, 1, 2], [0, 5, 10])]

    def run(q: torch.Tensor, k: torch.Tensor) -> None:
        torch.ops.aten._flash_attention_forward(q, k, k, *bounds, 1, 5, 0.0, False, False, seqused_k=used)

    assert counted(run, (2, 4, 8), (10, 2, 8), dtype=torch.bfloat16).flops.total() == 4 * (3 + 1) * 4 * 8


@pytest.mark.parametrize("causal,pairs", [(False, 2 * 6), (True, 1 + 2)])
def test_pairs_of_a_rectangle(causal: bool, pairs: int) -> None:
    """On a CPU the first query sees the first key. Batch 3, 4 query heads, 2 queries, 6 keys of 8."""

    def run(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, k, is_causal=causal, enable_gqa=True)

    assert counted(run, (3, 4, 2, 8), (3, 2, 6, 8)).flops.total() == 4 * 3 * 4 * pairs * 8
