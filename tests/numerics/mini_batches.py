"""Steps of several updates on this process or several: python -m ... OUT SEQUENCE CASES, on any number of ranks.

A step's questions are drawn, sampled, rewarded and trained on as in a run. Rank 0 writes OUT/<name>.safetensors: the
weights before and after.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.collecting import made_up_collector, tiny_config
from tests.support.groups import tiny_policy
from tests.support.processes import ROOT
from vlm_pg.algorithms.advantages import GroupRewards
from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.batching.cost import CostModel
from vlm_pg.config import RunConfig
from vlm_pg.distributed import SINGLE_RANK, RankLayout, barrier, disconnect, end_rank
from vlm_pg.models.policy import Policy
from vlm_pg.rewards.response import Response
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
    "estimator": GSPO | {"advantages": "tests.numerics.mini_batches:by_index", "resample_rounds": 3},
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
