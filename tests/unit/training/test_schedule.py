"""The learning rate at hand-checkable steps."""

from __future__ import annotations

import pytest

from vlm_pg.training.rates import learning_rate
from vlm_pg.training.settings import TrainingSettings


def rates(**settings: object) -> list[float]:
    training = TrainingSettings(steps=8, learning_rate=1.0, **settings)
    return [learning_rate(training, step) for step in range(1, 9)]


def test_warm_up_rises_linearly_and_the_first_step_already_moves() -> None:
    assert rates(warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_linear_decay_ends_at_its_floor() -> None:
    assert rates(warmup_steps=4, schedule="linear") == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0])
    assert rates(warmup_steps=4, schedule="linear", min_learning_rate_ratio=0.2)[-1] == pytest.approx(0.2)


def test_cosine_decay_is_half_way_in_the_middle() -> None:
    values = rates(schedule="cosine")
    assert values[3] == pytest.approx(0.5)
    assert values[-1] == pytest.approx(0.0)
