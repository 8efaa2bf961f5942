"""Updates in which each rank has a question of another kind: python -m torch.distributed.run ... -m ... OUT CASES.

CASES holds a JSON list of [stage, tower trains, gather, pairs of kinds]. Of each case one engine makes an update for
each pair, one after the other: the first rank has two questions of its kind, one in each pass, the second has one.
Rank 0 writes OUT/<index>.safetensors: the gradient of every weight in every update, as DeepSpeed's optimizer took it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from tests.support.groups import make_case, random_group, tiny_policy
from tests.support.training import make_groups
from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.distributed import RankLayout, disconnect, end_rank
from vlm_pg.models.policy import Policy
from vlm_pg.training.deepspeed_engine import DeepSpeedEngine, connect
from vlm_pg.training.engines import Engine
from vlm_pg.training.settings import TrainingSettings
from vlm_pg.training.step_features import StepFeatures
from vlm_pg.training.updates import Update, UpdateSettings, update_policy
from vlm_pg.types import Rollout, RolloutGroup

# The weights stay what they are, and Adam's first moment is the gradient of the last update, unclipped.
LEARNING_RATE = 1e-30
LENGTHS = ([5, 1, 9], [2, 7, 4], [3, 3, 6])


def settings(**values: Any) -> TrainingSettings:
    return TrainingSettings(
        steps=1, learning_rate=LEARNING_RATE, betas=(0.0, 0.9), max_grad_norm=1e9, checked_updates=99, **values
    )


def pair_groups(policy: Policy, kinds: Sequence[str]) -> list[RolloutGroup]:
    """Complete groups: of the first rank, of the second, of the first again."""
    sampled = []
    for index, kind in enumerate([*kinds, kinds[0]]):
        case = make_case(policy, kind, seed=100 + index)
        group = random_group(policy, case, LENGTHS[index], seed=index)
        level = -torch.log(torch.tensor(float(policy.vocab_size)))
        rollouts = [Rollout(tokens, level.expand(len(tokens)).clone(), "stop") for tokens in group.responses]
        sampled.append((case.prompt, rollouts))
    return make_groups(policy, sampled)


def update(engine: Engine, groups: Sequence[RolloutGroup], micro_batch_tokens: int = 10**6) -> dict[str, float]:
    """Features made before, as in a run: of a tower that trains on equally many frames by each rank."""
    algorithm, policy = AlgorithmSettings(clip_low=0.9, clip_high=5.0), engine.policy
    vision = None
    if policy.vision.trains:
        vision = StepFeatures(policy, [group.prompt for group in groups], engine.sequence, engine.everyone)
        groups = [replace(group, prompt=prompt) for group, prompt in zip(groups, vision.prompts, strict=True)]
    settings = UpdateSettings(algorithm, micro_batch_tokens)
    return update_policy(engine, None, Update(groups, LEARNING_RATE, vision), settings)


def run(
    case: tuple[int, bool, Literal["all", "layers"], list[list[str]]], folder: Path, index: int, ranks: RankLayout
) -> None:
    from deepspeed.utils import safe_get_full_optimizer_state

    stage, train_vision, gather, pairs = case
    zero: dict[str, Any] = {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
    file = folder / f"deepspeed-{ranks.rank}.json"
    file.write_text(json.dumps({"zero_optimization": zero}))
    policy = tiny_policy(train_vision=train_vision)
    engine = DeepSpeedEngine(policy, settings(engine="deepspeed", deepspeed_config=str(file)), ranks, gather)
    found = {}
    for number, kinds in enumerate(pairs):
        groups = pair_groups(policy, kinds)
        largest = max(g.prompt.num_tokens + sum(len(r.token_ids) for r in g.rollouts) for g in groups)
        # Two short groups may share a pass, so that there is but one.
        metrics = update(engine, groups[ranks.rank :: 2], largest)
        assert metrics["micro_batches"] == 2 or kinds[0] == "text", metrics
        for name, weight in policy.model.named_parameters():
            if weight.requires_grad:
                found[f"{number}/{name}"] = safe_get_full_optimizer_state(weight, "exp_avg").clone()
    if ranks.is_rank0:
        save_file(found, folder / f"{index}.safetensors")


if __name__ == "__main__":
    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    connect()
    for index, case in enumerate(cases):
        run(case, folder, index, RankLayout.here())
    disconnect()
    end_rank(0)
