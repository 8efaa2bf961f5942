"""Whole runs one after the other on several ranks: python -m torch.distributed.run ... -m ... CONFIG RUNS.

RUNS holds a JSON object: name of a run -> its ``key=value``; it is that of CONFIG with these.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import vlm_pg.training.main as training
from vlm_pg.config import load_config
from vlm_pg.distributed import barrier, disconnect, end_rank
from vlm_pg.training.deepspeed_engine import connect

if __name__ == "__main__":
    config, runs = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(1)
    connect()
    # The runs of one process share its connection.
    training.connect = lambda config: None
    training.disconnect = barrier
    for overrides in runs.values():
        assert training.train(load_config(config, overrides)) == 0
    disconnect()
    end_rank(0)
