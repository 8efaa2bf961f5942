"""The losses equal their formulas in NumPy, their gradients equal central differences, and nothing overflows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vlm_pg.algorithms.losses import kl_k3, policy_loss

CLIP_LOW, CLIP_HIGH, CLAMP = 0.2, 0.28, 20.0


def random_batch(seed: int, num_tokens: int, spread: float = 0.5) -> tuple[torch.Tensor, ...]:
    """Policy and behaviour log-probabilities, advantages and weights, float64 [num_tokens]."""
    generator = np.random.default_rng(seed)
    behaviour = -generator.exponential(1.0, num_tokens)
    policy = behaviour + spread * generator.standard_normal(num_tokens)
    advantages = generator.standard_normal(num_tokens)
    weights = generator.uniform(0.01, 1.0, num_tokens)
    return tuple(torch.from_numpy(array) for array in (policy, behaviour, advantages, weights))


def numpy_policy_loss(policy, behaviour, advantages, weights) -> float:
    total = 0.0
    for p, b, a, w in zip(policy.tolist(), behaviour.tolist(), advantages.tolist(), weights.tolist(), strict=True):
        ratio = math.exp(min(max(p - b, -CLAMP), CLAMP))
        total -= w * min(ratio * a, min(max(ratio, 1 - CLIP_LOW), 1 + CLIP_HIGH) * a)
    return total


def loss_of(*batch: torch.Tensor) -> torch.Tensor:
    return policy_loss(*batch, clip_low=CLIP_LOW, clip_high=CLIP_HIGH, log_ratio_clamp=CLAMP)[0]


def central_differences(function, point: torch.Tensor, step: float = 1e-6) -> torch.Tensor:
    gradient = torch.zeros_like(point)
    for index in range(point.numel()):
        shift = torch.zeros_like(point)
        shift[index] = step
        gradient[index] = (function(point + shift) - function(point - shift)) / (2 * step)
    return gradient


@pytest.mark.parametrize("num_tokens", [1, 2, 37])
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
def test_policy_loss_equals_numpy(num_tokens: int, spread: float) -> None:
    batch = random_batch(num_tokens, num_tokens, spread)
    assert loss_of(*batch).item() == pytest.approx(numpy_policy_loss(*batch), rel=1e-9, abs=1e-9)


def test_policy_loss_gradient_equals_central_differences() -> None:
    policy, *rest = random_batch(3, 24, spread=0.4)
    policy.requires_grad_()
    loss_of(policy, *rest).backward()
    expected = central_differences(lambda point: loss_of(point, *rest), policy.detach())
    torch.testing.assert_close(policy.grad, expected, rtol=1e-6, atol=1e-8)


def test_on_policy_the_gradient_is_reinforce() -> None:
    policy, _, advantages, weights = random_batch(4, 9)
    policy.requires_grad_()
    loss_of(policy, policy.detach().clone(), advantages, weights).backward()
    torch.testing.assert_close(policy.grad, -weights * advantages)


def test_clipped_tokens_have_no_gradient_and_are_counted_by_side() -> None:
    # Ratios e^1, e^1, e^-1, e^-1 with advantages +, -, +, -: the clip removes the first and the last.
    policy = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    ones = torch.ones(4, dtype=torch.float64)
    loss, metrics = policy_loss(policy, torch.zeros_like(ones), advantages, ones, clip_low=0.2, clip_high=0.28)
    loss.backward()
    assert loss.item() == pytest.approx(-(1.28 - math.e + math.exp(-1) - 0.8))
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([0.0, math.e, -math.exp(-1), 0.0])
    values = {name: value.item() for name, value in metrics.items()}
    assert values["tokens"] == 4.0
    assert (values["clipped_high"], values["clipped_low"]) == (1.0, 1.0)
    assert values["ratio_max"] == pytest.approx(math.e)
    assert values["ratio_sum"] == pytest.approx(2 * math.e + 2 * math.exp(-1))
    assert values["behaviour_kl_sum"] == pytest.approx(2 * (math.e - 2) + 2 * math.exp(-1))
    assert not any(value.requires_grad for value in metrics.values())


def test_splitting_the_tokens_does_not_change_loss_or_gradient() -> None:
    policy, *rest = random_batch(5, 30)
    whole = policy.clone().requires_grad_()
    parts = policy.clone().requires_grad_()
    loss_of(whole, *rest).backward()
    pieces = [slice(0, 1), slice(1, 13), slice(13, 30)]
    losses = [loss_of(parts[piece], *(tensor[piece] for tensor in rest)) for piece in pieces]
    torch.stack(losses).sum().backward()
    torch.testing.assert_close(whole.grad, parts.grad)


def test_behaviour_logprobs_get_no_gradient() -> None:
    policy, behaviour, advantages, weights = random_batch(6, 5)
    behaviour.requires_grad_()
    loss_of(policy.requires_grad_(), behaviour, advantages, weights).backward()
    kl_k3(policy, behaviour).sum().backward()
    assert behaviour.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("difference", [-1e4, -100.0, 100.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_extreme_log_ratios_stay_finite(dtype: torch.dtype, difference: float, advantage: float) -> None:
    policy = torch.tensor([difference], dtype=dtype, requires_grad=True)
    zero, one = torch.zeros(1, dtype=dtype), torch.ones(1, dtype=dtype)
    loss, metrics = policy_loss(policy, zero, advantage * one, one, clip_low=0.2, clip_high=0.2)
    kl = kl_k3(policy, zero)
    (loss + kl.sum()).backward()
    assert all(torch.isfinite(value).all() for value in (loss, kl, policy.grad, *metrics.values()))


def test_an_empty_batch_has_loss_zero() -> None:
    empty = torch.zeros(0)
    loss, metrics = policy_loss(empty, empty, empty, empty, clip_low=0.2, clip_high=0.2)
    assert loss.item() == 0.0
    assert all(value.item() == 0.0 for value in metrics.values())


def test_kl_equals_numpy_and_is_never_negative() -> None:
    policy, ref, *_ = random_batch(7, 50, spread=2.0)
    difference = (policy - ref).numpy()
    np.testing.assert_allclose(kl_k3(policy, ref).numpy(), np.exp(-difference) - 1 + difference, rtol=1e-9, atol=1e-9)
    assert (kl_k3(policy, ref) >= 0).all()
    assert (kl_k3(policy, policy) == 0).all()


def test_kl_gradient_equals_central_differences() -> None:
    policy, ref, *_ = random_batch(8, 16)
    policy.requires_grad_()
    kl_k3(policy, ref).sum().backward()
    expected = central_differences(lambda point: kl_k3(point, ref).sum(), policy.detach())
    torch.testing.assert_close(policy.grad, expected, rtol=1e-6, atol=1e-8)


def test_kl_estimates_the_divergence() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64), torch.tensor([0.3, 0.4, 0.3], dtype=torch.float64)
    expectation = (p * kl_k3(p.log(), q.log())).sum()
    assert expectation.item() == pytest.approx((p * (p.log() - q.log())).sum().item(), rel=1e-12)


def test_shapes_that_differ_are_named() -> None:
    flat, square = torch.zeros(4), torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"advantages \[3\].*All must be \[R_total\].*Repeat what belongs"):
        policy_loss(flat, flat, torch.zeros(3), flat, clip_low=0.2, clip_high=0.2)
    with pytest.raises(ValueError, match=r"ref_logprobs \[2, 2\]"):
        kl_k3(square, square)
