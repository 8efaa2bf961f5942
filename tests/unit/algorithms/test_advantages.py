"""Advantages equal their formulas in NumPy, by rollout and by token; a group without spread trains nothing."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_pg.algorithms.advantages import (
    batch_advantages,
    kl_returns,
    mean_and_std,
    moments,
    part_advantages,
    token_rounding,
    whitened,
)

REWARDS = st.one_of(st.none(), st.floats(-10, 10).map(lambda value: round(value, 3)))
GROUPS = st.lists(st.lists(REWARDS, max_size=8), max_size=6)
BASELINES = ["group_mean", "leave_one_out", "none"]
SCALES = ["std", "batch", "whiten", "none"]
ALL = list(product(BASELINES, SCALES))
OF_ONE_GROUP = list(product(["group_mean", "leave_one_out"], ["std", "none"]))


def numpy_advantages(groups: list[list[float | None]], baseline: str, scale: str) -> list[np.ndarray]:
    """The definitions, group by group, with NaN for what has no value; in long doubles, whose rounding is no matter."""

    def std(values: np.ndarray) -> float:
        valued = values[~np.isnan(values)]
        return valued.std(ddof=1) if len(valued) > 1 else 0.0

    rewards = [np.array([np.nan if r is None else r for r in group], dtype=np.longdouble) for group in groups]
    differences = []
    for group in rewards:
        valued = np.flatnonzero(~np.isnan(group))
        difference = group.copy()
        for i in valued:
            others = group[[j for j in valued if j != i]]
            if baseline == "group_mean":
                difference[i] -= group[valued].mean()
            elif baseline == "leave_one_out":
                difference[i] = difference[i] - others.mean() if len(others) else 0.0
        differences.append(difference)
    everything = np.concatenate([*differences, np.empty(0)])
    if scale == "std":
        differences = [d / (std(r) + 1e-4) for d, r in zip(differences, rewards, strict=True)]
    elif scale == "batch":
        differences = [d / (std(np.concatenate(rewards)) + 1e-4) for d in differences]
    elif scale == "whiten":
        valued = everything[~np.isnan(everything)]
        mean = valued.mean() if len(valued) else 0.0
        differences = [(d - mean) / (std(everything) + 1e-8) for d in differences]
    return [np.nan_to_num(d, nan=0.0) for d in differences]


def test_by_hand() -> None:
    # mean 0.5, deviations +-0.5, sample variance (0.25 + 0.25 + 0) / 2 = 0.25; means of the others 0.25, 0.75, 0.5
    rewards = [1.0, 0.0, None, 0.5]
    assert batch_advantages([rewards], "group_mean", "none")[0] == [0.5, -0.5, 0.0, 0.0]
    assert batch_advantages([rewards], "leave_one_out", "none")[0] == [0.75, -0.75, 0.0, 0.0]
    scaled = batch_advantages([rewards], "group_mean", "std")[0]
    assert scaled == pytest.approx([0.5 / 0.5001, -0.5 / 0.5001, 0.0, 0.0], abs=1e-12)


def test_whole_step_by_hand() -> None:
    # All rewards: 1, 0, 1, 1: sample variance 0.25. Differences: 0.5, -0.5, 0, 0: sample variance 0.5 / 3.
    groups = [[1.0, 0.0], [1.0, None, 1.0]]
    first, second = batch_advantages(groups, "group_mean", "batch")
    assert first == pytest.approx([0.5 / 0.5001, -0.5 / 0.5001], abs=1e-12)
    assert second == [0.0, 0.0, 0.0]
    first, second = batch_advantages(groups, "group_mean", "whiten")
    assert first == pytest.approx([0.5 * 6**0.5, -0.5 * 6**0.5], abs=1e-6)
    assert second == [0.0, 0.0, 0.0]
    first, second = batch_advantages(groups, "none", "whiten")
    assert first == pytest.approx([0.5, -1.5], abs=1e-6)
    assert second == pytest.approx([0.5, 0.0, 0.5], abs=1e-6)


@pytest.mark.parametrize(("baseline", "scale"), ALL)
@settings(deadline=None, max_examples=50)
@given(groups=GROUPS)
def test_matches_numpy(baseline: str, scale: str, groups: list[list[float | None]]) -> None:
    advantages = batch_advantages(groups, baseline, scale)
    expected = numpy_advantages(groups, baseline, scale)
    assert [len(group) for group in advantages] == [len(group) for group in groups]
    for ours, theirs in zip(advantages, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("baseline", "scale"), OF_ONE_GROUP)
@settings(deadline=None, max_examples=50)
@given(groups=GROUPS)
def test_scales_of_one_group_do_not_see_the_others(baseline: str, scale: str, groups: list[list[float | None]]) -> None:
    assert batch_advantages(groups, baseline, scale) == [batch_advantages([g], baseline, scale)[0] for g in groups]


@pytest.mark.parametrize("baseline", BASELINES)
@settings(deadline=None, max_examples=50)
@given(groups=GROUPS)
def test_whitened_advantages_have_mean_0_and_deviation_1(baseline: str, groups: list[list[float | None]]) -> None:
    advantages = batch_advantages(groups, baseline, "whiten")
    valued = [
        advantage
        for ours, rewards in zip(advantages, groups, strict=True)
        for advantage, reward in zip(ours, rewards, strict=True)
        if reward is not None
    ]
    if len(valued) > 1 and np.ptp(valued) > 0:
        assert np.mean(valued) == pytest.approx(0.0, abs=1e-9)
        assert np.std(valued, ddof=1) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(("baseline", "scale"), list(product(["group_mean", "leave_one_out"], SCALES)))
@pytest.mark.parametrize("rewards", [[0.1] * 7, [1.1] * 3 + [None], [0.7], [None, 0.3], [None, None], []])
def test_no_spread_is_exactly_zero(baseline: str, scale: str, rewards: list[float | None]) -> None:
    others = [[0.1, 0.7, 0.3], [None, 1.0, 0.2]]
    assert batch_advantages([others[0], rewards, others[1]], baseline, scale)[1] == [0.0] * len(rewards)


@pytest.mark.parametrize("rewards", [[0.1] * 7, [0.7], [None]])
def test_no_spread_in_the_whole_step_whitens_to_exactly_zero(rewards: list[float | None]) -> None:
    assert batch_advantages([rewards, rewards], "none", "whiten") == [[0.0] * len(rewards)] * 2


@pytest.mark.parametrize(("baseline", "scale"), ALL)
def test_a_missing_reward_does_not_move_the_others(baseline: str, scale: str) -> None:
    without = batch_advantages([[1.0, 0.0, 0.25], [0.5, 0.75]], baseline, scale)
    missing = batch_advantages([[None, 1.0, None, 0.0, 0.25], [None, None], [0.5, 0.75, None]], baseline, scale)
    assert missing == [[0.0, without[0][0], 0.0, *without[0][1:]], [0.0, 0.0], [*without[1], 0.0]]


def test_very_large_rewards_do_not_overflow() -> None:
    assert batch_advantages([[1e200, -1e200]], "group_mean", "std") == [pytest.approx([0.5**0.5, -(0.5**0.5)])]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=r"Each must be a finite number or None. Return None from a reward"):
        batch_advantages([[1.0, bad]], "group_mean", "std")


@pytest.mark.parametrize(("baseline", "scale"), ALL)
@settings(deadline=None, max_examples=20)
@given(data=st.data(), sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_parts_are_scaled_one_by_one(baseline: str, scale: str, data: st.DataObject, sizes: list[int]) -> None:
    groups = st.tuples(*(st.lists(REWARDS, min_size=size, max_size=size) for size in sizes)).map(list)
    parts = {name: data.draw(groups, label=name) for name in ("accuracy", "format")}
    advantages = part_advantages(parts, {"accuracy": 1.0, "format": -0.5}, baseline, scale)
    both = [
        [a is not None and f is not None for a, f in zip(*pair, strict=True)]
        for pair in zip(parts["accuracy"], parts["format"], strict=True)
    ]
    accuracy, form = (
        numpy_advantages(
            [[v if ok else None for v, ok in zip(*pair, strict=True)] for pair in zip(parts[name], both, strict=True)],
            baseline,
            scale,
        )
        for name in ("accuracy", "format")
    )
    for ours, a, f in zip(advantages, accuracy, form, strict=True):
        np.testing.assert_allclose(ours, a - 0.5 * f, rtol=1e-9, atol=1e-9)


VALUES = st.lists(st.floats(-1e4, 1e4), max_size=30)


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
