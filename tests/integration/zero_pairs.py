"""Short whole runs one after another on the started ranks: python -m ... FOLDER RUNS.

RUNS holds a JSON list of lists of ``key=value``; each run is that of FOLDER/run.yaml with these, in
FOLDER/run-<number>. Prints a line a run: its settings, passes of weight zero over all ranks, and the gradient norm of
each step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import vlm_pg.training.main as training
from tests.support.ranks import connected_ranks
from tests.support.runs import read_lines
from vlm_pg.config import load_config
from vlm_pg.distributed import RankLayout, barrier, sum_over_ranks
from vlm_pg.training.loss import GroupLoss

idle_passes = 0
of_pass = GroupLoss.of_pass


def _counted(loss: GroupLoss, passes: Sequence[Any], reference: Any, number: int, *outputs: Any) -> torch.Tensor:
    global idle_passes
    idle_passes += number >= len(passes)
    return of_pass(loss, passes, reference, number, *outputs)


def run(folder: Path, overrides: list[str], ranks: RankLayout) -> None:
    global idle_passes
    idle_passes = 0
    config = load_config(folder.parent / "run.yaml", [*overrides, f"run.dir={folder}"])
    assert training.train(config) == 0
    idle = sum_over_ranks({"idle": float(idle_passes)}, torch.device("cpu"))["idle"]
    if ranks.is_rank0:
        norms = [line.get("grad_norm") for line in read_lines(folder / "metrics.jsonl")]
        print(json.dumps({"run": overrides, "idle": idle, "grad_norms": norms}), flush=True)
    barrier()


if __name__ == "__main__":
    with connected_ranks() as ranks:
        # The runs of one process share its connection.
        training.connect = lambda config: None  # type: ignore[assignment]
        training.disconnect = barrier  # type: ignore[assignment]
        GroupLoss.of_pass = _counted  # type: ignore[method-assign]
        for number, overrides in enumerate(json.loads(Path(sys.argv[2]).read_text())):
            run(Path(sys.argv[1]) / f"run-{number}", overrides, ranks)
