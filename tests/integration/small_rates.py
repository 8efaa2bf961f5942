"""What updates at a rate of 1e-6 leave in the masters of bf16 weights: python -m tests.integration.small_rates FOLDER.

For the torch engine and each stage of DeepSpeed rank 0 prints a line: which; dtypes of what the optimizer keeps; the
share of masters that have moved, by no more than the rate an update; the share of bf16 weights that have.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support import zero_cases
from tests.support.ranks import connected_ranks
from tests.support.zero_cases import PARTS, ZeroCase, case_policy, train, training_settings
from vlm_pg.distributed import RankLayout, barrier
from vlm_pg.training.deepspeed_engine import DeepSpeedEngine
from vlm_pg.training.engines import Engine, TorchEngine

RATE = 1e-6
CASES = {
    name: ZeroCase(stage, 2, False, offload, PARTS, False, False, False, bf16=True)
    for name, stage, offload in (
        ("torch", 1, "none"),
        ("zero-1", 1, "none"),
        ("zero-2-offload", 2, "optimizer"),
        ("zero-3", 3, "none"),
    )
}


def make(name: str, folder: Path, ranks: RankLayout) -> Engine:
    case, file = CASES[name], folder / f"{name}.json"
    options = {} if name == "torch" else {"engine": "deepspeed", "deepspeed_config": str(file)}
    if ranks.is_rank0:
        file.write_text(json.dumps(case.deepspeed()))
    barrier()
    settings = training_settings(case, **options).model_copy(update={"adam_epsilon": 1e-12})
    return (TorchEngine if name == "torch" else DeepSpeedEngine)(case_policy(case), settings, ranks)


def main(folder: str, ranks: RankLayout) -> None:
    zero_cases.LEARNING_RATE = RATE
    for name, case in CASES.items():
        before = {n: p.detach().float().flatten() for n, p in case_policy(case).model.named_parameters()}
        engine = make(name, Path(folder), ranks)
        train(engine, case, range(1), ranks.rank, ranks.world_size)
        updates, kinds, moved, count = engine.states.updates, set(), 0, 0
        for piece in engine.states.slices():
            kinds.add(f"{piece.kind}:{str(piece.values.dtype).removeprefix('torch.')}")
            if piece.kind == "master":
                start = before[piece.weight][piece.first : piece.first + piece.values.numel()]
                change = (piece.values.cpu() - start).abs()
                moved += int(((change > 0) & (change < 1.5 * RATE * updates)).sum())
                count += piece.values.numel()
        with engine.full_weights():
            rounded = sum(
                int((p.detach().float().flatten() != before[n]).sum())
                for n, p in engine.policy.model.named_parameters()
            )
        if ranks.is_rank0:
            print(
                name, ",".join(sorted(kinds)), f"{moved / count:.3f}", f"{rounded / sum(map(len, before.values())):.3f}"
            )


if __name__ == "__main__":
    with connected_ranks() as ranks:
        main(sys.argv[1], ranks)
