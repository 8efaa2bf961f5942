"""Short whole runs under ZeRO-3, one after the other: python -m torch.distributed.run ... -m ... FOLDER RUNS.

RUNS holds a JSON list of lists of ``key=value``; each run is that of FOLDER/run.yaml with these. Prints a line a run:
its settings, passes that were worth nothing over all ranks, and the gradient norm of each step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import vlm_pg.training.main as training
from tests.support.runs import read_lines
from vlm_pg.config import load_config
from vlm_pg.distributed import RankLayout, barrier, disconnect, end_rank, sum_over_ranks
from vlm_pg.training.deepspeed_engine import connect
from vlm_pg.training.loss import GroupLoss

idle_passes = 0
of_pass = GroupLoss.of_pass


def _counted(loss: GroupLoss, passes: Sequence[Any], reference: Any, number: int, *outputs: Any) -> torch.Tensor:
    global idle_passes
    idle_passes += number >= len(passes)
    return of_pass(loss, passes, reference, number, *outputs)


def run(folder: Path, place: int, overrides: list[str]) -> None:
    global idle_passes
    idle_passes = 0
    where = folder / f"run-{place}"
    config = load_config(folder / "run.yaml", [*overrides, f"run.dir={where}"])
    assert training.train(config) == 0
    idle = sum_over_ranks({"idle": float(idle_passes)}, torch.device("cpu"))["idle"]
    if RankLayout.here().is_rank0:
        norms = [line["grad_norm"] for line in read_lines(where / "metrics.jsonl")]
        print(json.dumps({"run": overrides, "idle": idle, "grad_norms": norms}), flush=True)
    barrier()


def _nothing(*args: Any) -> None:
    """The runs of one process share its connection."""


if __name__ == "__main__":
    folder, runs = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(1)
    connect()
    training.connect = lambda config: RankLayout.here()
    training.disconnect = _nothing  # type: ignore[assignment]
    GroupLoss.of_pass = _counted  # type: ignore[method-assign]
    for place, overrides in enumerate(runs):
        run(folder, place, overrides)
    disconnect()
    end_rank(0)
