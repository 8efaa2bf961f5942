"""Stages of trainings on the ranks that were started: python -m torch.distributed.run ... -m ... FOLDER.

FOLDER/stages.json holds a list of ``tests.support.stages.Stage``, all of as many ranks as there are.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support.layouts import LAYOUTS
from tests.support.ranks import connected_ranks
from tests.support.stages import Stage, run_stage
from vlm_pg.distributed import RankLayout

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with connected_ranks():
        for values in json.loads((folder / "stages.json").read_text()):
            stage = Stage(**values)
            run_stage(stage, folder, RankLayout.here(LAYOUTS[stage.layout].sequence))
