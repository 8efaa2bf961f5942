"""What work is balanced by agrees with the benchmarks' count of operations."""

from __future__ import annotations

from vlm_pg.batching.cost import GroupCosts, GroupWork
from vlm_pg.bench.flops import step_flops
from vlm_pg.bench.work import shared_work
from vlm_pg.plan.command import published_shape
from vlm_pg.plan.costs import cost_model


def test_a_group_costs_what_the_benchmarks_count() -> None:
    """Prefix of 5,000, responses of 100 and 300 tokens, without checkpointing; the head's logits once more here."""
    shape = published_shape("Qwen2.5-VL-7B")
    model = cost_model(shape, checkpointing=False)
    cost = GroupCosts([GroupWork(5000, (99, 299))], model, 10**9, lambda i, j: 0).whole(0)
    again = 400 * 2 * shape.language.hidden * shape.language.vocab
    assert cost == step_flops(shape.language, shared_work(5000, [100, 300]), checkpointing=False) + again


def test_a_layer_that_is_computed_again_takes_its_attention_from_the_first_run() -> None:
    shape = published_shape("Qwen2.5-VL-7B")
    without, with_it = (cost_model(shape, checkpointing=checkpointing) for checkpointing in (False, True))
    assert with_it.pair == without.pair
    assert 3 * with_it.token == 4 * without.token
