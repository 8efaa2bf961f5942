"""Groups that sequence ranks score together against each alone: python -m ... CASES, on several ranks.

For each case rank 0 prints a line of JSON: the largest difference over all ranks, what each of them sent to others, and
the peak bytes of live tensors on any rank, alone and together.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.numerics.sequence_memory import long_group, small_policy
from tests.numerics.sequence_ranks import groups_of
from tests.support.groups import tiny_policy
from tests.support.live_bytes import LiveBytes
from tests.support.ranks import run_cases
from vlm_pg.distributed import RankLayout, SequenceGroup, gather_objects
from vlm_pg.models.policy import Policy
from vlm_pg.models.reference import AdapterFreeReference
from vlm_pg.rollout.scoring import PolicyScorer
from vlm_pg.training.parallel import Parallel
from vlm_pg.types import ResponseGroup


@dataclass
class Engine:
    """The part of an engine that scoring uses."""

    policy: Policy
    sequence: SequenceGroup


def groups_and_policy(case: dict[str, Any]) -> tuple[Policy, list[ResponseGroup]]:
    if "long" in case:
        return small_policy(checkpointing=False), [long_group(case["long"])]
    policy = tiny_policy(family=case["family"], **case.get("settings", {}))
    return policy, groups_of(policy, small=False)


def run(case: dict[str, Any], ranks: RankLayout, sequence: SequenceGroup) -> None:
    policy, groups = groups_and_policy(case)
    scored = AdapterFreeReference(policy) if case.get("adapter") else policy
    scorer = PolicyScorer(scored, case["budget"])
    # All but one are the first rank's, and the last rank has none.
    last = max(1, len(groups) - 1)
    of_ranks = [range(last), range(last, len(groups)), *([range(0)] * (sequence.size - 2))]
    own, first = [groups[index] for index in of_ranks[sequence.rank]], of_ranks[sequence.rank].start
    with LiveBytes() as alone:
        expected = scorer.score(groups, 0.7)
    expected = expected[first : first + len(own)]
    policy.vision.forget()
    before = sequence.sent.total()
    engine: Any = Engine(policy, sequence)
    parallel = Parallel(engine)
    parallel.prompts = {group.prompt.sample_id: group.prompt for group in groups}
    with LiveBytes() as together:
        found = parallel.score(scorer, own, 0.7)
    pairs = [pair for one, other in zip(found, expected, strict=True) for pair in zip(one, other, strict=True)]
    worst = max((float((one - other).abs().max()) for one, other in pairs), default=0.0)
    of_ranks = gather_objects((worst, len(pairs), sequence.sent.total() - before, alone.peak, together.peak))
    if ranks.is_rank0:
        errors, counts, sent, peaks_alone, peaks = zip(*of_ranks, strict=True)
        line = {"case": case, "error": max(errors), "responses": counts, "sent": sent}
        print(json.dumps(line | {"alone": max(peaks_alone), "together": max(peaks)}), flush=True)


if __name__ == "__main__":
    run_cases(run)
