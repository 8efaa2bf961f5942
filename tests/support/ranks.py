"""The main functions of scripts that ``launch_ranks`` starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from vlm_pg.distributed import RankLayout, SequenceGroup, end_rank


def as_rank(run: Callable[[RankLayout, SequenceGroup], None]) -> None:
    """Join the ranks, run, leave."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = RankLayout.here(dist.get_world_size())
    run(ranks, SequenceGroup.of(ranks))
    dist.barrier()
    dist.destroy_process_group()
    end_rank(0)


def run_cases(run: Callable[[dict[str, Any], RankLayout, SequenceGroup], None]) -> None:
    """``as_rank`` for each case of the first argument, JSON."""

    def all_cases(ranks: RankLayout, sequence: SequenceGroup) -> None:
        for case in json.loads(sys.argv[1]):
            run(case, ranks, sequence)

    as_rank(all_cases)
