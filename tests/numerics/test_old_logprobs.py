"""What the loss's ratio is taken to: log-probabilities recorded at generation, or those of the update's own forward.
Either way, and for the difference between the two, it does not matter how the batch is cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.groups import make_case, plain_model, repeated_logprobs, tiny_policy
from tests.support.training import RecordingEngine, make_groups
from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.errors import ConfigError
from vlm_pg.models.policy import Policy
from vlm_pg.training.engines import TorchEngine
from vlm_pg.training.settings import TrainingSettings
from vlm_pg.training.updates import Update, UpdateSettings, update_policy
from vlm_pg.types import ResponseGroup, RolloutGroup

SETTINGS = TrainingSettings(steps=1, learning_rate=1e-4)
WHOLE, CHUNKED = 10_000, 102  # token budgets: one micro-batch; four, of which one runs its responses in chunks

# Trainer minus sampler, by the rollout's index in its group.
SHIFTS = (0.5, -0.25, 0.125)


def with_logprobs(group: RolloutGroup, values: Iterable[torch.Tensor]) -> RolloutGroup:
    rollouts = [replace(r, rollout_logprobs=own) for r, own in zip(group.rollouts, values, strict=True)]
    return replace(group, rollouts=tuple(rollouts))


def on_policy(policy: Policy) -> list[RolloutGroup]:
    """As if the sampler had computed exactly what the trainer computes."""
    groups = make_groups(policy)
    members = [ResponseGroup(group.prompt, tuple(r.token_ids for r in group.rollouts)) for group in groups]
    with torch.no_grad():
        return list(map(with_logprobs, groups, policy.logprobs(members)))


def shifted(policy: Policy) -> list[RolloutGroup]:
    """Every rollout recorded too low or too high by an amount of its own."""
    return [
        with_logprobs(group, [r.rollout_logprobs - SHIFTS[i] for i, r in enumerate(group.rollouts)])
        for group in on_policy(policy)
    ]


def garbage(policy: Policy) -> list[RolloutGroup]:
    return [
        with_logprobs(group, [torch.full_like(r.rollout_logprobs, -7.0 * i) for i, r in enumerate(group.rollouts)])
        for group in make_groups(policy)
    ]


def updated(
    make: Callable[[Policy], list[RolloutGroup]], budget: int = WHOLE, train_vision: bool = True, **how: Any
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The gradients that a step used, and its metrics."""
    checkpointing = how.pop("gradient_checkpointing", False)
    policy = tiny_policy(train_vision=train_vision, gradient_checkpointing=checkpointing)
    engine = RecordingEngine(policy, SETTINGS)
    metrics = update_policy(
        engine,
        None,
        Update(make(policy), 1e-4, measure_mismatch=how.pop("measure_mismatch", False)),
        UpdateSettings(AlgorithmSettings(), budget, **how),
    )
    return engine.gradients, metrics


@pytest.mark.parametrize("budget", [WHOLE, CHUNKED])
def test_reused_and_recomputed_ones_of_one_forward_give_one_update(budget: int) -> None:
    recomputed, reused = updated(on_policy, budget, logprobs="recompute"), updated(on_policy, logprobs="reuse")
    for name, gradient in reused[0].items():
        assert (recomputed[0][name] - gradient).norm() < 1e-5 * gradient.norm(), name
    for name in ("loss", "ratio_mean", "grad_norm"):
        assert recomputed[1][name] == pytest.approx(reused[1][name], abs=1e-6), name


def test_the_recomputed_update_is_plain_policy_gradient() -> None:
    """Ratio 1: the gradient is that of -mean(advantage * logprob) under transformers' forward, rollout by rollout."""
    policy = tiny_policy()
    cases = [make_case(policy, kind, seed=seed) for seed, kind in enumerate(("video", "image", "text", "images"))]
    groups = garbage(policy)
    engine = RecordingEngine(policy, SETTINGS)
    oracle = plain_model(policy)
    update_policy(
        engine, None, Update(groups, 1e-4), UpdateSettings(AlgorithmSettings(), CHUNKED, logprobs="recompute")
    )
    tokens = sum(len(r.token_ids) for group in groups for r in group.rollouts)
    for case, group in zip(cases, groups, strict=True):
        logprobs = repeated_logprobs(oracle, case, [r.token_ids for r in group.rollouts])
        terms = [advantage * values.sum() for advantage, values in zip(group.advantages, logprobs, strict=True)]
        (-torch.stack(terms).sum() / tokens).backward()
    compared = 0
    for name, parameter in oracle.named_parameters():
        if name in engine.gradients and parameter.grad is not None:
            assert (engine.gradients[name] - parameter.grad).norm() < 1e-4 * parameter.grad.norm(), name
            compared += 1
    assert compared == len(engine.gradients)


