"""Generation under ZeRO-3: python -m torch.distributed.run ... OUT CONFIG GATHER ROUNDS FAMILY.

Ranks have unlike prompts that finish at very different lengths. Every rank writes its tokens to OUT.RANK as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from tests.support.groups import make_case, tiny_policy
from tests.support.ranks import connected_ranks
from vlm_pg.distributed import RankLayout
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.rollout.fused.packed import packed_linears
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.training.deepspeed_engine import DeepSpeedEngine
from vlm_pg.training.settings import TrainingSettings
from vlm_pg.types import Prompt

VIDEO = {"kind": "video", "media_seed": 9, "max_side": 8}


def policy_with_many_stops(family: str) -> Policy:
    policy = tiny_policy(family=family)
    policy.model.generation_config.eos_token_id = list(range(0, policy.vocab_size, 5))
    return policy


def prompts_of(policy: Policy, rank: int) -> list[Prompt]:
    """Rank 0: one short question. Rank 1: two questions on a video, several images and a text."""
    kinds: Sequence[dict] = [{"kind": "text"}]
    if rank == 1:
        kinds = [VIDEO, {"kind": "images"}, VIDEO, {"kind": "text"}]
    return [make_case(policy, seed=10 * rank + i, **kind).prompt for i, kind in enumerate(kinds)]


def rollouts_of(policy: Policy) -> RolloutEngine:
    # Seven rollouts at a time: the second rank's prompts enter one after the other.
    return RolloutEngine(policy, RolloutSettings(num_generations=3, max_new_tokens=24, max_batch_rollouts=7), seed=5)


def tokens_of(rollouts: RolloutEngine, prompts: Sequence[Prompt], step: int) -> list[list[int]]:
    return [rollout.token_ids.tolist() for group in rollouts.generate(prompts, step) for rollout in group]


def main(ranks: RankLayout, out: str, deepspeed_config: str, gather: str, rounds: int, family: str) -> None:
    policy = policy_with_many_stops(family)
    settings = TrainingSettings(steps=1, engine="deepspeed", deepspeed_config=deepspeed_config)
    engine = DeepSpeedEngine(policy, settings, ranks, gather)
    prompts, rollouts = prompts_of(policy, ranks.rank), rollouts_of(policy)
    tokens = []
    for step in range(rounds):
        with engine.gathered_parameters():
            tokens.append(tokens_of(rollouts, prompts, step))
    with open(f"{out}.{ranks.rank}", "w") as file:
        json.dump(tokens, file)
    print("separate:", packed_linears(policy.language_model)[1])


if __name__ == "__main__":
    out, deepspeed_config, gather, rounds, family = sys.argv[1:]
    with connected_ranks() as ranks:
        main(ranks, out, deepspeed_config, gather, int(rounds), family)
