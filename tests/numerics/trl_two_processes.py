"""Run by test_trl.py in each of two processes: one step of both trainers, gradients as reduced over the processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import trl

from tests.support.trl import Recorded
from tests.support.trl_cases import assert_equal
from vlm_pg.distributed import end_rank
from vlm_pg.integrations.trl import GroupedGRPOTrainer


def main(folder: Path) -> None:
    runs = []
    for kind in (trl.GRPOTrainer, GroupedGRPOTrainer):
        run = Recorded(kind, folder / os.environ["RANK"], per_device_train_batch_size=4)
        run.trainer.train()
        runs.append(run)
    theirs, ours = runs
    wrapped = ours.trainer.model_wrapped
    assert isinstance(wrapped, torch.nn.parallel.DistributedDataParallel)
    assert_equal(ours, theirs)
    # Each process trained on a prompt of its own: without the reduction their gradients would differ.
    norm = torch.stack([gradient.norm() for gradient in ours.gradients[0].values()])
    everywhere = [torch.empty_like(norm) for _ in range(2)]
    torch.distributed.all_gather(everywhere, norm)
    assert torch.equal(*everywhere)
    print(f"gradients of {len(everywhere)} processes equal under {type(wrapped).__name__}", flush=True)
    torch.distributed.destroy_process_group()
    end_rank(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