@pytest.mark.parametrize("train_vision", [False, True], ids=["frozen tower", "training tower"])
@pytest.mark.parametrize("budget, checkpointing", [(WHOLE, False), (CHUNKED, False), (CHUNKED, True)], ids=str)
def test_recompute_does_not_depend_on_what_was_recorded(budget: int, checkpointing: bool, train_vision: bool) -> None:
    how: dict[str, Any] = {"logprobs": "recompute", "gradient_checkpointing": checkpointing}
    wrong = updated(garbage, budget, train_vision, **how)
    right = updated(on_policy, budget, train_vision, **how)
    assert wrong[1]["groups_chunked"] == (budget == CHUNKED)
    assert (wrong[1]["ratio_mean"], wrong[1]["ratio_max"]) == (1.0, 1.0)
    assert (wrong[1]["clip_low"], wrong[1]["clip_high"], wrong[1]["behaviour_kl"]) == (0.0, 0.0, 0.0)
    for name, gradient in right[0].items():
        assert torch.equal(wrong[0][name], gradient), name
    assert updated(garbage, budget, train_vision)[1]["ratio_max"] > 2.0, "reuse takes what was recorded"


@pytest.mark.parametrize("logprobs", ["reuse", "recompute"])
@pytest.mark.parametrize("budget", [WHOLE, CHUNKED])
def test_the_reported_mismatch_is_the_injected_one(budget: int, logprobs: str) -> None:
    metrics = updated(shifted, budget, logprobs=logprobs, measure_mismatch=True)[1]
    groups = make_groups(tiny_policy())
    differences = [SHIFTS[i] for group in groups for i, r in enumerate(group.rollouts) for _ in r.token_ids]

    def mean(of: Callable[[float], float]) -> float:
        return sum(map(of, differences)) / len(differences)

    # fp32 log-probabilities of about -7 carry an error of about 1e-6.
    expected = {
        "mismatch/kl": mean(lambda d: math.exp(d) - 1 - d),
        "mismatch/abs_mean": mean(abs),
        "mismatch/abs_max": 0.5,
        "mismatch/exp_abs_mean": mean(lambda d: math.exp(abs(d))),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=5e-6)


def test_without_being_asked_nothing_is_compared_and_nothing_else_changes() -> None:
    plain, compared = updated(shifted), updated(shifted, measure_mismatch=True)
    added = {"mismatch/kl", "mismatch/abs_mean", "mismatch/abs_max", "mismatch/exp_abs_mean"}
    assert compared[1].keys() - plain[1].keys() == added
    assert {name: compared[1][name] for name in plain[1]} == plain[1]
    for name, gradient in plain[0].items():
        assert torch.equal(compared[0][name], gradient), name


def test_rollouts_of_other_weights_are_trained_on_but_not_compared() -> None:
    """Their difference is what the steps in between changed, which no bound on rounding applies to."""

    def one_current(policy: Policy) -> list[RolloutGroup]:
        groups = [replace(group, policy_version=3) for group in garbage(policy)]
        for _ in range(4):
            policy.weights_changed()
        return [replace(shifted(policy)[0], policy_version=4), *groups[1:]]

    def none_current(policy: Policy) -> list[RolloutGroup]:
        groups = one_current(policy)
        return [replace(groups[0], policy_version=2), *groups[1:]]

    metrics = updated(one_current, CHUNKED, measure_mismatch=True)[1]
    assert metrics["mismatch/abs_max"] == pytest.approx(0.5, abs=5e-6)
    lengths = [5, 1, 9]
    mean = sum(n * abs(d) for n, d in zip(lengths, SHIFTS, strict=True)) / sum(lengths)
    assert metrics["mismatch/abs_mean"] == pytest.approx(mean, abs=5e-6)
    assert metrics["response_tokens"] > sum(lengths)
    assert not any(name.startswith("mismatch") for name in updated(none_current, measure_mismatch=True)[1])


def test_recompute_of_rollouts_of_other_weights_is_refused_before_anything_is_computed() -> None:
    policy = tiny_policy()
    groups = on_policy(policy)
    engine = TorchEngine(policy, SETTINGS)
    settings = UpdateSettings(AlgorithmSettings(), WHOLE, logprobs="recompute")
    update_policy(engine, None, Update(groups, 1e-4), settings)
    after_one = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    with pytest.raises(ConfigError, match="sampled at version 0 of the weights, which are now at 1"):
        update_policy(engine, None, Update(groups, 1e-4), settings)
    assert all(torch.equal(after_one[name], p) for name, p in policy.model.named_parameters())
