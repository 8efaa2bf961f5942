"""What work is balanced by agrees with the benchmarks' count of operations."""

from __future__ import annotations

from vlm_pg.batching.cost import GroupCosts, GroupWork
from vlm_pg.bench.flops import step_flops
from vlm_pg.bench.work import shared_work
from vlm_pg.models.settings import PARTS
from vlm_pg.plan.command import published_shape
from vlm_pg.plan.costs import cost_model


def test_a_group_costs_what_the_benchmarks_count() -> None:
    """Prefix of 5,000, responses of 100 and 300 tokens, without checkpointing; the head's logits once more here."""
    shape = published_shape("Qwen2.5-VL-7B")
    model = cost_model(shape, train=("language",), checkpointing=False)
    cost = GroupCosts([GroupWork(5000, (99, 299), patches=8)], model, 10**9, lambda i, j: 0).whole(0)
    again = 400 * 2 * shape.language.hidden * shape.language.vocab
    assert cost == step_flops(shape.language, shared_work(5000, [100, 300]), checkpointing=False) + again


def test_a_trained_tower_costs_six_operations_a_weight_and_patch() -> None:
    shape = published_shape("Qwen2.5-VL-7B")
    assert cost_model(shape, train=PARTS, checkpointing=False).patch == 6 * shape.weights.tower
    assert cost_model(shape, train=("language",), checkpointing=True).patch == 0
    tower, merger = shape.weights.tower, shape.weights.merger
    assert cost_model(shape, train=("merger",), checkpointing=True).patch == 2 * tower + 4 * merger
    assert 0.01 * tower < merger < 0.1 * tower
    with_checkpointing = cost_model(shape, train=PARTS, checkpointing=True)
    assert with_checkpointing.patch == 8 * shape.weights.tower
    assert with_checkpointing.pair == cost_model(shape, train=PARTS, checkpointing=False).pair
