"""Steps of several updates on this process or several: python -m ... OUT SEQUENCE CASES, on any number of ranks.

A step's questions are drawn, sampled, rewarded and trained on as in a run. Rank 0 writes OUT/<name>.safetensors: the
weights before and after.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.collecting import made_up_collector, tiny_config
from tests.support.groups import tiny_policy
from tests.support.processes import ROOT, launch_ranks
from vlm_pg.algorithms.advantages import GroupRewards
from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.batching.cost import CostModel
from vlm_pg.config import RunConfig
from vlm_pg.distributed import SINGLE_RANK, RankLayout, barrier, disconnect, end_rank
from vlm_pg.models.policy import Policy
from vlm_pg.rewards.parts import Response
from vlm_pg.training.engines import Engine, TorchEngine
from vlm_pg.training.updates import Update, run_updates

STEPS, LEARNING_RATE = 2, 1e-3
# As the preset, which goes with no pruning.
GSPO = {"ratio_level": "sequence", "loss_average": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "plain": {"preset": "gspo"},
    "resampling": {"preset": "gspo", "resample_rounds": 3},
    "fill": GSPO | {"prune_rate": 0.5},
    "correction": GSPO | {"prune_rate": 0.5, "prune_correction": True, "resample_rounds": 2},
    "unbalanced": {"preset": "gspo"},
    "unbalanced resampling": {"preset": "gspo", "resample_rounds": 3},
    "unshared": {"preset": "gspo"},
    "estimator": GSPO | {"advantages": "tests.numerics.test_mini_batches:by_index", "resample_rounds": 3},
    "iterations": {"preset": "gspo", "num_iterations": 2, "resample_rounds": 3},
}


@dataclass(frozen=True)
class Case:
    """``kind``: of ``ALGORITHMS``. ``tower``: it trains, too. ``zero``: DeepSpeed's stage, 0 for torch's engine."""

    kind: str
    minibatches: int
    questions: int
    tower: bool = False
    zero: int = 0

    @property
    def name(self) -> str:
        zero = f", zero{self.zero}" if self.zero else ""
        return f"{self.kind}, {self.minibatches} of {self.questions}{', tower' if self.tower else ''}{zero}"


def media_of(number: int) -> int:
    """Questions on one video are apart in the order of the data."""
    return number % 4


def reward(response: Response, index: int) -> float:
    """Every third question has no spread."""
    number = int(response.sample.sample_id.split("-")[-1])
    return 1.0 if number % 3 == 1 else float((5 * index + number) % 4)


def by_index(groups: list[GroupRewards], settings: AlgorithmSettings) -> list[list[float]]:
    """An estimator that depends on the order of the groups."""
    del settings
    return [[(1 + index) * (total or 0.0) - 1.0 for total in group.totals] for index, group in enumerate(groups)]


def trained(case: Case, ranks: RankLayout = SINGLE_RANK) -> dict[str, torch.Tensor]:
    """Weights after two steps ("after/...") and before ("before/..."). A collective."""
    policy = tiny_policy(case.tower, share_prefix=case.kind != "unshared")
    training = {
        "prompts_per_step": case.questions,
        "micro_batch_tokens": 250,
        "learning_rate": LEARNING_RATE,
        "balance": not case.kind.startswith("unbalanced"),
        # Gradients of key biases are rounding and nothing else: Adam must not make full steps of them.
        "adam_epsilon": 1e-4,
    }
    if case.zero:
        file = ROOT / f"configs/deepspeed/zero{case.zero}.json"
        training |= {"engine": "deepspeed", "deepspeed_config": str(file)}
    config = tiny_config(
        ALGORITHMS[case.kind] | {"minibatches": case.minibatches}, prompt={"max_prompt_tokens": 200}, training=training
    )
    engine = _engine(config, policy, ranks)
    collector = made_up_collector(
        policy, config, reward, kinds=("video", "text"), engine=engine, media_of=media_of, num_samples=60
    )
    if config.training.balance and ranks.data_size > 1:
        assert engine.parallel is not None
        engine.parallel.costs = CostModel(token=1000, pair=1, logit=10)
    found = _weights(engine, "before")
    for step in range(1, STEPS + 1):
        batch = collector.collect(step, 0)
        update = Update(batch.groups, LEARNING_RATE, batch.vision)
        metrics = run_updates(engine, None, update, config)
        assert metrics["updates"] > 1
    return found | _weights(engine, "after")


def _engine(config: RunConfig, policy: Policy, ranks: RankLayout) -> Engine:
    if config.training.engine == "torch":
        return TorchEngine(policy, config.training, ranks)
    from vlm_pg.training.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(policy, config.training, ranks)


def _weights(engine: Engine, when: str) -> dict[str, torch.Tensor]:
    with engine.full_weights():
        return {f"{when}/{name}": p.detach().clone() for name, p in engine.policy.model.named_parameters()}


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
        pytest.param(2, 2, SOME[:2], marks=pytest.mark.matrix, id="sequence2-some"),
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
    launch_ranks(
        "tests.numerics.test_mini_batches", str(tmp_path), str(sequence), values, ranks=ranks, timeout_seconds=3000
    )
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


if __name__ == "__main__":
    out, sequence, cases = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    from vlm_pg.training.deepspeed_engine import connect

    connect()
    ranks = RankLayout.here(sequence)
    for case in (Case(**values) for values in cases):
        found = trained(case, ranks)
        if ranks.is_rank0:
            save_file(found, out / f"{case.name}.safetensors")
    barrier()
    disconnect()
    end_rank(0)
