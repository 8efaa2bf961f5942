"""DeepSpeed's states and weights on NVMe: python -m ... OUT states DTYPE (one rank), or OUT weights (two).

states: saved and loaded; OUT/differ.json: name -> weights and states that differ. weights: every rank writes
OUT/found-<rank>.json: weights on NVMe and whether they are gathered as they were read, and the errors of an update that
leaves NaN on rank 1 and of reading a model with NaN there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.layouts import LAYOUTS, train_steps, training_settings
from tests.support.ranks import connected_ranks
from tests.support.stages import QUESTIONS, equal_checkpoints
from tests.support.tiny import tiny_model, tiny_processor
from vlm_pg.distributed import RankLayout, barrier
from vlm_pg.errors import ModelError, NotFiniteError
from vlm_pg.models.loading import load_policy
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.models.weights import is_on_nvme
from vlm_pg.training.deepspeed_engine import DeepSpeedEngine, sharded_loading
from vlm_pg.training.settings import TrainingSettings

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


def check_states(out: Path, dtype: str) -> dict[str, list[str]]:
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


# Each rank's half is 1 MB, so it goes to NVMe. As the file has it.
WEIGHT = "model.layers.1.mlp.down_proj.weight"


def save_model(folder: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
    model = tiny_model(**WIDER | {"intermediate_size": 2048}, rope_parameters=rope)
    model.save_pretrained(folder)
    tiny_processor().save_pretrained(folder)


def settings_of(out: Path, ranks: RankLayout) -> TrainingSettings:
    nvme = {"device": "nvme", "nvme_path": str(out), "buffer_size": 2**20, "max_in_cpu": 0}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_param": nvme}
    zero["offload_optimizer"] = {"device": "cpu"}
    file = out / f"deepspeed-{ranks.rank}.json"
    file.write_text(json.dumps({"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}))
    return training_settings(LAYOUTS["torch-1"], file)


def read_model(model: Path, settings: TrainingSettings) -> Policy:
    of_model = ModelSettings(path=str(model), dtype="fp32", train=("language",))
    return load_policy(model, device="cpu", settings=of_model, reading=sharded_loading(settings, torch.float32))


def check_weights(out: Path, ranks: RankLayout) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if ranks.is_rank0:
        save_model(out / "whole")
        tensors = load_file(out / "whole" / "model.safetensors")
        save_model(out / "broken")
        tensors[WEIGHT].view(-1)[-1] = torch.nan
        save_file(tensors, out / "broken" / "model.safetensors", metadata={"format": "pt"})
    barrier()
    settings = settings_of(out, ranks)
    engine = DeepSpeedEngine(read_model(out / "whole", settings), settings, ranks)
    on_nvme = [name for name, weight in engine.policy.model.named_parameters() if is_on_nvme(weight)]
    with engine.full_weights():
        got = {name: weight.detach().clone() for name, weight in engine.policy.model.named_parameters()}
    read = dict(load_policy(out / "whole", device="cpu").model.named_parameters())
    found["on nvme"] = {name: torch.equal(got[name], read[name]) for name in on_nvme}
    train_steps(engine, ranks, steps=[0], questions=2)
    for piece in engine.states.slices() if ranks.rank else ():
        if piece.kind == "exp_avg" and piece.weight.endswith("layers.1.mlp.down_proj.weight"):
            piece.values[-1] = torch.nan
    try:
        train_steps(engine, ranks, steps=[1], questions=2)
    except NotFiniteError as error:
        found["update"] = str(error)
    try:
        read_model(out / "broken", settings)
    except ModelError as error:
        found["read"] = str(error)
    barrier()
    return found


if __name__ == "__main__":
    out = Path(sys.argv[1])
    with connected_ranks() as ranks:
        if sys.argv[2] == "states":
            (out / "differ.json").write_text(json.dumps(check_states(out, sys.argv[3])))
        else:
            (out / f"found-{ranks.rank}.json").write_text(json.dumps(check_weights(out, ranks)))
