"""Updates that leave NaN in a weight of one rank: python -m torch.distributed.run ... -m ... OUT LAYOUT [LAYOUT ...].

Names are those of ``tests.support.layouts.LAYOUTS``. Every rank writes OUT/update-<name>-<rank>.json: the error of the
second update, before which the last rank's first moment of one weight became NaN, and the weight. OUT/read-<rank>.json
has the error of reading the model in OUT/model under ZeRO-3.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests.support.layouts import LAYOUTS, Layout, deepspeed_settings, layout_engine, train_steps
from tests.support.ranks import connected_ranks
from vlm_pg.distributed import RankLayout, barrier
from vlm_pg.errors import ModelError, NotFiniteError
from vlm_pg.models.loading import load_policy
from vlm_pg.training.deepspeed_engine import sharded_loading


def run(layout: Layout, out: Path) -> None:
    ranks = RankLayout(RankLayout.here().rank, RankLayout.here().world_size, layout.sequence)
    engine = layout_engine(layout, out, ranks)
    train_steps(engine, ranks, steps=[0], questions=2)
    weight, message = "", ""
    if ranks.rank == ranks.world_size - 1:
        piece = [piece for piece in engine.states.slices() if piece.kind == "exp_avg"][-1]
        piece.values[-1] = torch.nan
        weight = piece.weight
    try:
        train_steps(engine, ranks, steps=[1], questions=2)
    except NotFiniteError as error:
        message = str(error)
    (out / f"update-{layout.name}-{ranks.rank}.json").write_text(json.dumps({"weight": weight, "message": message}))
    barrier()


def read(out: Path) -> None:
    layout, message = LAYOUTS["zero3-2"], ""
    settings = deepspeed_settings(layout, out, RankLayout.here())
    try:
        load_policy(out / "model", device="cpu", reading=sharded_loading(settings, torch.float32))
    except ModelError as error:
        message = str(error)
    (out / f"read-{RankLayout.here().rank}.json").write_text(json.dumps(message))
    barrier()


if __name__ == "__main__":
    with connected_ranks():
        for name in sys.argv[2:]:
            run(LAYOUTS[name], Path(sys.argv[1]))
        read(Path(sys.argv[1]))
