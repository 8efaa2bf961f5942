"""Advantages are taken over the valued rewards of one whole group; a group without spread trains nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_pg.algorithms.advantages import group_advantages

REWARDS = st.one_of(st.none(), st.floats(-10, 10).map(lambda value: round(value, 3)))


def test_by_hand() -> None:
    # mean 0.5, deviations +-0.5, sample variance (0.25 + 0.25 + 0) / 2 = 0.25
    assert group_advantages([1.0, 0.0, None, 0.5], "none") == [0.5, -0.5, 0.0, 0.0]
    scaled = group_advantages([1.0, 0.0, None, 0.5], "std")
    assert scaled == pytest.approx([0.5 / 0.5001, -0.5 / 0.5001, 0.0, 0.0], abs=1e-12)


@pytest.mark.parametrize("scale", ["std", "none"])
@given(rewards=st.lists(REWARDS, max_size=16))
def test_matches_numpy(scale: str, rewards: list[float | None]) -> None:
    valued = np.array([reward for reward in rewards if reward is not None], dtype=np.float64)
    expected = np.zeros(len(rewards))
    if len(valued) >= 2 and np.ptp(valued) > 0:
        divisor = valued.std(ddof=1) + 1e-4 if scale == "std" else 1.0
        expected = np.array([0.0 if r is None else (r - valued.mean()) / divisor for r in rewards])
    np.testing.assert_allclose(group_advantages(rewards, scale), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("rewards", [[0.1] * 7, [1.1] * 3 + [None], [0.7], [None, 0.3], [None, None], []])
def test_no_spread_is_exactly_zero(scale: str, rewards: list[float | None]) -> None:
    assert group_advantages(rewards, scale) == [0.0] * len(rewards)


def test_a_missing_reward_does_not_move_the_others() -> None:
    without = group_advantages([1.0, 0.0, 0.25], "std")
    assert group_advantages([None, 1.0, None, 0.0, 0.25], "std") == [0.0, without[0], 0.0, *without[1:]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=r"Each must be a finite number or None. Return None from a reward"):
        group_advantages([1.0, bad], "std")


def test_an_unknown_scale_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Unknown advantage scale 'rank'. Allowed are std, none. Set algorithm"):
        group_advantages([1.0, 0.0], "rank")  # type: ignore[arg-type]
