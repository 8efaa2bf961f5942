"""How long collectives of each group wait: python -m tests.integration.waiting_ranks ENGINE, on several ranks."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from vlm_pg.distributed import RankLayout, SequenceGroup, disconnect, join_ranks
from vlm_pg.distributed.processes import host_group

CPU = torch.device("cpu")


def main(engine: str) -> None:
    if engine == "deepspeed":
        import deepspeed.comm

        from vlm_pg.training.deepspeed_engine import connect

        connect()
        later = deepspeed.comm.new_group([0, 1])
    else:
        join_ranks()
        later = dist.new_group([0, 1])
    groups = [dist.group.WORLD, host_group() or dist.group.WORLD, SequenceGroup.of(RankLayout.here(2))._objects, later]
    limits = {group._get_backend(CPU).options._timeout for group in groups}
    limits.add(dist.distributed_c10d._get_default_store().timeout)
    limits.add(dist.distributed_c10d._get_default_timeout("nccl"))
    print(*limits, sep=", ")
    disconnect()


if __name__ == "__main__":
    main(*sys.argv[1:])
