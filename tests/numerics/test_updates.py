"""What trains, and how often: pruned batches, corrected ones, several updates, the members of the loss family."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.numerics.test_step import SETTINGS, assert_same_update, reference_for
from tests.support.collecting import tiny_config
from tests.support.groups import plain_model, tiny_policy
from tests.support.training import RecordingEngine, make_groups
from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.models.policy import Policy
from vlm_pg.training.updates import Update, UpdateSettings, run_updates, update_policy
from vlm_pg.types import ResponseGroup, RolloutGroup


def one_update(
    groups: list[RolloutGroup], policy: Policy, algorithm: AlgorithmSettings, budget: int = 10_000, **more: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, float]]:
    engine = RecordingEngine(policy, SETTINGS)
    metrics = update_policy(
        engine, None, Update(groups, SETTINGS.learning_rate), UpdateSettings(algorithm, budget, **more)
    )
    return {name: p.detach() for name, p in policy.model.named_parameters()}, engine.gradients, metrics


def pruned(groups: list[RolloutGroup], weights: tuple[float, ...]) -> list[RolloutGroup]:
    """The first rollouts of every group get these weights."""
    return [replace(group, kept=weights[: len(group.rollouts)]) for group in groups]


@pytest.mark.parametrize("train_vision", [False, True], ids=["frozen tower", "training tower"])
def test_pruned_rollouts_are_as_if_they_had_not_been_sampled(train_vision: bool) -> None:
    algorithm = AlgorithmSettings(loss_average="sequence_mean")
    policy = tiny_policy(train_vision=train_vision)
    marked = one_update(pruned(make_groups(policy), (1.0, 0.0, 1.0)), policy, algorithm)
    policy = tiny_policy(train_vision=train_vision)
    cut = [group.only([i for i in (0, 2) if i < len(group.rollouts)]) for group in make_groups(policy)]
    expected = one_update(cut, policy, algorithm)
    assert_same_update(marked, expected)
    assert marked[2]["tokens_computed"] == expected[2]["tokens_computed"], "no forward sees them"


def test_a_group_of_which_nothing_is_kept_takes_no_part() -> None:
    policy = tiny_policy(train_vision=True)
    groups = make_groups(policy)
    gone = [replace(groups[0], kept=(0.0,) * len(groups[0].rollouts)), *groups[1:]]
    marked = one_update(gone, policy, AlgorithmSettings())
    policy = tiny_policy(train_vision=True)
    assert_same_update(marked, one_update(make_groups(policy)[1:], policy, AlgorithmSettings()))


def test_nothing_pruned_is_grpo_bit_for_bit() -> None:
    policy = tiny_policy()
    plain = one_update(make_groups(policy), policy, AlgorithmSettings())
    policy = tiny_policy()
    kept = one_update(pruned(make_groups(policy), (1.0,) * 9), policy, AlgorithmSettings(prune_rate=0.0))
    assert all(torch.equal(kept[0][name], weight) for name, weight in plain[0].items())
    assert kept[2] == plain[2]


def test_corrected_weights_estimate_the_whole_batch() -> None:
    """Each of two draws keeps one rollout of two with weight 2: their mean is the gradient of both."""
    algorithm = AlgorithmSettings(prune_rate=0.5, prune_correction=True, loss_average="sequence_mean")
    gradients = []
    for weights in ((2.0, 0.0), (0.0, 2.0), (1.0, 1.0)):
        policy = tiny_policy()
        groups = pruned([group.only([0, 1]) for group in make_groups(policy)], weights)
        gradients.append(one_update(groups, policy, algorithm)[1])
    for name, whole in gradients[2].items():
        mean = (gradients[0][name] + gradients[1][name]) / 2
        assert (mean - whole).norm() <= 1e-5 * whole.norm() + 1e-9, name


def uneven(group: RolloutGroup) -> RolloutGroup:
    """Ratios that differ within a response, and a negative advantage with ratios above 1, on which dual_clip acts."""
    rollouts = [
        replace(r, rollout_logprobs=r.rollout_logprobs + 0.04 * torch.arange(len(r.token_ids)).sin())
        for r in group.rollouts
    ]
    return replace(group, rollouts=tuple(rollouts), advantages=tuple(-a for a in group.advantages))


@pytest.mark.parametrize(
    "settings",
    [
        {"ratio_level": "sequence", "clip_low": 0.01, "clip_high": 0.02},
        {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.02},
        {"dual_clip": 1.01, "clip_low": 0.02, "clip_high": 0.02},
        {"loss_average": "sequence_sum"},
        {"loss_average": "constant_length"},
        {"entropy_coef": 0.3},
        {"kl_estimator": "k1"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_every_member_of_the_family_is_cut_without_changing_the_update(settings: dict[str, Any]) -> None:
    """Whole, and as a prompt with two chunks of responses; the reference takes part."""

    def update(budget: int, without: str = "") -> Any:
        policy = tiny_policy()
        engine = RecordingEngine(policy, SETTINGS)
        chosen = {name: value for name, value in settings.items() if name != without}
        algorithm = AlgorithmSettings(kl_coef=0.05, **chosen)
        groups = [uneven(group) for group in make_groups(policy)]
        reference = reference_for(policy)
        metrics = update_policy(
            engine,
            reference,
            Update(groups, SETTINGS.learning_rate),
            UpdateSettings(algorithm, budget, max_new_tokens=9),
        )
        return engine.gradients, metrics

    (whole, metrics), (cut, cut_metrics) = update(10_000), update(102)
    assert cut_metrics["groups_chunked"] == 1
    for name in ("loss", "kl", "entropy", "ratio_mean", "ratio_min", "ratio_max", "clip_low", "clip_high"):
        assert cut_metrics[name] == pytest.approx(metrics[name], abs=1e-6), name
    for name, gradient in whole.items():
        assert (cut[name] - gradient).norm() < 1e-5 * gradient.norm(), name
    plain, _ = update(10_000, without=next(iter(settings)))
    assert any((whole[name] - plain[name]).norm() > 1e-3 * plain[name].norm() for name in plain), settings


def test_the_entropy_bonus_has_the_entropys_gradient() -> None:
    policy = tiny_policy()
    groups = [replace(group, advantages=(0.0,) * len(group.rollouts)) for group in make_groups(policy)]
    _, gradients, metrics = one_update(groups, policy, AlgorithmSettings(entropy_coef=0.5))
    assert metrics["loss"] == pytest.approx(-0.5 * metrics["entropy"], rel=1e-5)
    # Independently: transformers' logits, autograd through softmax.
    policy = tiny_policy()
    model = plain_model(policy)
    total, tokens = torch.zeros(()), 0
    for group in make_groups(policy):
        if group.prompt.pixel_values is not None:
            continue
        for rollout in group.rollouts:
            ids = torch.cat([group.prompt.input_ids, rollout.token_ids])[None]
            logits = model(input_ids=ids).logits[0, group.prompt.num_tokens - 1 : -1].double()
            total = total + torch.distributions.Categorical(logits=logits).entropy().sum()
            tokens += len(rollout.token_ids)
    policy = tiny_policy()
    text = [
        replace(group, advantages=(0.0,) * len(group.rollouts))
        for group in make_groups(policy)
        if group.prompt.pixel_values is None
    ]
    _, gradients, _ = one_update(text, policy, AlgorithmSettings(entropy_coef=0.5))
    (-0.5 * total / tokens).backward()
    for name, parameter in model.named_parameters():
        if name in gradients and parameter.grad is not None:
            assert (gradients[name] - parameter.grad).norm() < 1e-4 * parameter.grad.norm() + 1e-7, name


def test_advantages_by_token_reach_their_tokens() -> None:
    policy = tiny_policy()
    flat = make_groups(policy)
    by_token = [
        replace(g, token_advantages=tuple(torch.full((len(r.token_ids),), a) for r, a in zip(g.rollouts, g.advantages)))
        for g in flat
    ]
    same = one_update([replace(g, advantages=(0.0,) * len(g.rollouts)) for g in by_token], policy, AlgorithmSettings())
    policy = tiny_policy()
    assert_same_update(same, one_update(flat, policy, AlgorithmSettings()))


def recorded_anew(policy: Policy, groups: list[RolloutGroup], shift: float) -> list[RolloutGroup]:
    """The groups as if generation had recorded what the training forward computes, less ``shift``."""
    with torch.no_grad():
        scored = policy.logprobs([ResponseGroup(g.prompt, tuple(r.token_ids for r in g.rollouts)) for g in groups])
    return [
        replace(g, rollouts=tuple(replace(r, rollout_logprobs=v - shift) for r, v in zip(g.rollouts, of, strict=True)))
        for g, of in zip(groups, scored, strict=True)
    ]


@pytest.mark.parametrize(
    "train_vision, logprobs", [(False, "reuse"), (True, "recompute")], ids=["frozen tower", "training tower, recompute"]
)
def test_several_updates_are_updates_one_after_the_other(train_vision: bool, logprobs: str) -> None:
    """Two passes of two mini-batches: the same weights as four updates by hand, all measured from the first weights."""
    config = tiny_config(
        {"num_iterations": 2, "minibatches": 2, "clip_low": 0.01, "clip_high": 0.01}, rollout={"logprobs": logprobs}
    )
    policy = tiny_policy(train_vision=train_vision)
    groups = make_groups(policy)
    if logprobs == "recompute":  # what was recorded is not looked at
        groups = [
            replace(g, rollouts=tuple(replace(r, rollout_logprobs=r.rollout_logprobs - 3) for r in g.rollouts))
            for g in groups
        ]
    metrics = run_updates(RecordingEngine(policy, SETTINGS), None, Update(groups, SETTINGS.learning_rate), config)
    assert metrics["updates"] == 4.0 and policy.weights_version == 4
    got = {name: p.detach() for name, p in policy.model.named_parameters()}

    policy = tiny_policy(train_vision=train_vision)
    groups = make_groups(policy)
    if logprobs == "recompute":
        groups = recorded_anew(policy, groups, 0.0)
    engine = RecordingEngine(policy, SETTINGS)
    clipped = 0.0
    for part in (groups[:2], groups[2:]) * 2:
        values = update_policy(
            engine, None, Update(part, SETTINGS.learning_rate), UpdateSettings(config.algorithm, 10_000)
        )
        clipped += values["clip_low"] + values["clip_high"]
    assert metrics["clip_low"] + metrics["clip_high"] == pytest.approx(clipped / 4, abs=1e-6)
    for name, parameter in policy.model.named_parameters():
        assert (got[name] - parameter).abs().max() < 1e-6, name


def test_truncated_importance_weights_scale_each_tokens_term() -> None:
    """Recorded half a nat too low: every token counts exp(0.5), held at the cap."""
    gradients = []
    for shift, cap in ((0.0, 2.0), (0.5, 2.0), (0.5, 1.2)):
        policy = tiny_policy()
        groups = recorded_anew(policy, make_groups(policy), shift)
        algorithm = AlgorithmSettings(importance_cap=cap)
        found = one_update(groups, policy, algorithm, logprobs="recompute")
        gradients.append(found[1])
        assert found[2]["importance_mean"] == pytest.approx(min(math.exp(shift), cap), rel=1e-5)
    for name, plain in gradients[0].items():
        assert (gradients[1][name] - math.exp(0.5) * plain).norm() <= 1e-4 * plain.norm() + 1e-9, name
        assert (gradients[2][name] - 1.2 * plain).norm() <= 1e-4 * plain.norm() + 1e-9, name
