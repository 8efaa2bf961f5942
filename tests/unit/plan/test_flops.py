"""Operations counted by hand, and against published sizes; balancing uses the same."""

from __future__ import annotations

import pytest

from vlm_pg.batching.cost import GroupCosts, GroupWork
from vlm_pg.models.memory_sizes import LanguageShape, LinearAttention
from vlm_pg.plan.flops import (
    cost_model,
    head_flops,
    linear_attention_flops,
    pair_flops,
    parameter_count,
    shared_pairs,
    token_flops,
)
from vlm_pg.plan.shape import PUBLISHED

TINY = LanguageShape(hidden=8, layers=2, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocab=10)
SEVEN = PUBLISHED["Qwen2.5-VL-7B"]


def test_operations_counted_by_hand() -> None:
    # A layer: queries 8x8, keys and values 8x4 each, output 8x8, MLP 3 x 8x16; two operations per weight.
    assert token_flops(TINY) == 2 * 2 * (64 + 32 + 32 + 64 + 384)
    # Score and weighted sum: 2 heads x 4 dims x 2 operations each, in 2 layers.
    assert pair_flops(TINY) == 2 * (2 * 2 * 4 * 2)
    assert head_flops(TINY) == 2 * 8 * 10
    # Pairs of a prefix of 3, and of 2 and 1 tokens behind it.
    assert shared_pairs(3, [2, 1]) == 6 + (2 * 3 + 3) + (3 + 1)


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


@pytest.mark.parametrize(
    "name,billions",
    [("Qwen2.5-VL-3B", 3.09), ("Qwen2.5-VL-7B", 7.61), ("Qwen2.5-VL-32B", 32.8), ("Qwen2.5-VL-72B", 72.7)]
    + [("Qwen3-VL-8B", 8.19), ("Qwen3.5-9B", 8.95)],
)
def test_table_of_public_models_gives_their_sizes(name: str, billions: float) -> None:
    """Published sizes of the language models, in billions of parameters."""
    assert parameter_count(PUBLISHED[name]) / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_group_costs_its_operations_forward_and_backward() -> None:
    """Prefix of 5,000, responses of 100 and 300 tokens, without checkpointing; logits are computed twice."""
    cost = GroupCosts([GroupWork(5000, (99, 299))], cost_model(SEVEN, False), 10**9, lambda i, j: 0).rank({0: (0, 1)})
    linear = 3 * (5000 + 99 + 299) * token_flops(SEVEN)
    attention = 3.5 * shared_pairs(5000, [99, 299]) * pair_flops(SEVEN)
    assert cost == linear + attention + 4 * 400 * head_flops(SEVEN)


def test_a_layer_that_is_computed_again_takes_its_attention_from_the_first_run() -> None:
    without, with_it = (cost_model(SEVEN, checkpointing=checkpointing) for checkpointing in (False, True))
    assert with_it.pair == without.pair
    assert 3 * with_it.token == 4 * without.token
