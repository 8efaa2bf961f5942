"""The main functions of scripts that tests start on several ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from vlm_pg.distributed import RankLayout, SequenceGroup, disconnect, end_rank
from vlm_pg.training.deepspeed_engine import connect


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


@contextmanager
def connected_ranks() -> Iterator[RankLayout]:
    """On one thread, connected; the process ends with the block."""
    torch.set_num_threads(1)
    connect()
    yield RankLayout.here()
    disconnect()
    end_rank(0)
