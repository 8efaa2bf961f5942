"""The KL estimators equal their formulas, and k1 and k3 the divergence in expectation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.algorithms.oracles import central_differences, random_batch
from vlm_pg.algorithms.losses import kl_penalty

FORMULAS = {"k1": lambda d: d, "k2": lambda d: d**2 / 2, "k3": lambda d: np.exp(-d) - 1 + d}


@pytest.mark.parametrize("estimator", FORMULAS)
@pytest.mark.parametrize("num_tokens", [1, 50])
def test_equals_numpy(estimator: str, num_tokens: int) -> None:
    policy, ref, *_ = random_batch(7, num_tokens, spread=2.0)
    expected = FORMULAS[estimator]((policy - ref).numpy())
    np.testing.assert_allclose(kl_penalty(policy, ref, estimator).numpy(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("estimator", FORMULAS)
def test_gradient_equals_central_differences(estimator: str) -> None:
    policy, ref, *_ = random_batch(8, 16)
    policy.requires_grad_()
    ref.requires_grad_()
    kl_penalty(policy, ref, estimator).sum().backward()
    expected = central_differences(lambda point: kl_penalty(point, ref, estimator).sum().detach(), policy.detach())
    torch.testing.assert_close(policy.grad, expected, rtol=1e-6, atol=1e-8)
    assert ref.grad is None


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_never_negative_and_zero_where_equal(estimator: str) -> None:
    policy, ref, *_ = random_batch(9, 200, spread=2.0)
    assert (kl_penalty(policy, ref, estimator) > 0).all()
    assert (kl_penalty(policy, policy, estimator) == 0).all()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_estimates_the_divergence(estimator: str) -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64), torch.tensor([0.3, 0.4, 0.3], dtype=torch.float64)
    expectation = (p * kl_penalty(p.log(), q.log(), estimator)).sum()
    assert expectation.item() == pytest.approx((p * (p.log() - q.log())).sum().item(), rel=1e-12)


@pytest.mark.parametrize("estimator", FORMULAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("difference", [-1e4, -100.0, 100.0, 1e4])
def test_extreme_differences_stay_finite(estimator: str, dtype: torch.dtype, difference: float) -> None:
    policy = torch.tensor([difference], dtype=dtype, requires_grad=True)
    kl = kl_penalty(policy, torch.zeros(1, dtype=dtype), estimator, 20.0)
    kl.sum().backward()
    assert policy.grad is not None
    assert torch.isfinite(kl).all()
    assert torch.isfinite(policy.grad).all()
    if estimator == "k3" and difference < 0:
        assert policy.grad.item() == 0.0


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match=r"ref_logprobs \[2, 2\]"):
        kl_penalty(torch.zeros(2, 2), torch.zeros(2, 2), "k3")
    with pytest.raises(ValueError, match=r"estimator 'k4'. Allowed are k1, k2, k3. Set algorithm.kl_estimator"):
        kl_penalty(torch.zeros(2), torch.zeros(2), "k4")  # type: ignore[arg-type]
