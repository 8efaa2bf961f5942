"""Models read and saved under ZeRO-3 on several ranks: python -m ... OUT DTYPE SHARD_BYTES MODEL [MODEL ...].

Each MODEL is a folder; with a file ``lora`` in it an adapter trains. Weights go into OUT/saved-<number> in files of up
to SHARD_BYTES; with OUT/compare, rank 0 writes gathered weights and buffers to OUT/<number>.safetensors. Every rank
writes OUT/<number>.<rank>.json: bytes of its own memory (anonymous pages; memory-mapped files are shared by all
processes and may be dropped by the kernel) above the start, at the peak while the model is read and while it is saved.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
import threading
from pathlib import Path

import torch
from safetensors.torch import save_file

import vlm_pg.training.deepspeed_engine as deepspeed_engine
from tests.support.ranks import connected_ranks
from vlm_pg.distributed import RankLayout, barrier
from vlm_pg.models.loading import load_policy
from vlm_pg.models.settings import LoraSettings, ModelSettings
from vlm_pg.training.deepspeed_engine import DeepSpeedEngine, sharded_loading
from vlm_pg.training.settings import TrainingSettings


class PeakMemory:
    """Samples this process's memory while the block runs; ``anonymous`` and ``mapped`` are bytes above the start."""

    def __enter__(self) -> PeakMemory:
        self._done = threading.Event()
        self._start = self._most = _resident()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        self.anonymous, self.mapped = (most - start for most, start in zip(self._most, self._start, strict=True))

    def _sample(self) -> None:
        while not self._done.wait(0.002):
            self._most = tuple(map(max, self._most, _resident()))


def _resident() -> tuple[int, ...]:
    status = Path("/proc/self/status").read_text()
    found = [re.search(rf"{name}:\s+(\d+) kB", status) for name in ("RssAnon", "RssFile")]
    return tuple(int(match[1]) * 1024 for match in found if match)


def run(model: str, out: Path, number: int, dtype: str, ranks: RankLayout) -> None:
    file = out / f"deepspeed-{ranks.rank}.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}))
    settings = TrainingSettings(steps=1, engine="deepspeed", deepspeed_config=str(file), checked_updates=0)
    lora = LoraSettings(rank=4, alpha=8) if (Path(model) / "lora").exists() else None
    of_model = ModelSettings(path=model, dtype=dtype, train=("language",), lora=lora)
    with PeakMemory() as reading:
        context = sharded_loading(settings, torch.bfloat16 if dtype == "bf16" else torch.float32)
        policy = load_policy(model, device="cpu", settings=of_model, reading=context)
    # Of weights, in memory of its own or mapped from a file.
    held = sum(p.nbytes + (p.ds_tensor.nbytes if hasattr(p, "ds_tensor") else 0) for p in policy.parameters())
    engine = DeepSpeedEngine(policy, settings, ranks, "layers")
    saved = out / f"saved-{number}"
    if ranks.is_rank0:
        saved.mkdir()
    barrier()
    with PeakMemory() as saving:
        engine.save_weights(saved)
    peaks = {"reading": reading.anonymous, "mapped": reading.mapped, "saving": saving.anonymous}
    facts = {"parameters": sum(p.ds_numel for p in policy.parameters()), "held": held, **peaks}
    (out / f"{number}.{ranks.rank}.json").write_text(json.dumps(facts))
    if (out / "compare").exists():
        with engine.full_weights():
            if ranks.is_rank0:
                tensors = {**dict(policy.model.named_parameters()), **dict(policy.model.named_buffers())}
                copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
                save_file(copies, out / f"{number}.safetensors")
    barrier()


if __name__ == "__main__":
    out, dtype, shard_bytes, *models = sys.argv[1:]
    deepspeed_engine.SHARD_BYTES = int(shard_bytes)
    # M_MMAP_THRESHOLD: else glibc caches freed memory, and its size says nothing about what is held.
    ctypes.CDLL(None).mallopt(-3, 128 * 1024)
    with connected_ranks() as ranks:
        for number, model in enumerate(models):
            run(model, Path(out), number, dtype, ranks)
