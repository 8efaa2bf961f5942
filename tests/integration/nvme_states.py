"""Optimizer states on NVMe, saved and loaded: python -m torch.distributed.run ... -m ... OUT DTYPE, on one rank.

Writes OUT/differ.json: name -> which weights and states differ.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.support.layouts import LAYOUTS, train_steps, training_settings
from tests.support.ranks import connected_ranks
from tests.support.stages import QUESTIONS, equal_checkpoints
from tests.support.tiny import tiny_model, tiny_processor
from vlm_pg.distributed import RankLayout
from vlm_pg.models.loading import load_policy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.training.deepspeed_engine import DeepSpeedEngine

# Large enough for DeepSpeed to put its groups of weights on NVMe, all but one.
WIDER = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2}
GROUP = 400_000


def make_engine(out: Path, model: Path, dtype: str, nvme: bool) -> DeepSpeedEngine:
    settings = ModelSettings(path=str(model), dtype=dtype, train=("language",))
    policy = load_policy(model, device="cpu", settings=settings)
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": GROUP}
    if nvme:
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(out), "buffer_count": 5}
    file = out / "deepspeed.json"
    file.write_text(json.dumps({"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}))
    engine = DeepSpeedEngine(policy, training_settings(LAYOUTS["torch-1"], file), RankLayout())
    on_nvme = [engine._engine.optimizer._swappable_optimizer_subgroup(group) for group in range(4)]
    assert all(on_nvme) == nvme
    return engine


def save(engine: DeepSpeedEngine, path: Path) -> Path:
    path.mkdir()
    engine.save_weights(path)
    engine.save_optimizer(path)
    engine.policy.processor.save_pretrained(path)
    return path


def step(engine: DeepSpeedEngine, number: int) -> DeepSpeedEngine:
    train_steps(engine, steps=[number], questions=QUESTIONS)
    return engine


def run(out: Path, dtype: str) -> dict[str, list[str]]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
    tiny_model(**WIDER, rope_parameters=rope).save_pretrained(out / "base")
    tiny_processor().save_pretrained(out / "base")
    whole = step(make_engine(out, out / "base", dtype, nvme=True), 0)
    first = save(whole, out / "first")
    second = save(step(whole, 1), out / "second")
    differ = {}
    for name, nvme in (("memory", False), ("nvme", True)):
        loaded = make_engine(out, first, dtype, nvme)
        loaded.load_optimizer(first)
        differ[f"{name} from nvme"] = equal_checkpoints(first, save(loaded, out / name))
        further = save(step(loaded, 1), out / f"{name}-further")
        differ[f"{name} goes on"] = equal_checkpoints(second, further)
    back = make_engine(out, out / "memory-further", dtype, nvme=True)
    back.load_optimizer(out / "memory-further")
    differ["nvme from memory"] = equal_checkpoints(out / "memory-further", save(back, out / "back"))
    return differ


if __name__ == "__main__":
    with connected_ranks():
        (Path(sys.argv[1]) / "differ.json").write_text(json.dumps(run(Path(sys.argv[1]), sys.argv[2])))
