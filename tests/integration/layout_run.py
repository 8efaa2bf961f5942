"""Layouts of training one after the other: python -m torch.distributed.run ... -m ... OUT LAYOUT [LAYOUT ...].

Names are those of ``tests.support.layouts.LAYOUTS``, all of as many ranks as there are. Rank 0 writes
OUT/<name>.safetensors, the weights after all steps, with the gradient norms on the way.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.layouts import LAYOUTS, Layout, layout_engine, train_steps, weights
from vlm_pg.distributed import RankLayout, barrier, disconnect, end_rank
from vlm_pg.training.deepspeed_engine import connect


def run(layout: Layout, out: Path) -> None:
    ranks = RankLayout(RankLayout.here().rank, RankLayout.here().world_size, layout.sequence)
    assert ranks.world_size == layout.ranks
    engine = layout_engine(layout, out, ranks)
    said = train_steps(engine, ranks, deal=layout.dealt)
    after = weights(engine)
    if ranks.is_rank0:
        metadata = {"description": engine.description, "metrics": json.dumps(said)}
        save_file(after, out / f"{layout.name}.safetensors", metadata=metadata)
    barrier()


if __name__ == "__main__":
    out, *names = sys.argv[1:]
    torch.set_num_threads(1)
    connect()
    for name in names:
        run(LAYOUTS[name], Path(out))
    disconnect()
    end_rank(0)
