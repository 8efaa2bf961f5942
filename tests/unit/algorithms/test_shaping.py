"""Rewards that depend on the group or on the length: hand-computed cases, and NumPy on random ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_pg.algorithms.shaping import length_bonus, overlong_penalty, temporal_bonus

ACCURACIES = st.lists(st.one_of(st.none(), st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0])), max_size=8)
TEMPORAL = {"bonus": 0.3, "ratio": 0.8, "right_above": 0.1}
LENGTH = {"bonus": 0.2, "tokens": (320, 512), "right_above": 0.1}


@pytest.mark.parametrize(
    ("accuracies", "control", "expected"),
    [
        ([1.0, 0.0, 1.0, 0.0], [1.0, 0.0], [0.3, 0.0, 0.3, 0.0]),  # 0.5 >= 0.8 * 0.5
        ([1.0, 0.0, 0.0, 0.0], [1.0, 0.0], [0.0, 0.0, 0.0, 0.0]),  # 0.25 < 0.4
        ([1.0, 0.0, 1.0, 0.0, 0.0], [1.0, 0.0], [0.3, 0.0, 0.3, 0.0, 0.0]),  # 0.4 >= 0.4
        ([1.0, 1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.3, 0.3, 0.3, 0.0, 0.0]),  # 3 / 5 = 0.8 * 3 / 4
        ([0.1, 0.11, 0.5], [0.0], [0.0, 0.3, 0.3]),  # 0.1 is not above 0.1
        ([1.0, None, 0.0], [None, 0.5], [0.3, 0.0, 0.0]),  # means over valued ones: 0.5 >= 0.4
        ([1.0, 1.0], [None, None], [0.0, 0.0]),  # no control
        ([1.0, 1.0], [], [0.0, 0.0]),
        ([None, None], [0.0], [0.0, 0.0]),
        ([0.0, 0.0], [0.0], [0.0, 0.0]),
        ([], [1.0], []),
    ],
)
def test_temporal_bonus_by_hand(
    accuracies: list[float | None], control: list[float | None], expected: list[float]
) -> None:
    assert temporal_bonus(accuracies, control, **TEMPORAL) == expected


@settings(deadline=None)
@given(accuracies=ACCURACIES, control=ACCURACIES)
def test_temporal_bonus_equals_numpy(accuracies: list[float | None], control: list[float | None]) -> None:
    group = np.array([np.nan if a is None else a for a in accuracies], dtype=np.float64)
    valued = [a for a in control if a is not None]
    compared = group[~np.isnan(group)]
    earned = bool(valued) and len(compared) > 0 and round(compared.mean() - 0.8 * np.mean(valued), 9) >= 0
    np.testing.assert_array_equal(temporal_bonus(accuracies, control, **TEMPORAL), 0.3 * (earned & (group > 0.1)))


@pytest.mark.parametrize(
    ("accuracies", "lengths", "expected"),
    [
        ([1.0, 0.5, 0.0, 1.0], [320, 512, 400, 513], [0.2, 0.2, 0.0, 0.0]),
        ([1.0, 1.0], [319, 400], [0.0, 0.2]),  # right but too short still makes two right answers
        ([1.0, 0.0, 0.1, None], [400, 400, 400, 400], [0.0] * 4),  # one right answer alone
        ([0.11, 0.2], [400, 400], [0.2, 0.2]),
        ([], [], []),
    ],
)
def test_length_bonus_by_hand(accuracies: list[float | None], lengths: list[int], expected: list[float]) -> None:
    assert length_bonus(accuracies, lengths, **LENGTH) == expected


@settings(deadline=None)
@given(accuracies=ACCURACIES, data=st.data())
def test_length_bonus_equals_numpy(accuracies: list[float | None], data: st.DataObject) -> None:
    size = len(accuracies)
    lengths = data.draw(st.lists(st.integers(300, 530), min_size=size, max_size=size))
    right = np.array([a or 0.0 for a in accuracies]) > 0.1
    wanted = (np.array(lengths) >= 320) & (np.array(lengths) <= 512)
    expected = 0.2 * (right & wanted & (right.sum() >= 2))
    np.testing.assert_array_equal(length_bonus(accuracies, lengths, **LENGTH), expected)


def test_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"1 lengths for 2 accuracies. Pass one of each per rollout"):
        length_bonus([1.0, 1.0], [400], **LENGTH)


@pytest.mark.parametrize(
    ("length", "truncated", "expected"),
    [
        (1, False, 0.0),
        (16384, False, 0.0),  # 20480 - 4096
        (16385, False, -1 / 4096),
        (18432, False, -0.5),
        (20480, False, -1.0),
        (20480, True, -1.0),
        (100, True, -1.0),  # cut off by something else than its own length
    ],
)
def test_overlong_penalty_of_dapo(length: int, truncated: bool, expected: float) -> None:
    assert overlong_penalty(length, 20480, 0.2, 1.0, truncated) == pytest.approx(expected, abs=1e-12)


@settings(deadline=None)
@given(
    length=st.integers(1, 2000), limit=st.integers(1, 2000), share=st.floats(0.001, 0.999), penalty=st.floats(0.01, 100)
)
def test_overlong_penalty_equals_numpy(length: int, limit: int, share: float, penalty: float) -> None:
    expected = np.interp(length, [limit - share * limit, limit], [0.0, -penalty])
    assert overlong_penalty(length, limit, share, penalty, False) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_no_share_no_penalty() -> None:
    assert overlong_penalty(100, 100, 0.0, 1.0, truncated=True) == 0.0
