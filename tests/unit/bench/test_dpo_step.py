"""Contestants of ``scripts.bench.dpo_step`` take the same step, and ours reads each prefix once per model."""

from __future__ import annotations

import pytest

from scripts.bench.dpo_step import CONTESTANTS, PairCase, PairRun
from vlm_pg.bench.work import StepPoint
from vlm_pg.processes import resolve

SPEC = {"model": "small", "dtype": "fp32", "device": "cpu", "checkpointing": False}


def test_all_take_the_same_step() -> None:
    pytest.importorskip("trl")
    point = StepPoint(192, 3, 5)
    case = PairCase.build(SPEC | point.record)
    outcomes = {name: case.outcome(case.run(resolve(one.run))) for name, one in CONTESTANTS.items()}
    found = case.agreement(outcomes, "fp32")
    # The last token of a response is no input of ours.
    for name in ("ours", "ours-pair-by-pair"):
        assert found[name]["policy_rows"] == found[name]["reference_rows"] == 3 * (192 + 2 * 4)
    for name in ("trl", "trl-answer-logits", "trl-pair-by-pair"):
        assert found[name]["policy_rows"] == found[name]["reference_rows"] == 3 * 2 * (192 + 5)
    assert found["ours"]["distillation_policy_rows"] == 3 * (192 + 4 * 4)
    assert found["ours"]["distillation_reference_rows"] == 3 * (192 + 4 * 4)
    # From the same weights again.
    assert case.outcome(case.run(resolve(CONTESTANTS["ours"].run))) == outcomes["ours"]


def test_points() -> None:
    arguments = PairRun.parser().parse_args(["--points", "2048,4,64"])
    assert PairRun.points(arguments) == [StepPoint(2048, 4, 64)]
