"""After several steps of several updates of several micro-batches, ZeRO's weights are those of one torch process.

A table in which every pair of settings occurs; as a matrix every combination. See ``tests/support/zero_cases.py``.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.support.processes import launch_ranks
from tests.support.zero_cases import (
    COMPARED,
    MATRIX_STEPS,
    ZeroCase,
    all_cases,
    case_policy,
    pairwise_cases,
    part_cases,
    train,
    training_settings,
)
from vlm_pg.models.settings import PARTS
from vlm_pg.training.engines import TorchEngine

# Of a weight's whole update, by L2 norm, and of the weight: fp32's rounding, where there was hardly any update.
TOLERANCE, ROUNDING = 1e-5, 1e-7


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2])
def test_zero_trains_what_one_process_trains(ranks: int, tmp_path: Path) -> None:
    _check([case for case in pairwise_cases() if case.ranks == ranks], ranks, tmp_path)


@pytest.mark.matrix
def test_parts_of_the_model_at_rates_of_their_own(tmp_path: Path) -> None:
    _check(part_cases(), 2, tmp_path)


@pytest.mark.matrix
def test_parts_in_bf16(tmp_path: Path) -> None:
    chosen = [case for case in part_cases() if case.train in (("merger",), ("merger", "language"))]
    _check([replace(case, bf16=True) for case in chosen], 2, tmp_path)


@pytest.mark.matrix
def test_parts_under_deepspeeds_own_adam_for_cpus(tmp_path: Path) -> None:
    chosen = [case for case in part_cases() if case.train in (("merger",), PARTS) and case.offload != "none"]
    _check(chosen, 2, tmp_path, own_cpu_adam=True)


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2])
def test_bf16_in_every_pair(ranks: int, tmp_path: Path) -> None:
    """The guard of every run (``training.checked_updates``) watches all updates; resuming is bit for bit."""
    _check([replace(case, ranks=ranks, bf16=True) for case in long(pairwise_cases())], ranks, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "stage, offload",
    [(1, "none"), (2, "none"), (3, "none"), (1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "parameters")],
)
def test_zero_trains_what_one_process_trains_in_every_combination(
    stage: int, offload: str, ranks: int, tmp_path: Path
) -> None:
    fixed = (ranks, stage, offload)
    chosen = [case for case in all_cases() if (case.ranks, case.stage, case.offload) == fixed]
    _check(long(chosen), ranks, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2])
def test_deepspeeds_own_adam_for_cpus(ranks: int, tmp_path: Path) -> None:
    """It is compiled at its first use on a machine, and needed by offloaded states only."""
    cases = [case for case in pairwise_cases() if case.offload != "none"]
    _check([replace(case, ranks=ranks) for case in long(cases)], ranks, tmp_path, own_cpu_adam=True)


def long(cases: list[ZeroCase]) -> list[ZeroCase]:
    return [replace(case, steps=MATRIX_STEPS) for case in cases]


def _check(cases: list[ZeroCase], ranks: int, folder: Path, own_cpu_adam: bool = False) -> None:
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    options = ["cpu-adam"] if own_cpu_adam else []
    launch_ranks(
        "tests.support.zero_cases",
        *(str(folder), str(folder / "cases.json"), *options),
        ranks=ranks,
        timeout_seconds=600 + 120 * len(cases),
    )
    wrong = {}
    for number, case in enumerate(cases):
        file = folder / f"{number}.safetensors"
        with safe_open(file, "pt") as opened:
            facts = opened.metadata()
        assert float(facts["micro_batches"]) >= 2 * float(facts["updates"])
        assert (float(facts["groups_chunked"]) > 0) == case.chunked
        if case.bf16:
            print(case.name, f"resumed {facts['resumed_equal']}")
            assert facts["resumed_equal"] == "True", case.name
            continue
        before, expected, metrics = _one_process(case.in_one_process)
        found = load_file(file)
        for name in COMPARED:
            assert float(facts[name]) == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), (case.name, name)
        if case.offload != "none":
            assert ("DeepSpeedCPUAdam" if own_cpu_adam else "AdamW, optimizer states offloaded") in facts["description"]
        apart = {}
        # torch rounds 1 - rate * decay to fp32, in each of six updates by up to 3e-8; DeepSpeed adds the product.
        rounding = 2 * ROUNDING if own_cpu_adam and case.rates else ROUNDING
        for name, weight in expected.items():
            allowed = TOLERANCE * (weight - before[name]).norm() + rounding * weight.norm()
            apart[name] = float((found[name] - weight).norm() / allowed)
        far = sorted(name for name, share in apart.items() if not share < 1.0)
        print(
            case.name, f"largest share of what is allowed {max(apart.values()):.2f}, resumed {facts['resumed_equal']}"
        )
        if far or facts["resumed_equal"] != "True":
            wrong[case.name] = (facts["resumed_equal"], max(apart.values()), far[:5])
    assert not wrong


@cache
def _one_process(case: ZeroCase) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, float]]:
    """Weights before and after training under the torch engine, all groups of an update in one pass; the metrics."""
    policy = case_policy(case)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    metrics = train(TorchEngine(policy, training_settings(case)), case, range(case.steps), whole=True)
    return before, {name: p.detach().clone() for name, p in policy.model.named_parameters()}, metrics


@pytest.mark.matrix
def test_small_rates_are_not_lost_in_bf16(tmp_path: Path) -> None:
    """Updates of 1e-6 lie below bf16's steps: every engine adds them up in fp32 masters, its moments are fp32."""
    lines = launch_ranks("tests.integration.small_rates", str(tmp_path)).splitlines()
    found = [line.split() for line in lines if line.startswith(("torch", "zero-"))]
    assert [name for name, *_ in found] == ["torch", "zero-1", "zero-2-offload", "zero-3"]
    for name, kept, moved, rounded in found:
        assert kept == "exp_avg:float32,exp_avg_sq:float32,master:float32", name
        assert float(moved) > 0.9 and float(rounded) < 0.1, (name, moved, rounded)
