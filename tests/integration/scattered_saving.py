"""Models of which each of the started ranks holds a share, and how they are saved.

python -m torch.distributed.run ... -m ... OUT SHARD_BYTES MODEL [MODEL ...]: reads each under ZeRO-3 and saves its
weights into OUT/saved-<place>, in files of up to so many bytes. Every rank writes OUT/<place>.<rank>.json: bytes of
memory of its own at the peak while it saves.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import torch

import vlm_pg.training.deepspeed_engine as deepspeed_engine
from tests.integration.scattered_loading import PeakMemory
from vlm_pg.distributed import RankLayout, barrier, disconnect, end_rank
from vlm_pg.models.loading import load_policy
from vlm_pg.models.settings import LoraSettings, ModelSettings
from vlm_pg.training.deepspeed_engine import DeepSpeedEngine, connect, sharded_loading
from vlm_pg.training.settings import TrainingSettings


def run(model: str, out: Path, place: int) -> None:
    ranks = RankLayout.here()
    file = out / f"deepspeed-{ranks.rank}.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}))
    settings = TrainingSettings(steps=1, engine="deepspeed", deepspeed_config=str(file), checked_updates=0)
    lora = LoraSettings(rank=4, alpha=8) if (Path(model) / "lora").exists() else None
    of_model = ModelSettings(path=model, train=("language",), lora=lora)
    around = sharded_loading(settings, torch.float32)
    policy = load_policy(model, device="cpu", settings=of_model, reading=around)
    engine = DeepSpeedEngine(policy, settings, ranks, "layers")
    saved = out / f"saved-{place}"
    if ranks.is_rank0:
        saved.mkdir()
    barrier()
    with PeakMemory() as saving:
        engine.save_weights(saved)
    said = {"parameters": sum(p.ds_numel for p in policy.parameters()), "saving": saving.anonymous}
    (out / f"{place}.{ranks.rank}.json").write_text(json.dumps(said))
    barrier()


if __name__ == "__main__":
    out, shard_bytes, *models = sys.argv[1:]
    deepspeed_engine.SHARD_BYTES = int(shard_bytes)
    torch.set_num_threads(1)
    # M_MMAP_THRESHOLD: else glibc keeps what is freed for later, and its memory says nothing about what is held.
    ctypes.CDLL(None).mallopt(-3, 128 * 1024)
    connect()
    for place, model in enumerate(models):
        run(model, Path(out), place)
    disconnect()
    end_rank(0)
