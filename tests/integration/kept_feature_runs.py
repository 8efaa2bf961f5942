"""Whole runs one after the other on several ranks: python -m torch.distributed.run ... -m ... CONFIG RUNS.

As ``sequence_runs``, but in runs whose name ends with "again" any call of a vision tower is an error, and before those
that end with "half" every second entry of the cache is thrown out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NoReturn

import torch

import vlm_pg.training.main as training
from vlm_pg.cache.eviction import entry_files
from vlm_pg.config import load_config
from vlm_pg.distributed import RankLayout, barrier, disconnect, end_rank
from vlm_pg.models.family import Family
from vlm_pg.training.deepspeed_engine import connect


def refuse(*_: object) -> NoReturn:
    raise AssertionError("the vision tower was called")


if __name__ == "__main__":
    config, runs = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(1)
    connect()
    # The runs of one process share its connection.
    training.connect = lambda config: None
    training.disconnect = barrier
    encode = Family.encode_vision
    for name, overrides in runs.items():
        Family.encode_vision = refuse if name.endswith("again") else encode  # type: ignore[method-assign]
        chosen = load_config(config, overrides)
        if name.endswith("half") and RankLayout.here().is_rank0:
            assert chosen.cache.folder is not None
            for stored in sorted(entry_files(chosen.cache.folder), key=lambda stored: stored.key)[::2]:
                stored.path.unlink()
        barrier()
        assert training.train(chosen) == 0
    disconnect()
    end_rank(0)
