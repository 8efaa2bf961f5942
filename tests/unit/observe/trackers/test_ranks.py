"""Two ranks in a gloo group: rank 0 writes, and accelerate's trackers leave the group and its devices alone."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from tests.unit.observe.trackers.test_tensorboard import events, expected_scalars, log_steps, scalars
from vlm_pg.observe.run_folder import RunFolder


def _rank(rank: int, folder: str) -> None:
    from accelerate.state import PartialState

    # What torchrun sets, and what would make accelerate form a group of its own.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", ACCELERATE_USE_DEEPSPEED="true")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    PartialState._reset_state()
    run = RunFolder(Path(folder) / "run")
    if rank == 0:  # before there is a group, too
        log_steps(run, range(1, 2))
    assert not dist.is_initialized()
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    group = dist.group.WORLD
    if rank == 0:
        log_steps(run, range(2, 4), resume_step=1)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    assert total.item() == 3.0 and dist.group.WORLD is group and PartialState._shared_state == {}
    dist.destroy_process_group()


def test_only_rank_0_writes_and_no_group_is_touched(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    folder = RunFolder.create(tmp_path / "run", resume=False)
    start_processes(_rank, (str(tmp_path),), nprocs=2, start_method="fork")
    assert scalars(folder) == expected_scalars(folder) and [
        event.step for event in events(folder).Scalars("train/kl")
    ] == [1, 2, 3]
    assert len(list(folder.tensorboard.iterdir())) == 2  # one event file for each start
