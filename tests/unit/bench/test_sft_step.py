"""Contestants of ``scripts.bench.sft_step`` take the same optimizer steps: losses and gradient norms are equal."""

from __future__ import annotations

import pytest

from scripts.bench.sft_step import CONTESTANTS, SupervisedCase, SupervisedPoint, SupervisedRun
from vlm_pg.errors import ConfigError
from vlm_pg.processes import resolve

SPEC = {"model": "small", "dtype": "fp32", "device": "cpu", "checkpointing": False}


@pytest.mark.parametrize("videos", [0, 1, 3])
def test_all_take_the_same_steps(videos: int) -> None:
    point = SupervisedPoint(128, 3, 4, videos, 2)
    case = SupervisedCase.build(SPEC | point.record)
    outcomes = {}
    for name, contestant in CONTESTANTS.items():
        outcomes[name] = case.outcome(case.run(resolve(contestant.run)))
    assert case.agreement(outcomes, "fp32") == outcomes
    assert outcomes["ours"] != case.outcome(case.run(resolve(CONTESTANTS["ours"].run))[:1])  # the first step
    outcomes["trainer"]["loss"] *= 1.001
    with pytest.raises(RuntimeError, match=r"disagree: loss is .* for trainer"):
        case.agreement(outcomes, "fp32")


def test_points() -> None:
    arguments = SupervisedRun.parser().parse_args(["--points", "128,3,4,1", "128,3,4,3,2"])
    assert SupervisedRun.points(arguments) == [SupervisedPoint(128, 3, 4), SupervisedPoint(128, 3, 4, 3, 2)]
    with pytest.raises(ConfigError, match="videos must be 0, 1 or the number of questions"):
        SupervisedPoint(128, 3, 4, 2)
