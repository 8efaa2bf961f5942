"""Layouts of training one after the other: python -m torch.distributed.run ... -m ... OUT LAYOUT [LAYOUT ...].

Names are those of ``tests.support.layouts.LAYOUTS``, all of as many ranks as there are. Rank 0 writes
OUT/<name>.safetensors, the weights after all steps, with the gradient norms on the way.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from safetensors.torch import save_file

from tests.support.layouts import LAYOUTS, Layout, layout_engine, train_steps, weights
from tests.support.ranks import connected_ranks
from vlm_pg.distributed import RankLayout, barrier


def run(layout: Layout, out: Path) -> None:
    ranks = RankLayout(RankLayout.here().rank, RankLayout.here().world_size, layout.sequence)
    assert ranks.world_size == layout.ranks
    engine = layout_engine(layout, out, ranks)
    metrics = train_steps(engine, ranks, balance=layout.balanced)
    after = weights(engine)
    if ranks.is_rank0:
        metadata = {"description": engine.description, "metrics": json.dumps(metrics)}
        save_file(after, out / f"{layout.name}.safetensors", metadata=metadata)
    barrier()


if __name__ == "__main__":
    with connected_ranks():
        for name in sys.argv[2:]:
            run(LAYOUTS[name], Path(sys.argv[1]))
