"""One optimizer step under DeepSpeed: python -m torch.distributed.run ... OUT CONFIG BUDGET [checkpointing] [chunks].

Every rank takes its share of the same groups; rank 0 writes the updated weights to OUT.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.groups import tiny_policy
from tests.support.training import make_groups
from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.training.deepspeed_engine import DeepSpeedEngine, connect
from vlm_pg.training.distributed import disconnect, end_rank, rank, world_size
from vlm_pg.training.settings import TrainingSettings
from vlm_pg.training.step import update_policy

LEARNING_RATE = 1e-4


def main(out: Path, deepspeed_config: str, budget: int, checkpointing: bool, logits_in_chunks: bool) -> None:
    torch.set_num_threads(1)
    connect()
    policy = tiny_policy(train_vision=True, gradient_checkpointing=checkpointing)
    if logits_in_chunks:
        # Ranks with unequally many response tokens would call the output head unequally often.
        policy.logits_chunk_rows = 6
    settings = TrainingSettings(
        steps=1, learning_rate=LEARNING_RATE, engine="deepspeed", deepspeed_config=deepspeed_config
    )
    groups = make_groups(policy)[rank() :: world_size()]
    engine = DeepSpeedEngine(policy, settings)
    metrics = update_policy(engine, None, groups, AlgorithmSettings(), budget, 1.0, settings.learning_rate)
    with engine.full_weights():
        weights = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    if rank() == 0:
        save_file(weights, out, metadata={name: str(value) for name, value in metrics.items()})
    disconnect()


if __name__ == "__main__":
    out, deepspeed_config, budget, *options = sys.argv[1:]
    main(Path(out), deepspeed_config, int(budget), "checkpointing" in options, "chunks" in options)
    end_rank(0)
