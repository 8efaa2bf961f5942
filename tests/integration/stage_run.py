"""Stages of trainings on the ranks that were started: python -m torch.distributed.run ... -m ... FOLDER.

FOLDER/stages.json holds a list of ``tests.support.stages.Stage``, all of as many ranks as there are.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests.support.layouts import LAYOUTS
from tests.support.stages import Stage, run_stage
from vlm_pg.distributed import RankLayout, disconnect, end_rank
from vlm_pg.training.deepspeed_engine import connect

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    connect()
    for values in json.loads((folder / "stages.json").read_text()):
        stage = Stage(**values)
        run_stage(stage, folder, RankLayout.here(LAYOUTS[stage.layout].sequence))
    disconnect()
    end_rank(0)
