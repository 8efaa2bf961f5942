"""Rewards that depend on the group or on the length: hand-computed cases."""

from __future__ import annotations

import pytest

from vlm_pg.algorithms.advantages import length_bonus, overlong_penalty, temporal_bonus

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


def test_no_share_no_penalty() -> None:
    assert overlong_penalty(100, 100, 0.0, 1.0, truncated=True) == 0.0
