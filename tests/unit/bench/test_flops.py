"""Counts of tokens, pairs and operations against miniatures counted by hand, and against published figures."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from vlm_pg.attention.tree import PrefixTree
from vlm_pg.bench.case import random_model
from vlm_pg.bench.flops import (
    activation_bytes,
    bounds,
    forward_flops,
    linear_attention_flops,
    pair_flops,
    parameter_count,
    step_flops,
    token_flops,
)
from vlm_pg.bench.shapes import PUBLISHED, SIZES, LanguageShape, LinearAttention
from vlm_pg.bench.work import Work, padded_work, repeated_work, sequential_work, shared_work, whole_logits_work

TINY = LanguageShape(hidden=8, layers=2, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocab=10)
SEVEN = PUBLISHED["Qwen2.5-VL-7B"]


def test_work_of_a_group_counted_by_hand() -> None:
    # Prefix of 3, responses of 3 and 2: their last tokens are never read, so 3 + 2 + 1 tokens.
    # Pairs: prefix 1+2+3; first response 2*3 + 1+2; second 1*3 + 1.
    assert shared_work(3, [3, 2]) == Work(6, 6 + 9 + 4, 5, 6, 5)
    # Repeated: sequences of 5 and 4 tokens, 15 + 10 pairs; padded, two of 5.
    assert repeated_work(3, [3, 2]) == Work(9, 25, 5, 9, 5)
    assert padded_work(3, [3, 2]) == Work(10, 30, 6, 10, 6)
    assert sequential_work(3, [3, 2]) == Work(9, 25, 5, 5, 3)
    # The README's way reads 3 + 3 + 2 tokens and makes logits of all of them.
    assert whole_logits_work(3, [3, 2]) == Work(8, 6 + (9 + 6) + (6 + 3), 8, 8, 8)


def test_shared_pairs_are_those_the_attention_mask_allows() -> None:
    tree = PrefixTree.from_groups([(7, [4, 2])])
    assert shared_work(7, [5, 3]).pairs == int(tree.mask().sum())


def test_operations_counted_by_hand() -> None:
    # A layer: queries 8x8, keys and values 8x4 each, output 8x8, MLP 3 x 8x16; two operations per weight.
    assert token_flops(TINY) == 2 * 2 * (64 + 32 + 32 + 64 + 384)
    # Score and weighted sum: 2 heads x 4 dims x 2 operations each, in 2 layers.
    assert pair_flops(TINY) == 2 * (2 * 2 * 4 * 2)
    work = Work(tokens=6, pairs=19, logit_rows=5, held_tokens=6, held_logit_rows=5)
    assert step_flops(TINY, work, False) == 3 * 6 * 2304 + 3.5 * 19 * 64 + 3 * 5 * 160
    assert step_flops(TINY, work, True) == 4 * 6 * 2304 + 4.5 * 19 * 64 + 3 * 5 * 160


def test_linear_attention_counted_by_hand() -> None:
    shape = LanguageShape(8, 4, 2, 1, 4, 16, 10, gated_query=True, linear=LinearAttention(3, 1, 2, 4, 4, 4))
    # Keys are 4 wide, values 8. In: q 4, k 4, v 8, gate 8, decay 2, step 2; out: 8 -> 8; convolution over 16 channels
    # of width 4; two states of 4 x 4.
    per_layer = 2 * 8 * (4 + 4 + 8 + 8 + 2 + 2) + 2 * 8 * 8 + 2 * 4 * 16 + 7 * 2 * 16
    assert linear_attention_flops(shape) == 3 * per_layer
    # Pairs meet only in the one full layer; its query projection is twice as wide.
    assert pair_flops(shape) == 2 * 2 * 4 * 2
    full = 2 * 8 * (2 * 8 + 2 * 4) + 2 * 8 * 8
    assert token_flops(shape) == 3 * per_layer + full + 4 * 2 * 3 * 8 * 16


def test_activation_memory_counted_by_hand() -> None:
    work = Work(tokens=6, pairs=19, logit_rows=5, held_tokens=6, held_logit_rows=5)
    per_layer = 8 * 8 + 2 * (8 + 2 * 4) + 8 + 4 * 16
    assert activation_bytes(TINY, work, False, 4) == 6 * 2 * per_layer * 4 + 5 * 10 * 8
    assert activation_bytes(TINY, work, True, 2, logit_rows=1) == 6 * (2 * 8 + per_layer) * 2 + 10 * 6


def test_parameters_are_those_of_the_model_that_is_built() -> None:
    model = random_model("small")
    counted = sum(p.numel() for p in model.model.language_model.parameters()) + model.lm_head.weight.numel()
    assert parameter_count(SIZES["small"]) == pytest.approx(counted, rel=0.002)  # norms and biases are left out


def test_a_built_model_has_the_shape_of_its_table() -> None:
    with torch.device("meta"):
        text = random_model("3b", device="meta").config.get_text_config()
    shape = SIZES["3b"]
    assert (text.hidden_size, text.num_hidden_layers, text.vocab_size) == (shape.hidden, shape.layers, shape.vocab)
    assert text.hidden_size // text.num_attention_heads == shape.head_dim
    assert text.tie_word_embeddings


@pytest.mark.parametrize(
    "name,billions",
    [("Qwen2.5-VL-3B", 3.09), ("Qwen2.5-VL-7B", 7.61), ("Qwen2.5-VL-32B", 32.8), ("Qwen2.5-VL-72B", 72.7)]
    + [("Qwen3-VL-8B", 8.19), ("Qwen3.5-9B", 8.95)],
)
def test_table_of_public_models_gives_their_sizes(name: str, billions: float) -> None:
    """Published sizes of the language models, in billions of parameters."""
    assert parameter_count(PUBLISHED[name]) / 1e9 == pytest.approx(billions, rel=0.01)


def test_bounds_approach_their_limits() -> None:
    """With long prefixes a group of G costs G times less; with G = 1 nothing is saved."""
    lone = bounds(SEVEN, repeated_work(8192, [256]), shared_work(8192, [256]), True)
    assert all(value == pytest.approx(1.0) for value in lone.values())
    long = bounds(SEVEN, repeated_work(2**20, [2] * 8), shared_work(2**20, [2] * 8), True)
    assert all(7.99 < value <= 8.0 for value in long.values())
    for prefix, ratio, count in product((1024, 16384), (1, 8, 32), (2, 16)):
        lengths = [prefix // ratio] * count
        found = bounds(SEVEN, repeated_work(prefix, lengths), shared_work(prefix, lengths), True)
        # Each way of counting saves something and never more than G times.
        assert all(1 < value < count for value in found.values())


@pytest.mark.parametrize("count,published", [(2, 1.95), (8, 6.6), (16, 10.9)])
def test_published_operations_of_prefix_grouper(count: int, published: float) -> None:
    """Prefix Grouper (arXiv 2506.05433), prefix 16384, ratio 32: 1.95x, 6.6x and 10.9x fewer operations.

    The paper names no model. With a 7B model and masked pairs counted, as FLOP profilers do, the formulas come within
    3 %; with causal pairs only, as everywhere else here, at most 10 % below, because attention is then a smaller
    part of the prefix's cost than of the responses'.
    """
    lengths = [16384 // 32] * count
    repeated, shared = repeated_work(16384, lengths), shared_work(16384, lengths)
    causal = forward_flops(SEVEN, repeated) / forward_flops(SEVEN, shared)
    assert 0.90 * published < causal < published
    own, row = lengths[0] - 1, 16384 + lengths[0] - 1
    repeated = replace(repeated, pairs=count * row**2)
    shared = replace(shared, pairs=16384**2 + count * own * row)
    masked = forward_flops(SEVEN, repeated) / forward_flops(SEVEN, shared)
    assert masked == pytest.approx(published, rel=0.03)


@pytest.mark.parametrize("prefix,count", [(8192, 8), (4096, 16)])
def test_published_memory_of_prefix_grouper(prefix: int, count: int) -> None:
    """Prefix Grouper: 68 -> 23 GB (G=8, prefix 8192) and 67 -> 23 GB (G=16, prefix 4096).

    Model, GPU and ratio are not named. A 7B model in bf16 that keeps one hidden state per layer and token and fp32
    logits of every token, at ratio 32 as in the figure of operations, comes within 15 %: the widest gap is the shared
    side of the second pair, which a smaller ratio would close.
    """
    lengths = [prefix // 32] * count
    published = {"repeated": 68.0 if count == 8 else 67.0, "shared": 23.0}
    per_token = SEVEN.layers * SEVEN.hidden * 2 + SEVEN.vocab * 4
    works = {"repeated": repeated_work(prefix, lengths), "shared": shared_work(prefix, lengths)}
    for side, work in works.items():
        total = (2 * parameter_count(SEVEN) + work.held_tokens * per_token) / 1e9
        assert total == pytest.approx(published[side], rel=0.15)
