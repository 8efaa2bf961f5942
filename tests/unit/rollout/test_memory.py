"""What generation books is what it keeps, and a budget too small says how much is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import vlm_pg.rollout.engine as generation
from tests.support.groups import make_case, tiny_policy
from tests.support.tiny import FAMILY_NAMES
from tests.unit.rollout.test_prefill import prefilled
from vlm_pg.distributed import SequenceGroup
from vlm_pg.errors import ConfigError
from vlm_pg.memory import GIB
from vlm_pg.models.policy import Policy
from vlm_pg.rollout import memory
from vlm_pg.rollout.cohort import OwnTokens
from vlm_pg.rollout.decoders import DecodeContext
from vlm_pg.rollout.engine import RolloutEngine, Together
from vlm_pg.rollout.memory import TokenCosts, budget_bytes, check_fits, rounds
from vlm_pg.rollout.ragged import row_bucket
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.training.parallel import sample_together
from vlm_pg.types import Prompt


def size(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILY_NAMES)
@torch.no_grad()
def test_costs_are_those_of_the_tensors_kept(family: str, dtype: torch.dtype) -> None:
    policy = tiny_policy(family=family, dtype=dtype)
    prompt = make_case(policy, "text", 0).prompt
    _, store, _ = prefilled(policy, [prompt])
    costs = TokenCosts.of(policy)
    kept = size(*store.keys.values(), *store.values.values())
    states = [states for of_layer in store.states.values() for states in of_layer.values()]
    assert kept == prompt.num_tokens * costs.per_token
    assert sum(size(one.conv_tail, one.recurrent) for one in states) == costs.per_state
    own = OwnTokens([(0,)] * 3)
    policy.hidden_states(torch.tensor([5, 6, 7]), torch.full((3, 3), 9), DecodeContext(store, [own], policy.kernel))
    grown = size(*(tensor for pair in own._keys_values.values() for tensor in pair))
    assert grown == 3 * 64 * costs.per_token
    assert sum(size(one.conv_tail, one.recurrent) for one in own._states.values()) == 3 * costs.per_state


def test_a_budget_is_stated_or_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert budget_bytes(RolloutSettings(memory_gb=0.5), torch.device("cpu")) == GIB // 2
    monkeypatch.setattr("vlm_pg.memory.free_host_bytes", lambda: 10 * GIB)
    assert budget_bytes(RolloutSettings(), torch.device("cpu")) == 6 * GIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert budget_bytes(RolloutSettings(), torch.device("cpu")) == 3 * GIB


def test_one_group_beyond_the_budget_says_how_much_is_needed() -> None:
    check_fits(GIB, GIB, "17", RolloutSettings())
    with pytest.raises(ConfigError, match=r"needs 2 GiB .* sample 17\), but generation may take 1 GiB. Raise"):
        check_fits(2 * GIB, GIB, "17", RolloutSettings())


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
    assert list(rounds(policy, engine.settings, prompts, room_for_three, TWO)) == [([0, 1, 2], False), ([3], False)]

    class Buckets:
        def rows_for(self, rollouts: int) -> int:
            return row_bucket(rollouts)

        def prompt_room(self, tokens: int) -> int:
            return tokens

    monkeypatch.setattr(memory, "decoder_for", lambda *_: Buckets())
    assert row_bucket(9) > 9
    assert list(rounds(policy, engine.settings, prompts, room_for_three, TWO)) == [([0, 1], False), ([2, 3], False)]


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
    settings = RolloutSettings(num_generations=3, max_new_tokens=8, divide_prefix="never")
    engine = RolloutEngine(policy, settings, seed=0)
    costs = TokenCosts.of(policy)
    needed = prompt.num_tokens * costs.per_token + 2 * costs.rollout(engine.settings)
    for rank in range(2):
        group = SequenceGroup(2, rank)
        assert list(rounds(policy, engine.settings, [prompt], needed, group)) == [([0], False)]
        with pytest.raises(ConfigError, match="One group needs"):
            list(rounds(policy, engine.settings, [prompt], needed - 1, group))


def of_lengths(policy: Policy, lengths: Sequence[int]) -> list[Prompt]:
    """Prompts of text that have nothing in common."""
    ids = [torch.randint(20, 300, (length,), generator=torch.Generator().manual_seed(length)) for length in lengths]
    return [Prompt(str(len(one)), one, torch.zeros_like(one), torch.arange(len(one)).expand(3, -1)) for one in ids]


def test_what_does_not_fit_whole_is_divided_by_itself() -> None:
    """Two short prompts fit together and whole; of two long ones each fits in halves."""
    policy = tiny_policy()
    prompts = of_lengths(policy, (400, 30, 401, 31))
    engine = RolloutEngine(policy, RolloutSettings(num_generations=4, max_new_tokens=8), seed=0)
    costs = TokenCosts.of(policy)
    rollouts = 2 * costs.rollout(engine.settings)
    # A pass: of its rows that are read and of the others each a half, rounded up.
    halves = [(length + 1) // 2 + 2 for length in (400, 401)]
    budget = max(halves) * costs.per_token + rollouts
    assert 2 * 31 * costs.per_token + 2 * rollouts <= budget < 400 * costs.per_token
    assert list(rounds(policy, engine.settings, prompts, budget, TWO)) == [
        ([0], True),
        ([1], False),
        ([2], True),
        ([3], False),
    ]
    with pytest.raises(ConfigError, match=r"Raise rollout.memory_gb to at least .* the media's size\."):
        list(rounds(policy, engine.settings, prompts, budget - 1, TWO))
    room = 4 * costs.rollout(engine.settings) + sum(halves) * costs.per_token
    assert list(rounds(policy, engine.settings, of_lengths(policy, (401, 400)), room, TWO)) == [
        ([0], False),
        ([1], False),
    ]


@pytest.mark.parametrize(("divide", "expected"), [("always", True), ("auto", False), ("never", False)])
def test_prompts_that_fit_are_divided_where_that_is_asked_for(divide: Any, expected: bool) -> None:
    policy = tiny_policy()
    settings = RolloutSettings(num_generations=4, max_new_tokens=8, divide_prefix=divide)
    engine = RolloutEngine(policy, settings, seed=0)
    assert list(rounds(policy, engine.settings, of_lengths(policy, (40, 41)), 2**30, TWO)) == [([0, 1], expected)]


def test_a_prompt_that_must_not_be_divided_is_refused_with_what_would_help() -> None:
    policy = tiny_policy()
    settings = RolloutSettings(num_generations=4, max_new_tokens=8, divide_prefix="never")
    engine = RolloutEngine(policy, settings, seed=0)
    budget = 300 * TokenCosts.of(policy).per_token + 2 * TokenCosts.of(policy).rollout(settings)
    with pytest.raises(ConfigError, match=r"the media's size, or set rollout\.divide_prefix=auto\."):
        list(rounds(policy, engine.settings, of_lengths(policy, (400,)), budget, TWO))


@pytest.mark.parametrize(
    ("divide", "questions", "length", "together"),
    [
        ("auto", 2, 40, False),
        ("auto", 1, 40, True),
        ("auto", 2, 400, True),
        ("always", 2, 40, True),
        ("never", 2, 400, False),
    ],
)
def test_who_samples_what_one_process_cannot(divide: Any, questions: int, length: int, together: bool) -> None:
    """With as many questions as processes each samples its own, unless some group is beyond one of them."""

    class Agreeing(SequenceGroup):
        def gather(self, value: Any) -> list[Any]:
            return [value] * self.size

    policy = tiny_policy()
    costs = TokenCosts.of(policy)
    settings = RolloutSettings(num_generations=4, max_new_tokens=8, divide_prefix=divide)
    room = 300 * costs.per_token + 4 * costs.rollout(settings)
    settings = settings.model_copy(update={"memory_gb": room / 2**30})
    engine, prompts = RolloutEngine(policy, settings, seed=0), of_lengths(policy, range(length, length + questions))
    assert sample_together(Agreeing(2, 0), engine, prompts, "auto") == together
    assert not sample_together(Agreeing(2, 0), engine, prompts, "questions")
    assert not sample_together(SequenceGroup(), engine, prompts, "auto")


def test_processes_that_take_turns_cannot_divide_a_prompt() -> None:
    policy = tiny_policy()
    policy.lockstep = object()  # type: ignore[assignment]
    engine = RolloutEngine(policy, RolloutSettings(num_generations=4, divide_prefix="always"), seed=0)
    with pytest.raises(ConfigError, match=r"divide_prefix is always, but under ZeRO-3 .*rollout\.gather=all"):
        sample_together(TWO, engine, of_lengths(policy, (40,)), "auto")
