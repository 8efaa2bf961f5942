"""Cases of a table under DeepSpeed, one by one: python -m torch.distributed.run ... -m ... OUT CASES [cpu-adam].

CASES holds a JSON list of ``ZeroCase`` fields. Rank 0 writes OUT/<number>.safetensors: the weights after all steps,
with what the passes were, and whether a run that stopped and went on has the same ones bit for bit.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.ranks import connected_ranks
from tests.support.zero_cases import ZeroCase, case_policy, train, training_settings
from vlm_pg.distributed import RankLayout, barrier
from vlm_pg.training.deepspeed_engine import DeepSpeedEngine


def run(case: ZeroCase, out: Path, own_cpu_adam: bool) -> None:
    folder = out.with_suffix("")
    file = folder / "deepspeed.json"
    ranks = RankLayout.here()
    if ranks.is_rank0:
        folder.mkdir(parents=True)
        file.write_text(json.dumps(case.deepspeed(own_cpu_adam)))
    barrier()
    settings = training_settings(case, engine="deepspeed", deepspeed_config=str(file))
    engine = DeepSpeedEngine(case_policy(case), settings, ranks)
    done = train(engine, case, range(case.stop_after), ranks.rank, ranks.world_size)
    engine.save_optimizer(folder)
    state = weights(engine)
    for name, value in train(engine, case, range(case.stop_after, case.steps), ranks.rank, ranks.world_size).items():
        done[name] += value
    after = weights(engine)
    resumed = DeepSpeedEngine(case_policy(case, state), settings, ranks)
    resumed.load_optimizer(folder)
    train(resumed, case, range(case.stop_after, case.steps), ranks.rank, ranks.world_size)
    again = weights(resumed)
    if ranks.is_rank0:
        same = all(torch.equal(after[name], again[name]) for name in after)
        metadata = {name: str(value) for name, value in done.items()} | {"resumed_equal": str(same)}
        save_file(after, out, metadata=metadata | {"description": engine.description})
    barrier()
    if ranks.is_rank0:
        shutil.rmtree(folder)


def weights(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    with engine.full_weights():
        return {name: p.detach().clone() for name, p in engine.policy.model.named_parameters()}


if __name__ == "__main__":
    out, cases, *options = sys.argv[1:]
    with connected_ranks():
        for number, values in enumerate(json.loads(Path(cases).read_text())):
            case = ZeroCase(**values | {"train": tuple(values["train"])})
            run(case, Path(out) / f"{number}.safetensors", "cpu-adam" in options)
