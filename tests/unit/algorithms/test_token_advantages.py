"""Token-level advantages: KL to the end of the response, and whitening over the tokens of all ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_pg.algorithms.advantages import kl_returns, mean_and_std, moments, token_rounding, whitened

VALUES = st.lists(st.floats(-1e4, 1e4), max_size=30)


def test_kl_returns_by_hand() -> None:
    returns = kl_returns(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), 0.1)
    assert returns.tolist() == pytest.approx([-0.6, -0.5, -0.3], abs=1e-12)


@settings(deadline=None)
@given(values=VALUES, coef=st.floats(0, 10))
def test_kl_returns_equal_numpy(values: list[float], coef: float) -> None:
    kl = np.array(values, dtype=np.float64)
    expected = [-coef * kl[t:].sum() for t in range(len(kl))]
    np.testing.assert_allclose(kl_returns(torch.from_numpy(kl), coef).numpy(), expected, rtol=1e-9, atol=1e-6)


@settings(deadline=None)
@given(ranks=st.lists(st.lists(VALUES, max_size=4), min_size=1, max_size=3))
def test_ranks_add_up_to_the_moments_of_all(ranks: list[list[list[float]]]) -> None:
    of_ranks = [moments([torch.tensor(values, dtype=torch.float64) for values in rank]) for rank in ranks]
    mean, std = mean_and_std(*(sum(column) for column in zip(*of_ranks, strict=True)))
    everything = np.array([value for rank in ranks for values in rank for value in values], dtype=np.float64)
    assert mean == pytest.approx(everything.mean() if len(everything) else 0.0, rel=1e-9, abs=1e-9)
    expected = everything.std(ddof=1) if len(everything) > 1 else 0.0
    # The squared sum loses what is 1e-16 of the largest value squared.
    assert std**2 == pytest.approx(expected**2, rel=1e-9, abs=1e-13 * float(np.abs(everything).max(initial=1.0)) ** 2)


def test_moments_are_float64_whatever_comes() -> None:
    # In float32 the squares of 4097 would lose their last digit: 16785409 > 2^24.
    assert moments([torch.tensor([4097.0]), torch.tensor([1.0, 1.0])]) == (3.0, 4099.0, 16785411.0)
    assert moments([]) == (0.0, 0.0, 0.0)


def test_equal_values_have_no_deviation() -> None:
    _, std = mean_and_std(*moments([torch.full((7,), 0.1, dtype=torch.float64)]))
    assert std == pytest.approx(0.0, abs=1e-8)
    assert mean_and_std(1.0, 5.0, 25.0) == (5.0, 0.0)


def test_whitened_tokens_have_mean_0_and_deviation_1() -> None:
    values = torch.from_numpy(np.random.default_rng(0).normal(3.0, 2.0, 50))
    white = whitened(values, *mean_and_std(*moments([values])), rounding=1e-6).numpy()
    expected = (values.numpy() - values.numpy().mean()) / (values.numpy().std(ddof=1) + 1e-8)
    np.testing.assert_allclose(white, expected, rtol=1e-9, atol=1e-9)
    assert torch.equal(whitened(torch.tensor([0.5]), 0.5, 0.0, 0.0), torch.zeros(1))


@pytest.mark.parametrize("reward", [0.0, 1.0, -3.0])
def test_equal_rewards_less_a_kl_of_rounding_are_not_blown_up(reward: float) -> None:
    """What is left of equal rewards is rounding; divided by its own deviation it would be a full-size update."""
    noise = 1e-7 * torch.randn(200, generator=torch.Generator().manual_seed(0))
    values = reward + kl_returns(noise, 0.1).float()
    mean, std = mean_and_std(*moments([values]))
    assert torch.equal(whitened(values, mean, std, token_rounding(abs(reward), 0.1, 200)), torch.zeros(200))
    real = reward + kl_returns(1e5 * noise, 0.1).float()
    mean, std = mean_and_std(*moments([real]))
    assert float(whitened(real, mean, std, token_rounding(abs(reward), 0.1, 200)).std()) == pytest.approx(1, abs=1e-3)
