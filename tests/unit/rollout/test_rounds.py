"""Prompts that several processes prefill together: which ones at a time, and that nobody decides otherwise later."""

from __future__ import annotations

from typing import Any

import pytest

import vlm_pg.rollout.engine as generation
from tests.support.groups import make_case, tiny_policy
from vlm_pg.distributed import SequenceGroup
from vlm_pg.errors import ConfigError
from vlm_pg.rollout.engine import RolloutEngine, Together, rounds
from vlm_pg.rollout.memory import TokenCosts
from vlm_pg.rollout.ragged import row_bucket
from vlm_pg.rollout.settings import RolloutSettings

TWO = SequenceGroup(2, 0)


def test_rounds_count_the_rows_that_decoding_makes_of_the_largest_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rollouts on two processes are three on one of them, and three prompts of three fill sixteen rows."""
    policy = tiny_policy()
    prompts = [make_case(policy, "text", seed).prompt for seed in range(4)]
    engine = RolloutEngine(policy, RolloutSettings(num_generations=5, max_new_tokens=8), seed=0)
    costs = TokenCosts.of(policy)
    stored = [prompt.num_tokens * costs.per_token for prompt in prompts]
    rollout = costs.rollout(engine.settings)
    room_for_three = sum(sorted(stored)[-3:]) + 9 * rollout
    assert list(rounds(engine, prompts, room_for_three, TWO)) == [([0, 1, 2], False), ([3], False)]

    class Buckets:
        def rows_for(self, rollouts: int) -> int:
            return row_bucket(rollouts)

    monkeypatch.setattr(generation, "decoder_for", lambda *_: Buckets())
    assert row_bucket(9) > 9
    assert list(rounds(engine, prompts, room_for_three, TWO)) == [([0, 1], False), ([2, 3], False)]


def test_a_round_is_admitted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a process would book by itself: a prefill is for all of them."""
    policy = tiny_policy()
    prompts = [make_case(policy, "text", seed).prompt for seed in range(3)]
    engine = RolloutEngine(policy, RolloutSettings(num_generations=4, max_new_tokens=8), seed=0)
    batch: Any = generation._ContinuousBatch(engine, prompts, 1, Together(TWO, budget=1))
    started: list[list[int]] = []
    monkeypatch.setattr(batch, "_start", lambda chosen, stored, new: started.append(list(chosen)))
    batch._admit()
    assert [sorted(chosen) for chosen in started] == [[0, 1, 2]]


def test_what_does_not_fit_is_refused_by_all_processes_alike() -> None:
    """Also by the one whose own rollouts would."""
    policy = tiny_policy()
    prompt = make_case(policy, "text", 0).prompt
    engine = RolloutEngine(policy, RolloutSettings(num_generations=3, max_new_tokens=8), seed=0)
    costs = TokenCosts.of(policy)
    needed = prompt.num_tokens * costs.per_token + 2 * costs.rollout(engine.settings)
    for rank in range(2):
        group = SequenceGroup(2, rank)
        assert list(rounds(engine, [prompt], needed, group)) == [[0]]
        with pytest.raises(ConfigError, match="One group needs"):
            list(rounds(engine, [prompt], needed - 1, group))
