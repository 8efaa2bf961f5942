"""How long collectives of each group wait: python -m tests.integration.waiting_ranks ENGINE, on two ranks."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from vlm_pg.distributed import RankLayout, SequenceGroup, barrier, disconnect, join_ranks, local_device
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
    barrier()
    of_two = SequenceGroup.of(RankLayout.here(2))
    on_host = [group for group in (host_group(), of_two._objects) if group is not None]
    groups = dict.fromkeys([dist.group.WORLD, of_two._tensors, later], local_device()) | dict.fromkeys(on_host, CPU)
    limits = {group._get_backend(device).options._timeout for group, device in groups.items()}
    limits.add(dist.distributed_c10d._get_default_store().timeout)
    limits.add(dist.distributed_c10d._get_default_timeout("nccl"))
    print(*limits, sep=", ")
    disconnect()


if __name__ == "__main__":
    main(*sys.argv[1:])
