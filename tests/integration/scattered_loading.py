"""Loading under ZeRO-3 on several ranks: python -m torch.distributed.run ... -m ... OUT DTYPE MODEL [MODEL ...].

Each MODEL is a folder. Every rank writes OUT/<place>.<rank>.json: bytes of its own memory (anonymous pages; the mapped
files, which all processes share and the kernel may drop, apart) above what it had before, at the peak while the model
was read and while the engine was made. Rank 0 writes the weights and buffers to OUT/<place>.safetensors where
OUT/compare exists.
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

from vlm_pg.distributed import RankLayout, disconnect, end_rank
from vlm_pg.models.loading import load_policy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.training.deepspeed_engine import DeepSpeedEngine, connect, sharded_loading
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


def run(model: str, out: Path, place: int, dtype: str) -> None:
    ranks = RankLayout.here()
    file = out / f"deepspeed-{ranks.rank}.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}))
    settings = TrainingSettings(steps=1, engine="deepspeed", deepspeed_config=str(file), checked_updates=0)
    of_model = ModelSettings(path=model, dtype=dtype)
    with PeakMemory() as reading:
        around = sharded_loading(settings, torch.bfloat16 if dtype == "bf16" else torch.float32)
        policy = load_policy(model, device="cpu", settings=of_model, reading=around)
    # Of weights, whether in memory of its own or mapped from a file.
    held = sum(p.nbytes + (p.ds_tensor.nbytes if hasattr(p, "ds_tensor") else 0) for p in policy.parameters())
    with PeakMemory() as making:
        engine = DeepSpeedEngine(policy, settings, ranks, "layers")
    said = {
        "parameters": sum(p.ds_numel for p in policy.parameters()),
        "held": held,
        "reading": reading.anonymous,
        "mapped": reading.mapped,
        "making": making.anonymous,
    }
    (out / f"{place}.{ranks.rank}.json").write_text(json.dumps(said))
    if (out / "compare").exists():
        with engine.full_weights():
            if ranks.is_rank0:
                weights = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
                buffers = {name: b.detach().clone() for name, b in policy.model.named_buffers()}
                save_file(weights | buffers, out / f"{place}.safetensors")


if __name__ == "__main__":
    out, dtype, *models = sys.argv[1:]
    torch.set_num_threads(1)
    # M_MMAP_THRESHOLD: else glibc keeps what is freed for later, and its memory says nothing about what is held.
    ctypes.CDLL(None).mallopt(-3, 128 * 1024)
    connect()
    for place, model in enumerate(models):
        run(model, Path(out), place, dtype)
    disconnect()
    end_rank(0)
