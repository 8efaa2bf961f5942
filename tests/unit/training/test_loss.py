"""Denominators of the loss's ratio; the mismatch of log-probabilities: its steps, formulas and warning."""

from __future__ import annotations

import math

import pytest
import torch

from vlm_pg.errors import ConfigError
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.tally import Tally
from vlm_pg.training.loss import (
    MISMATCH_EXP_ABS,
    MISMATCH_KL,
    MISMATCH_MAX,
    behaviour_logprobs,
    mismatch_due,
    mismatch_sums,
    mismatch_warning,
)
from vlm_pg.types import Prompt, Rollout, RolloutGroup, Sample


def group(policy_version: int) -> RolloutGroup:
    sample = Sample("17", "?", (), (), "A", "multiple_choice", "test", "test")
    ids = torch.tensor([1, 2])
    prompt = Prompt("17", ids, torch.zeros(2, dtype=torch.int64), torch.arange(2).expand(3, -1))
    rollouts = tuple(Rollout(ids, torch.tensor([-1.0, -float(i)]), "stop") for i in range(2))
    return RolloutGroup(sample, prompt, rollouts, policy_version)


def test_denominators_are_recorded_or_those_of_the_weights_that_sampled() -> None:
    groups = [group(3), group(4)]
    values = behaviour_logprobs(groups, "reuse", weights_version=4)
    assert values is not None
    for of_group, expected in zip(values, groups, strict=True):
        assert all(a is b.rollout_logprobs for a, b in zip(of_group, expected.rollouts, strict=True))
    assert behaviour_logprobs([group(4), group(4)], "recompute", weights_version=4) is None
    with pytest.raises(ConfigError, match=r"'17' were sampled at version 3 .* now at 4\..* rollout\.logprobs=reuse"):
        behaviour_logprobs([group(4), group(3)], "recompute", weights_version=4)


@pytest.mark.parametrize(
    "settings, due",
    [
        ({"mismatch_every": 4}, [1, 4, 8]),
        ({"mismatch_every": 0}, []),
        ({"mismatch_every": 0, "logprobs": "recompute"}, list(range(1, 10))),
    ],
)
def test_steps_that_compare(settings: dict[str, object], due: list[int]) -> None:
    rollout = RolloutSettings.model_validate(settings)
    assert [step for step in range(1, 10) if mismatch_due(rollout, step)] == due


def test_metrics_are_the_plain_formulas() -> None:
    trainer, sampled = [-1.0, -2.5, -0.25, -3.0], [-1.5, -2.0, -0.25, -3.125]
    tally = Tally()
    tally.add_all(mismatch_sums(torch.tensor(trainer), torch.tensor(sampled), 20.0), 4)
    differences = [0.5, -0.5, 0.0, 0.125]
    assert tally.reduced() == pytest.approx(
        {
            "mismatch/kl": sum(math.exp(d) - 1 - d for d in differences) / 4,
            "mismatch/abs_mean": 1.125 / 4,
            "mismatch/abs_max": 0.5,
            "mismatch/exp_abs_mean": sum(math.exp(abs(d)) for d in differences) / 4,
        }
    )


def test_a_tiny_difference_is_not_lost_in_rounding_and_a_huge_one_stays_finite() -> None:
    sums = mismatch_sums(torch.tensor([-1e-5]), torch.tensor([0.0]), 20.0)
    assert float(sums[MISMATCH_KL]) == pytest.approx(0.5e-10, rel=1e-4)
    sums = mismatch_sums(torch.tensor([-2000.0]), torch.tensor([0.0]), 20.0)
    assert float(sums[MISMATCH_EXP_ABS]) == pytest.approx(math.exp(20.0))
    assert float(sums[MISMATCH_MAX]) == 2000.0


def test_a_warning_names_the_value_its_bound_and_where_to_look() -> None:
    healthy = {"mismatch/kl": 0.01, "mismatch/exp_abs_mean": 1.05, "mismatch/abs_max": 0.3}
    assert mismatch_warning(healthy) is None
    assert mismatch_warning({"loss": 1.0, "kl": None}) is None, "a step that compared nothing"
    line = mismatch_warning(healthy | {"mismatch/exp_abs_mean": 1.0834})
    assert line is not None and line.startswith(
        "mismatch/exp_abs_mean is 1.08, above 1.05 (largest difference 0.3 nats)"
    )
    assert "attention kernel" in line and "model.dtype=fp32" in line
    both = mismatch_warning(healthy | {"mismatch/kl": 0.0201, "mismatch/exp_abs_mean": float("nan")})
    assert both is not None
    assert both.startswith("mismatch/kl is 0.0201, above 0.01 and mismatch/exp_abs_mean is nan, above 1.05")
