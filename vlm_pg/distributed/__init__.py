"""Ranks and what they tell each other. Without torch.distributed every call is its own answer.

processes -> collectives -> layout -> sequence_group.
"""

from vlm_pg.distributed.collectives import (
    AgreedStop,
    agree_to_go_on,
    exchange_objects,
    exchange_rows,
    gather_objects,
    max_over_ranks,
    meet_to_stop,
    min_over_ranks,
    no_way_back,
    stopping_together,
    sum_over_ranks,
    sum_tensors_over_ranks,
)
from vlm_pg.distributed.layout import SINGLE_RANK, RankLayout
from vlm_pg.distributed.processes import (
    LAUNCHER_VARIABLES,
    Meeting,
    SharedFlag,
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
from vlm_pg.distributed.sequence_group import SINGLE_SP_RANK, SequenceGroup

__all__ = [
    "LAUNCHER_VARIABLES",
    "SINGLE_RANK",
    "SINGLE_SP_RANK",
    "AgreedStop",
    "Meeting",
    "RankLayout",
    "SequenceGroup",
    "SharedFlag",
    "SharedNote",
    "agree_to_go_on",
    "barrier",
    "disconnect",
    "end_rank",
    "exchange_objects",
    "exchange_rows",
    "gather_objects",
    "is_about_other_ranks",
    "is_distributed",
    "join_ranks",
    "launched_world_size",
    "local_device",
    "max_over_ranks",
    "meet_to_stop",
    "min_over_ranks",
    "no_way_back",
    "stopping_together",
    "sum_over_ranks",
    "sum_tensors_over_ranks",
]
