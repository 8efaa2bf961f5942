"""Run by test_trl_options.py in a process of its own: both trainers with ZeRO-2, losses and gradient norms."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import deepspeed
import pytest
import torch
import trl

from tests.support.trl_cases import Case, run
from vlm_pg.integrations.trl import GroupedGRPOTrainer

# On a CPU DeepSpeed would compile an extension for shared memory at its first collective, which takes minutes.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
ZERO = {
    "zero_optimization": {"stage": 2},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_allow_untested_optimizer": True,
}


def main(folder: Path, port: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    case = Case({"deepspeed": ZERO, "max_grad_norm": 1.0})
    runs = [run(case, kind, folder) for kind in (trl.GRPOTrainer, GroupedGRPOTrainer)]
    losses, norms = (
        [recorded.losses for recorded in runs],
        [
            [entry["grad_norm"] for entry in recorded.trainer.state.log_history if "grad_norm" in entry]
            for recorded in runs
        ],
    )
    assert len(losses[0]) == len(norms[0]) == 3
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    print("equal", flush=True)
    os._exit(0)  # DeepSpeed's teardown at interpreter exit may wait for a process group


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
