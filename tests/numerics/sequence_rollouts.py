"""Prompts that sequence ranks prefill together: python -m ... CASES, on several ranks.

For each case rank 0 prints a line of JSON: the tokens of every rollout and their log-probabilities, put together from
all ranks, and those of one process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import vlm_pg.rollout.engine as generation
from tests.support.groups import make_case, tiny_policy
from tests.support.ranks import run_cases
from vlm_pg.distributed import SINGLE_SP_RANK, RankLayout, SequenceGroup, gather_objects
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.decoders import decoder_for
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.rollout.ragged import RaggedDecoder
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.types import Prompt, Rollout

GENERATIONS = 6
CLEAR_MARGIN = 1e-5


def described(rollouts: list[tuple[Rollout, ...]]) -> list[list[Any]]:
    return [[(r.token_ids.tolist(), r.rollout_logprobs.tolist()) for r in of_prompt] for of_prompt in rollouts]


def stopped_on_one(sampler: RolloutEngine, after: int, prompts: list[Prompt], sequence: SequenceGroup) -> None:
    """The last rank is asked at its token number ``after``: all of them leave there."""
    met = 0

    def asked() -> bool:
        nonlocal met
        met += 1
        return sequence.rank == sequence.size - 1 and met == after

    sampler.stop_together = asked
    try:
        sampler.generate(prompts, 3, sequence)
    except InterruptedError:
        assert met == after
    else:
        raise AssertionError("nobody stopped")


@contextmanager
def least_margin(policy: Policy) -> Iterator[list[float]]:
    """How far routers' last chosen experts are before the next ones, of every token; none without routers.

    Where two experts are chosen by the last bit, other kernels choose the other one, which is no fault of theirs.
    """
    margins: list[float] = []

    def note(gate: Any, given: Any, _: Any) -> None:
        logits = given[0].reshape(-1, given[0].shape[-1]).float() @ gate.weight.float().T
        chosen = logits.topk(gate.top_k + 1, -1).values
        # Of rows that stand for none all experts are equal.
        margins.extend(margin for margin in (chosen[:, -2] - chosen[:, -1]).tolist() if margin)

    routers = [module for name, module in policy.model.named_modules() if name.endswith("mlp.gate")]
    hooks = [router.register_forward_hook(note) for router in routers]
    try:
        yield margins
    finally:
        for hook in hooks:
            hook.remove()


def run(case: dict[str, Any], ranks: RankLayout, sequence: SequenceGroup) -> None:
    policy = tiny_policy(family=case["family"])
    kinds = case["kinds"] if policy.family.reads_media else ["text"] * len(case["kinds"])
    # Equal media at the beginning of two prompts, so that the tree of prompts has levels.
    prompts = [make_case(policy, kind, seed=i, media_seed=i // 2).prompt for i, kind in enumerate(kinds)]
    # Below what settings allow: passes of a few tokens.
    settings = RolloutSettings(num_generations=GENERATIONS, max_new_tokens=8).model_copy(update=case["settings"])

    generation.decoder_for = RaggedDecoder if case.get("ragged") else decoder_for  # type: ignore[assignment]

    def engine() -> RolloutEngine:
        return RolloutEngine(policy, settings, seed)

    seed, margins = 4, [0.0]
    while min(margins, default=1.0) < CLEAR_MARGIN:
        seed += 1
        with least_margin(policy) as margins:
            expected = described(engine().generate(prompts, 3, SINGLE_SP_RANK))
    sampler = engine()
    if "stop" in case:
        stopped_on_one(sampler, case["stop"], prompts, sequence)
        sampler = engine()
    parts = gather_objects(described(sampler.generate(prompts, 3, sequence)))
    together = [[rollout for part in parts for rollout in part[place]] for place in range(len(prompts))]
    counted = sum(gather_objects(sampler.stats.prompt_tokens))
    if ranks.is_rank0:
        found = {"case": case, "expected": expected, "found": together, "prompt_tokens": counted}
        stats = sampler.stats
        found |= {"cohorts": stats.cohorts, "divided": stats.prompts_divided, "graphs": stats.graphs.off_because}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    run_cases(run)
