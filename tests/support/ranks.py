"""The frame of scripts that tests start on several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vlm_pg.distributed import RankLayout, disconnect, end_rank
from vlm_pg.training.deepspeed_engine import connect


@contextmanager
def connected_ranks() -> Iterator[RankLayout]:
    """On one thread, connected; the process ends with the block."""
    torch.set_num_threads(1)
    connect()
    yield RankLayout.here()
    disconnect()
    end_rank(0)
