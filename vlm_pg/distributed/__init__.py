"""Ranks and their collectives. Without torch.distributed every call returns its own argument.

processes -> collectives -> ranks.
"""

from vlm_pg.distributed.collectives import (
    AgreedStop,
    check_stop,
    exchange_objects,
    exchange_rows,
    forbid_stop,
    gather_objects,
    join_stop,
    max_over_ranks,
    min_over_ranks,
    stopping_together,
    sum_over_ranks,
    sum_tensors_over_ranks,
)
from vlm_pg.distributed.processes import (
    LAUNCHER_VARIABLES,
    Meeting,
    SharedNote,
    barrier,
    disconnect,
    end_rank,
    is_about_other_ranks,
    is_distributed,
    join_ranks,
    launched_world_size,
    local_device,
)
from vlm_pg.distributed.ranks import SINGLE_RANK, SINGLE_SP_RANK, RankLayout, SequenceGroup

__all__ = [
    "LAUNCHER_VARIABLES",
    "SINGLE_RANK",
    "SINGLE_SP_RANK",
    "AgreedStop",
    "Meeting",
    "RankLayout",
    "SequenceGroup",
    "SharedNote",
    "barrier",
    "check_stop",
    "disconnect",
    "end_rank",
    "exchange_objects",
    "exchange_rows",
    "forbid_stop",
    "gather_objects",
    "is_about_other_ranks",
    "is_distributed",
    "join_ranks",
    "join_stop",
    "launched_world_size",
    "local_device",
    "max_over_ranks",
    "min_over_ranks",
    "stopping_together",
    "sum_over_ranks",
    "sum_tensors_over_ranks",
]
