"""Losses, ratios, KL and loss weights equal their formulas in NumPy, gradients equal central differences."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_pg.algorithms.losses import kl_penalty, response_token_weights
from vlm_pg.algorithms.own import load_loss
from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.algorithms.tokens import ResponseTokens, importance_weights, log_ratios
from vlm_pg.errors import ConfigError
from vlm_pg.metrics import Metric


def random_batch(seed: int, num_tokens: int, spread: float = 0.5) -> tuple[torch.Tensor, ...]:
    """Policy and behaviour log-probabilities, advantages and weights, float64 [num_tokens]."""
    generator = np.random.default_rng(seed)
    behaviour = -generator.exponential(1.0, num_tokens)
    policy = behaviour + spread * generator.standard_normal(num_tokens)
    advantages = generator.standard_normal(num_tokens)
    weights = generator.uniform(0.01, 1.0, num_tokens)
    return tuple(torch.from_numpy(array) for array in (policy, behaviour, advantages, weights))


def random_lengths(seed: int, num_tokens: int) -> list[int]:
    """Lengths of sequences, each at least 1, that add up to ``num_tokens``."""
    generator = np.random.default_rng([seed, 1])
    cuts = np.flatnonzero(generator.random(num_tokens - 1) < 0.3) + 1
    return np.diff([0, *cuts, num_tokens]).tolist()


def central_differences(
    function: Callable[[torch.Tensor], torch.Tensor], point: torch.Tensor, step: float = 1e-6
) -> torch.Tensor:
    """Gradient of ``function``, a scalar, at ``point``."""
    gradient = torch.zeros_like(point)
    for index in range(point.numel()):
        shift = torch.zeros_like(point)
        shift[index] = step
        gradient[index] = (function(point + shift) - function(point - shift)) / (2 * step)
    return gradient


CLIP_LOW, CLIP_HIGH, CLAMP = 0.2, 0.28, 20.0
BOUNDS: dict[str, Any] = {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH, "log_ratio_clamp": CLAMP}
TOKEN_CLIP: dict[str, Any] = {"loss": "clip", "ratio_level": "token", "clip_low": 0.2, "clip_high": 0.28}
VARIANTS = [
    pytest.param({"loss": loss, "ratio_level": level, "dual_clip": dual}, id=f"{loss}-{level}-{dual}")
    for loss, level, dual in product(["clip", "cispo"], ["token", "sequence"], [None, 3.0, 1.1])
    if loss == "clip" or dual is None
]


def policy_loss(
    *per_token: torch.Tensor, lengths: list[int], importance: torch.Tensor | None = None, **settings: Any
) -> tuple[torch.Tensor, dict[Metric, torch.Tensor]]:
    """The loss that the settings name, of policy and behaviour log-probabilities, advantages and weights."""
    policy, behaviour, advantages, weights = per_token
    tokens = ResponseTokens(policy, behaviour, advantages, weights, lengths, importance)
    return load_loss(AlgorithmSettings(**settings))(tokens)


def numpy_ratios(policy: np.ndarray, behaviour: np.ndarray, lengths: list[int], level: str) -> np.ndarray:
    difference = policy - behaviour
    if level == "sequence":
        pieces = np.split(difference, np.cumsum(lengths)[:-1])
        difference = np.concatenate([np.full(len(piece), piece.mean()) for piece in pieces])
    return np.exp(np.clip(difference, -CLAMP, CLAMP))


def numpy_policy_loss(
    batch: tuple[torch.Tensor, ...],
    lengths: list[int],
    loss: str,
    ratio_level: str,
    dual_clip: float | None,
    importance: torch.Tensor | None = None,
) -> float:
    policy, behaviour, advantages, weights = (tensor.detach().numpy() for tensor in batch)
    total = 0.0
    for i, ratio in enumerate(numpy_ratios(policy, behaviour, lengths, ratio_level)):
        clipped = min(max(ratio, 1 - CLIP_LOW), 1 + CLIP_HIGH)
        if loss == "cispo":
            term = clipped * advantages[i] * policy[i]
        else:
            term = min(ratio * advantages[i], clipped * advantages[i])
            if dual_clip is not None and advantages[i] < 0:
                term = max(term, dual_clip * advantages[i])
        total -= weights[i] * term * (1.0 if importance is None else importance[i].item())
    return total


@pytest.mark.parametrize("variant", VARIANTS)
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), num_tokens=st.integers(1, 40), spread=st.sampled_from([0.0, 0.3, 3.0, 30.0]))
def test_loss_equals_numpy(variant: dict[str, Any], seed: int, num_tokens: int, spread: float) -> None:
    batch, lengths = random_batch(seed, num_tokens, spread), random_lengths(seed, num_tokens)
    importance = torch.from_numpy(np.random.default_rng(seed).uniform(0.0, 2.0, num_tokens))
    for factors in (None, importance):
        loss, _ = policy_loss(*batch, lengths=lengths, importance=factors, **variant, **BOUNDS)
        expected = numpy_policy_loss(batch, lengths, importance=factors, **variant)
        assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", range(3))
def test_gradient_equals_central_differences(variant: dict[str, Any], seed: int) -> None:
    num_tokens = 24
    policy, behaviour, advantages, weights = random_batch(seed, num_tokens, spread=0.8)
    lengths = random_lengths(seed, num_tokens)
    importance = torch.from_numpy(np.random.default_rng(seed).uniform(0.0, 2.0, num_tokens))

    def loss_at(point: torch.Tensor) -> torch.Tensor:
        rest = (behaviour, advantages, weights)
        return policy_loss(point, *rest, lengths=lengths, importance=importance, **variant, **BOUNDS)[0]

    policy.requires_grad_()
    loss_at(policy).backward()
    if variant["loss"] == "cispo":  # the ratio is a constant of the gradient: that of factor * A * logp alone
        ratios = numpy_ratios(policy.detach().numpy(), behaviour.numpy(), lengths, variant["ratio_level"])
        factors = torch.from_numpy(np.clip(ratios, 1 - CLIP_LOW, 1 + CLIP_HIGH))
        expected = central_differences(
            lambda point: -(weights * importance * factors * advantages * point).sum(), policy.detach()
        )
    else:
        expected = central_differences(loss_at, policy.detach())
    torch.testing.assert_close(policy.grad, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("variant", VARIANTS)
def test_with_ratio_one_the_gradient_is_reinforce(variant: dict[str, Any]) -> None:
    # At sequence level this needs what training has: one advantage and one weight for the whole response.
    policy, *_ = random_batch(4, 12)
    lengths = [1, 4, 7]
    advantages = torch.tensor([0.5, -1.5, 2.0], dtype=torch.float64).repeat_interleave(torch.tensor(lengths))
    weights = torch.tensor([0.1, 0.7, 0.2], dtype=torch.float64).repeat_interleave(torch.tensor(lengths))
    policy.requires_grad_()
    loss, _ = policy_loss(policy, policy.detach().clone(), advantages, weights, lengths=lengths, **variant, **BOUNDS)
    loss.backward()
    torch.testing.assert_close(policy.grad, -weights * advantages)


def test_clipped_tokens_have_no_gradient_and_are_counted_by_side() -> None:
    # Ratios e^1, e^1, e^-1, e^-1 with advantages +, -, +, -: the clip removes the first and the last.
    policy = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    ones = torch.ones(4, dtype=torch.float64)
    loss, metrics = policy_loss(policy, torch.zeros_like(ones), advantages, ones, lengths=[3, 1], **TOKEN_CLIP)
    loss.backward()
    assert loss.item() == pytest.approx(-(1.28 - math.e + math.exp(-1) - 0.8))
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([0.0, math.e, -math.exp(-1), 0.0])
    values = {name: value.item() for name, value in metrics.items()}
    assert (values["clip_high"], values["clip_low"]) == (1.0, 1.0)
    assert values["ratio_max"] == pytest.approx(math.e)
    assert values["ratio_min"] == pytest.approx(math.exp(-1))
    assert values["ratio_mean"] == pytest.approx(2 * math.e + 2 * math.exp(-1))
    assert values["behaviour_kl"] == pytest.approx(2 * (math.e - 2) + 2 * math.exp(-1))
    assert not any(value.requires_grad or value.dtype != torch.float32 for value in metrics.values())


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant.values[0]["loss"] == "clip"])
@pytest.mark.parametrize("seed", range(5))
def test_clipped_counts_are_those_of_tokens_without_gradient(variant: dict[str, Any], seed: int) -> None:
    policy, behaviour, advantages, weights = random_batch(seed, 60, spread=1.0)
    lengths = [1] * 60 if variant["ratio_level"] == "sequence" else random_lengths(seed, 60)
    policy.requires_grad_()
    loss, metrics = policy_loss(policy, behaviour, advantages, weights, lengths=lengths, **variant, **BOUNDS)
    loss.backward()
    assert policy.grad is not None
    removed = policy.grad == 0
    above = policy.detach() > behaviour
    assert metrics["clip_low"].item() == (removed & ~above).sum().item() > 0
    assert metrics["clip_high"].item() == (removed & above).sum().item() > 0


def test_sequence_level_by_hand() -> None:
    # Log-ratios (0, 2) and (-1): means 1 and -1. A > 0 clips the first response, A < 0 the second.
    policy = torch.tensor([0.0, 2.0, -1.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -2.0], dtype=torch.float64)
    zeros, ones = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    sequence = {"lengths": [2, 1], "loss": "clip", "ratio_level": "sequence"}
    loss, metrics = policy_loss(policy, zeros, advantages, ones, clip_low=0.2, clip_high=0.28, **sequence)
    assert loss.item() == pytest.approx(-(1.28 + 1.28 - 2 * 0.8))
    assert (metrics["clip_high"].item(), metrics["clip_low"].item()) == (2.0, 1.0)
    assert metrics["ratio_max"].item() == pytest.approx(math.e)
    # The KL is still that of tokens: e^2 - 1 - 2 and e^-1 - 1 + 1.
    assert metrics["behaviour_kl"].item() == pytest.approx(math.exp(2) - 3 + math.exp(-1))
    # Without clipping each token of a response carries an equal share of its sum.
    loss, _ = policy_loss(policy, zeros, advantages, ones, clip_low=1.0, clip_high=10.0, **sequence)
    loss.backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([-math.e, -math.e, 2 * math.exp(-1)])


def test_dual_clip_by_hand() -> None:
    # Ratios e^2 and e^0.5 with A = -1: beyond c = 3 the first counts 3 and has no gradient, the second is as it was.
    policy = torch.tensor([2.0, 0.5, 2.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([-1.0, -1.0, 0.0], dtype=torch.float64)
    ones = torch.ones(3, dtype=torch.float64)
    loss, metrics = policy_loss(policy, 0 * ones, advantages, ones, lengths=[3], dual_clip=3.0, **TOKEN_CLIP)
    loss.backward()
    assert loss.item() == pytest.approx(3 + math.exp(0.5))
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([0.0, math.exp(0.5), 0.0])
    assert (metrics["clip_high"].item(), metrics["clip_low"].item()) == (1.0, 0.0)
    assert metrics["ratio_max"].item() == pytest.approx(math.exp(2))


def test_cispo_clips_the_factor_and_keeps_every_gradient() -> None:
    logprobs = [-0.5, -3.0, -1.0, -1.0]
    policy = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    behaviour = policy.detach() - torch.tensor([1.0, -1.0, 0.1, 1.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 2.0, 0.0], dtype=torch.float64)
    ones = torch.ones(4, dtype=torch.float64)
    cispo = TOKEN_CLIP | {"loss": "cispo"}
    loss, metrics = policy_loss(policy, behaviour, advantages, ones, lengths=[4], **cispo)
    loss.backward()
    factors = [1.28, 0.8, math.exp(0.1)]
    assert loss.item() == pytest.approx(-(-0.5 * factors[0] + 3.0 * factors[1] - 2.0 * factors[2]))
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([-factors[0], factors[1], -2 * factors[2], 0.0])
    # The last token trains nothing, so nothing of it was clipped.
    assert (metrics["clip_high"].item(), metrics["clip_low"].item()) == (1.0, 1.0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_splitting_between_sequences_changes_neither_loss_nor_gradient(variant: dict[str, Any]) -> None:
    policy, *rest = random_batch(5, 30)
    importance = torch.from_numpy(np.random.default_rng(5).uniform(0.0, 2.0, 30))
    lengths = [1, 8, 4, 10, 7]
    whole, parts = policy.clone().requires_grad_(), policy.clone().requires_grad_()
    loss, metrics = policy_loss(whole, *rest, lengths=lengths, importance=importance, **variant, **BOUNDS)
    loss.backward()
    pieces = [(slice(0, 1), lengths[:1]), (slice(1, 13), lengths[1:3]), (slice(13, 30), lengths[3:])]
    cut = [
        policy_loss(
            parts[piece],
            *(tensor[piece] for tensor in rest),
            lengths=of_piece,
            importance=importance[piece],
            **variant,
            **BOUNDS,
        )
        for piece, of_piece in pieces
    ]
    torch.stack([loss for loss, _ in cut]).sum().backward()
    torch.testing.assert_close(whole.grad, parts.grad)
    combine = {"ratio_max": max, "ratio_min": min}
    for name, value in metrics.items():
        assert combine.get(name, sum)(of_piece[name].item() for _, of_piece in cut) == pytest.approx(value.item())


def test_only_the_policy_gets_a_gradient() -> None:
    policy, behaviour, advantages, weights = random_batch(6, 5)
    importance = torch.ones(5, dtype=torch.float64, requires_grad=True)
    behaviour.requires_grad_()
    policy.requires_grad_()
    loss, _ = policy_loss(policy, behaviour, advantages, weights, lengths=[2, 3], importance=importance, **TOKEN_CLIP)
    loss.backward()
    assert policy.grad is not None
    assert behaviour.grad is None
    assert importance.grad is None


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("difference", [-1e4, -100.0, 100.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_extreme_log_ratios_stay_finite(
    variant: dict[str, Any], dtype: torch.dtype, difference: float, advantage: float
) -> None:
    policy = torch.tensor([-0.5, -0.5], dtype=dtype, requires_grad=True)
    behaviour = torch.tensor([-0.5 - difference, -0.5], dtype=dtype)
    ones = torch.ones(2, dtype=dtype)
    loss, metrics = policy_loss(policy, behaviour, advantage * ones, ones, lengths=[1, 1], **variant, **BOUNDS)
    loss.backward()
    assert policy.grad is not None
    assert all(torch.isfinite(value).all() for value in (loss, policy.grad, *metrics.values()))
    if variant["loss"] == "clip":  # held by the clamp: no gradient; its neighbour is on policy
        assert policy.grad.tolist() == pytest.approx([0.0, -advantage])
    assert metrics["ratio_max"].item() == pytest.approx(math.exp(CLAMP) if difference > 0 else 1.0)
    assert metrics["ratio_min"].item() == pytest.approx(1.0 if difference > 0 else math.exp(-CLAMP))


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_empty_batch_has_loss_zero(variant: dict[str, Any]) -> None:
    empty = torch.zeros(0, requires_grad=True)
    loss, metrics = policy_loss(empty, empty, empty, empty, lengths=[], **variant, **BOUNDS)
    loss.backward()
    assert loss.item() == 0.0
    assert metrics.pop("ratio_min").item() == math.inf  # so that it is never the smallest
    assert all(value.item() == 0.0 for value in metrics.values())


def test_what_does_not_fit_is_named() -> None:
    flat = torch.zeros(4)
    with pytest.raises(ValueError, match=r"advantages \[3\].*All must be \[R_total\].*Repeat what belongs"):
        policy_loss(flat, flat, torch.zeros(3), flat, lengths=[4], **TOKEN_CLIP)
    with pytest.raises(ValueError, match=r"importance \[1\].*All must be \[R_total\]"):
        policy_loss(flat, flat, flat, flat, lengths=[4], importance=torch.ones(1), **TOKEN_CLIP)
    with pytest.raises(ConfigError, match=r"dual_clip bounds the clipped loss, and algorithm.loss is cispo. Set"):
        policy_loss(flat, flat, flat, flat, lengths=[4], dual_clip=3.0, **{**TOKEN_CLIP, "loss": "cispo"})
    with pytest.raises(ValueError, match=r"'ppo' is no loss. Allowed are clip, cispo, or a function of your own. Name"):
        policy_loss(flat, flat, flat, flat, lengths=[4], **{**TOKEN_CLIP, "loss": "ppo"})


def test_the_mean_is_held_and_not_its_terms() -> None:
    policy = torch.tensor([30.0, 2.0, 1e4, 0.0], dtype=torch.float64, requires_grad=True)
    ratios = log_ratios(policy, torch.zeros(4, dtype=torch.float64), [2, 2], "sequence", 20.0)
    assert ratios.tolist() == [16.0, 16.0, 20.0, 20.0]
    ratios.sum().backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("lengths", [[2, 1], [4, 0], [5, -1]])
def test_lengths_that_do_not_fit_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"for 4 tokens. Each must be at least 1 and their sum the number of tokens"):
        log_ratios(torch.zeros(4), torch.zeros(4), lengths, "token")
    with pytest.raises(ValueError, match=r"Response lengths are"):
        importance_weights(torch.zeros(4), torch.zeros(4), lengths, AlgorithmSettings(importance_cap=2.0))


IMPORTANCE = list(product(["token", "sequence", "geometric"], ["truncate", "mask", "reject"], [None, 0.75]))


def of_importance(level: str, mode: str, floor: float | None, **more: Any) -> AlgorithmSettings:
    values = {"importance_level": level, "importance_mode": mode, "importance_floor": floor}
    return AlgorithmSettings(**{"importance_cap": 1.5, **values, **more})


def numpy_importance(difference: np.ndarray, lengths: list[int], level: str, clamp: float) -> np.ndarray:
    """[R_total] ratios of trainer and rollout, response by response."""
    ratios = []
    for of_response in np.split(difference, np.cumsum(lengths)[:-1]):
        exponents = {
            "token": of_response,
            "sequence": [of_response.sum()] * len(of_response),
            "geometric": [of_response.mean()] * len(of_response),
        }[level]
        ratios += [math.exp(min(max(exponent, -clamp), clamp)) for exponent in exponents]
    return np.array(ratios)


@pytest.mark.parametrize(("level", "mode", "floor"), IMPORTANCE)
@pytest.mark.parametrize("num_tokens", [1, 50])
def test_importance_weights_equal_numpy(level: str, mode: str, floor: float | None, num_tokens: int) -> None:
    trainer, rollout, *_ = random_batch(1, num_tokens, spread=2.0)
    lengths = random_lengths(1, num_tokens)
    settings = of_importance(level, mode, floor, log_ratio_clamp=1.0)
    weights, metrics = importance_weights(trainer.requires_grad_(), rollout, lengths, settings)
    ratios = numpy_importance((trainer.detach() - rollout).numpy(), lengths, level, 1.0)
    low, high = ratios < (floor or 0.0), ratios > 1.5
    if num_tokens > 1:
        assert high.any() and low.any() == (floor is not None) and not (low | high).all()
    if mode == "truncate":
        expected = np.minimum(np.maximum(ratios, floor or 0.0), 1.5)
    else:
        expected = np.where(low | high, 0.0, ratios if mode == "mask" else 1.0)
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-9)
    assert not weights.requires_grad
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {
            "importance_mean": expected.sum(),
            "importance_square": (expected**2).sum(),
            "importance_low": low.sum(),
            "importance_high": high.sum(),
            "importance_min": ratios.min(),
            "importance_max": ratios.max(),
        }
    )


# Trainer less rollout, responses of 3, 2, 1 and 4 tokens; and what grpo_trainer.py of TRL 1.16.0 and
# rollout_corr_helper.py of verl at 1dda039b make of it with the upper bound 1.5 (verl's rollout_rs: "1/1.5_1/0.75").
MISMATCH = [0.25, 1.25, -0.5, 0.25, -1.75, 0.125, 0.0, 0.125, -0.25, 0.25]
OF_TOOLKITS = {
    # token_truncate; verl: rollout_is=token
    ("token", "truncate", None): [
        1.284025,
        1.5,
        0.606531,
        1.284025,
        0.173774,
        1.133148,
        1,
        1.133148,
        0.778801,
        1.284025,
    ],
    ("token", "truncate", 0.75): [1.284025, 1.5, 0.75, 1.284025, 0.75, 1.133148, 1, 1.133148, 0.778801, 1.284025],
    # token_mask; verl: rollout_is=token, "0.75_1.5"
    ("token", "mask", None): [1.284025, 0, 0.606531, 1.284025, 0.173774, 1.133148, 1, 1.133148, 0.778801, 1.284025],
    ("token", "mask", 0.75): [1.284025, 0, 0, 1.284025, 0, 1.133148, 1, 1.133148, 0.778801, 1.284025],
    # sequence_truncate; verl: rollout_is=sequence
    ("sequence", "truncate", None): [1.5] * 3 + [0.22313] * 2 + [1.133148] * 5,
    ("sequence", "truncate", 0.75): [1.5] * 3 + [0.75] * 2 + [1.133148] * 5,
    # sequence_mask; verl: rollout_is=sequence, "0.75_1.5"
    ("sequence", "mask", None): [0] * 3 + [0.22313] * 2 + [1.133148] * 5,
    ("sequence", "mask", 0.75): [0] * 3 + [0] * 2 + [1.133148] * 5,
    # verl: rollout_rs=token_k1, seq_sum_k1, seq_mean_k1
    ("token", "reject", 0.75): [1, 0, 0, 1, 0, 1, 1, 1, 1, 1],
    ("sequence", "reject", 0.75): [0] * 5 + [1] * 5,
    ("geometric", "reject", 0.75): [1] * 3 + [0] * 2 + [1] * 5,
}


@pytest.mark.parametrize(("level", "mode", "floor"), OF_TOOLKITS)
def test_importance_weights_equal_those_of_trl_and_verl(level: str, mode: str, floor: float | None) -> None:
    weights, _ = importance_weights(
        torch.tensor(MISMATCH), torch.zeros(10), [3, 2, 1, 4], of_importance(level, mode, floor)
    )
    assert weights.tolist() == pytest.approx(OF_TOOLKITS[level, mode, floor], abs=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_importance_weights_of_a_response_do_not_depend_on_the_others(level: str) -> None:
    trainer, rollout, *_ = (tensor.float() for tensor in random_batch(3, 500))
    settings = of_importance(level, "truncate", None)
    whole, _ = importance_weights(trainer, rollout, [1, 299, 200], settings)
    parts = [slice(0, 1), slice(1, 300), slice(300, 500)]
    alone = [importance_weights(trainer[p], rollout[p], [p.stop - p.start], settings)[0] for p in parts]
    assert torch.equal(whole, torch.cat(alone))


def test_extreme_importance_ratios_stay_finite() -> None:
    trainer, cap = torch.tensor([1e4, -1e4, 0.0, 15.0, 15.0]), {"importance_cap": 100.0}
    weights, _ = importance_weights(trainer, torch.zeros(5), [1] * 5, AlgorithmSettings(**cap))
    assert weights.tolist() == pytest.approx([100.0, math.exp(-20.0), 1.0, 100.0, 100.0])
    weights, metrics = importance_weights(
        trainer, torch.zeros(5), [1, 1, 1, 2], AlgorithmSettings(importance_level="sequence", **cap)
    )
    assert weights.tolist() == pytest.approx([100.0, math.exp(-20.0), 1.0, 100.0, 100.0])
    extremes = [metrics[Metric(name)].item() for name in ("importance_min", "importance_max")]
    assert extremes == pytest.approx([math.exp(-20.0), math.exp(20.0)])


FORMULAS = {"k1": lambda d: d, "k2": lambda d: d**2 / 2, "k3": lambda d: np.exp(-d) - 1 + d}


@pytest.mark.parametrize("estimator", FORMULAS)
@pytest.mark.parametrize("num_tokens", [1, 50])
def test_kl_equals_numpy(estimator: str, num_tokens: int) -> None:
    policy, ref, *_ = random_batch(7, num_tokens, spread=2.0)
    expected = FORMULAS[estimator]((policy - ref).numpy())
    np.testing.assert_allclose(kl_penalty(policy, ref, estimator).numpy(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("estimator", FORMULAS)
def test_the_gradient_of_the_kl_equals_central_differences(estimator: str) -> None:
    policy, ref, *_ = random_batch(8, 16)
    policy.requires_grad_()
    ref.requires_grad_()
    kl_penalty(policy, ref, estimator).sum().backward()
    expected = central_differences(lambda point: kl_penalty(point, ref, estimator).sum().detach(), policy.detach())
    torch.testing.assert_close(policy.grad, expected, rtol=1e-6, atol=1e-8)
    assert ref.grad is None


@pytest.mark.parametrize("estimator", FORMULAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("difference", [-1e4, -100.0, 100.0, 1e4])
def test_the_kl_of_extreme_differences_stays_finite(estimator: str, dtype: torch.dtype, difference: float) -> None:
    policy = torch.tensor([difference], dtype=dtype, requires_grad=True)
    kl = kl_penalty(policy, torch.zeros(1, dtype=dtype), estimator, 20.0)
    kl.sum().backward()
    assert policy.grad is not None
    assert torch.isfinite(kl).all()
    assert torch.isfinite(policy.grad).all()
    if estimator == "k3" and difference < 0:
        assert policy.grad.item() == 0.0


AVERAGES = ["token_mean", "sequence_mean", "sequence_sum", "constant_length"]
MAX_NEW_TOKENS = 2000
RESPONSES = st.lists(
    st.tuples(st.integers(1, MAX_NEW_TOKENS), st.sampled_from([0.0, 1.0, 1.0, 2.5])), min_size=1, max_size=40
)


def test_weights_by_hand() -> None:
    def weights(average: str, **options: list[float]) -> list[float]:
        return response_token_weights([2, 3], average, 5, 2, 10, **options)

    assert weights("token_mean") == [1 / 5, 1 / 5]
    assert weights("sequence_mean") == [1 / 4, 1 / 6]
    assert weights("sequence_sum") == [1 / 2, 1 / 2]
    assert weights("constant_length") == [1 / 20, 1 / 20]
    assert weights("sequence_mean", kept=[0.0, 2.0]) == [0.0, 1 / 3]


@pytest.mark.parametrize("average", AVERAGES)
@settings(deadline=None)
@given(responses=RESPONSES, cut=st.integers(0, 40))
def test_weights_equal_the_loss_averages_and_survive_a_split(
    average: str, responses: list[tuple[int, float]], cut: int
) -> None:
    """The weighted sum of any token values is the average that the name promises, over what trains."""
    lengths, kept = [length for length, _ in responses], [factor for _, factor in responses]
    training = [length for length, factor in responses if factor > 0]
    totals = (sum(training), len(training), MAX_NEW_TOKENS)
    whole = response_token_weights(lengths, average, *totals, kept)
    split = response_token_weights(lengths[:cut], average, *totals, kept[:cut])
    split += response_token_weights(lengths[cut:], average, *totals, kept[cut:])
    assert split == whole
    generator = np.random.default_rng(len(lengths))
    values = [generator.standard_normal(length) for length in lengths]
    sums = np.array([factor * value.sum() for value, factor in zip(values, kept, strict=True)])
    expected = {
        "token_mean": sums.sum() / max(1, sum(training)),
        "sequence_mean": (sums / lengths).sum() / max(1, len(training)),
        "sequence_sum": sums.sum() / max(1, len(training)),
        "constant_length": sums.sum() / MAX_NEW_TOKENS / max(1, len(training)),
    }[average]
    weighted = sum(weight * value.sum() for weight, value in zip(whole, values, strict=True))
    assert weighted == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("average", AVERAGES)
def test_no_sequences_on_this_rank(average: str) -> None:
    assert response_token_weights([], average, 0, 0, 10) == []
    assert response_token_weights([], average, 7, 2, 10) == []
    assert response_token_weights([5], average, 0, 0, 10, kept=[0.0]) == [0.0]


def test_an_empty_response_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[2, 0\]\. Each must be at least 1 token\. Leave empty responses out"):
        response_token_weights([2, 0], "token_mean", 2, 2, 10)


@pytest.mark.parametrize("totals", [(4, 2), (5, 1)])
def test_totals_of_a_part_only_are_refused(totals: tuple[int, int]) -> None:
    message = "at least the 5 tokens and 2 sequences given that train. Pass the totals of the whole optimizer batch"
    with pytest.raises(ValueError, match=re.escape(message)):
        response_token_weights([2, 3], "token_mean", *totals, 10)
    with pytest.raises(ValueError, match=re.escape(message)):
        response_token_weights([2, 9, 3], "token_mean", *totals, 10, kept=[1.0, 0.0, 0.5])
