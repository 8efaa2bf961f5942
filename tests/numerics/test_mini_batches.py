"""Which questions share a mini-batch depends on their order in the step alone: any number of processes trains the same.

Steps of several updates, with questions on one video apart in the order, a third of them without spread.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.numerics.mini_batches import ALGORITHMS, Case, trained
from tests.support.processes import launch_ranks

# Of the distance that the weights moved.
TOLERANCE = 1e-5
# More mini-batches than questions are refused.
TABLE = [
    Case(kind, parts, questions)
    for kind, parts, questions in product(ALGORITHMS, (2, 3, 4), (3, 4, 5, 8))
    if parts <= questions
]
TABLE += [Case(kind, 3, 4, tower=True) for kind in ALGORITHMS]
SOME = [
    Case("plain", 2, 4),
    Case("estimator", 2, 5),
    Case("fill", 3, 5),
    Case("unbalanced resampling", 3, 4, tower=True),
]
ZERO = [
    Case(kind, 3, 4, tower=True, zero=stage)
    for kind, stage in product(("resampling", "unbalanced", "unbalanced resampling"), (2, 3))
]


@pytest.mark.parametrize(
    "ranks, sequence, cases",
    [
        pytest.param(2, 1, SOME, id="2-some"),
        pytest.param(2, 2, SOME[:2], id="sequence2-some"),
        *(
            pytest.param(ranks, sequence, TABLE, marks=pytest.mark.matrix, id=f"{ranks}-sequence{sequence}-all")
            for ranks, sequence in ((2, 1), (3, 1), (4, 1), (2, 2), (4, 2))
        ),
        *(
            pytest.param(ranks, sequence, ZERO, marks=pytest.mark.matrix, id=f"{ranks}-sequence{sequence}-zero")
            for ranks, sequence in ((2, 1), (4, 1), (4, 2))
        ),
    ],
)
def test_weights_are_those_of_one_process(ranks: int, sequence: int, cases: list[Case], tmp_path: Path) -> None:
    values = json.dumps([asdict(case) for case in cases])
    launch_ranks("tests.numerics.mini_batches", str(tmp_path), str(sequence), values, ranks=ranks, timeout_seconds=3000)
    apart = {case.name: _apart(case, load_file(tmp_path / f"{case.name}.safetensors")) for case in cases}
    for name, distance in apart.items():
        print(f"{ranks} processes, {sequence} to a data rank, {name}: {distance:.1e} of the update")
    assert not {name: distance for name, distance in apart.items() if not distance <= TOLERANCE}


def _apart(case: Case, found: dict[str, torch.Tensor]) -> float:
    """Distance of all weights to those of one process, relative to how far these moved."""
    one = _of_one_process(case.kind, case.minibatches, case.questions, case.tower)
    names = [name.removeprefix("after/") for name in one if name.startswith("after/")]
    assert all(torch.equal(one[f"before/{name}"], found[f"before/{name}"]) for name in names)
    moved = _norm([one[f"after/{name}"] - one[f"before/{name}"] for name in names])
    assert moved > 0.01
    return _norm([one[f"after/{name}"] - found[f"after/{name}"] for name in names]) / moved


@cache
def _of_one_process(kind: str, minibatches: int, questions: int, tower: bool) -> dict[str, torch.Tensor]:
    return trained(Case(kind, minibatches, questions, tower))


def _norm(tensors: list[torch.Tensor]) -> float:
    return float(torch.stack([tensor.double().norm() for tensor in tensors]).norm())
