"""Peak memory of one update on a group behind a long video, with and without what keeps long streams small.

    python docs/benchmarks/measure_long.py --out FILE.json [--prefixes 4096 16384] [--ways plain checkpointed small]
        [--cap-mb 1200] [--folder FOLDER]

One group: a video of so many visual tokens (64 a frame, 16 x 16 patches), G = 8 answers of 64 tokens. A Qwen2.5-VL with
random weights (fp32, hidden 256, 4 layers, 4 heads, 2 key-value heads; tower of hidden 64, 2 blocks), everything
trained, by training's own update: the tower once, the prompt once, responses in chunks, AdamW. Each measurement is a
process of its own; ``peak`` is VmHWM minus VmRSS before the update. Gradients of all ways are compared at each length.

``plain``: no checkpointing. ``checkpointed``: decoder layers and tower blocks are recomputed. ``small``: and layer
inputs and prefix states are put away in a file, MLPs and norms run in tiles of 2,048 rows, the tower in pieces of 4,096
tokens.
``--cap-mb``: what the process may map privately during the update above what it has before (RLIMIT_DATA); beyond it
an allocation fails. The file is in --folder and no memory of the process.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointed": {"gradient_checkpointing": True},
    "small": {
        "gradient_checkpointing": True,
        "offload_layer_inputs": True,
        "offload_prefix_states": True,
        "mlp_tile_rows": 2048,
        "vision_piece_tokens": 4096,
    },
}
GENERATIONS, RESPONSE_TOKENS, FRAME_TOKENS, CHUNK_ROOM = 8, 64, 64, 256


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--prefixes", type=int, nargs="+", default=[4096, 16384], help="visual tokens")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--cap-mb", type=int, help="limit of an update's own memory, MiB")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the file of what is put away is")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        print(json.dumps(measure(**json.loads(options.one))))
        return 0
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as gradients:
        for prefix in options.prefixes:
            for way in options.ways:
                spec = {"prefix": prefix, "way": way, "cap_mb": options.cap_mb, "folder": options.folder}
                spec["gradients"] = f"{gradients}/{prefix}-{way}.pt"
                lines.append({"prefix": prefix, "way": way, **in_process(spec)})
                first = next(line for line in lines if line["prefix"] == prefix)
                if "failed" not in lines[-1] | first and lines[-1] is not first:
                    lines[-1] |= difference(spec["gradients"], f"{gradients}/{prefix}-{first['way']}.pt")
                print(json.dumps(lines[-1]), flush=True)
                if options.out:
                    options.out.write_text(json.dumps({"machine": machine(), "cap_mb": options.cap_mb, "runs": lines}))
    return 0


def in_process(spec: dict[str, Any]) -> dict[str, Any]:
    """The measurement, or the end of what it said when it failed."""
    # glibc gives freed memory back at once: a peak then depends on nothing that ran before it.
    glibc = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    command = [sys.executable, __file__, "--one", json.dumps(spec)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | glibc, check=False)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


def measure(prefix: int, way: str, cap_mb: int | None, folder: str, gradients: str) -> dict[str, Any]:
    """One update in this process."""
    import torch

    from vlm_pg.algorithms.settings import AlgorithmSettings
    from vlm_pg.training.engines import TorchEngine
    from vlm_pg.training.settings import TrainingSettings
    from vlm_pg.training.updates import Update, UpdateSettings, update_policy

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    policy = make_policy(WAYS[way] | {"offload_folder": folder})
    engine = TorchEngine(policy, TrainingSettings(steps=1))
    step = engine.step

    def noting(learning_rate: float) -> float:
        torch.save({name: p.grad for name, p in policy.model.named_parameters()}, gradients)
        return step(learning_rate)

    engine.step = noting  # type: ignore[method-assign]
    budgets = {tokens: UpdateSettings(AlgorithmSettings(), tokens + CHUNK_ROOM) for tokens in (256, prefix)}
    # Libraries that are loaded and buffers that are made on first use, Adam's moments among them, are no part of it.
    update_policy(engine, None, Update([make_group(policy, 128)], 1e-6), budgets[256])
    group = make_group(policy, prefix)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before, data_before = status("VmRSS"), status("VmData")
    if cap_mb is not None:
        limit = data_before + cap_mb * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    start, cpu = time.perf_counter(), time.process_time()
    metrics = update_policy(engine, None, Update([group], 1e-6), budgets[prefix])
    found = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
    place = policy.stream_memory.target
    return found | {
        "peak_bytes": status("VmHWM") - before,
        "resident_before": before,
        "data_before": data_before,
        "file_bytes": 0 if place is None else place.size,
        "loss": metrics["loss"],
        "grad_norm": metrics["grad_norm"],
        "backward_calls": metrics["backward_calls"],
    }


def make_policy(settings: dict[str, Any]) -> Any:
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    from vlm_pg.models.loading import make_policy as around
    from vlm_pg.models.settings import PARTS, ModelSettings

    text = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"intermediate_size": 704, "vocab_size": 4096, "max_position_embeddings": 131072, "bos_token_id": None}
    text |= {"eos_token_id": 4095, "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12]}}
    vision = {"depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 128, "out_hidden_size": 256}
    vision |= {"patch_size": 4, "window_size": 32, "fullatt_block_indexes": [1], "tokens_per_second": 2}
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    special = {name: 4090 + place for place, name in enumerate(names)}
    text["rope_parameters"]["rope_theta"] = 1e6  # type: ignore[index]
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **special)
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config)
    return around(model, None, ModelSettings(path="random", train=PARTS, **settings))


def make_group(policy: Any, visual_tokens: int) -> Any:
    """Random pixels and answers; advantages of both signs."""
    import torch

    from vlm_pg.prompts.processor_outputs import prompt_from_processor
    from vlm_pg.types import Rollout, RolloutGroup, Sample

    generator = torch.Generator().manual_seed(visual_tokens)
    frames = visual_tokens // FRAME_TOKENS
    video = policy.model.config.video_token_id
    ids = torch.cat([torch.arange(5), torch.full((visual_tokens,), video), torch.arange(7)])
    pixels = torch.randn(frames * 256, 3 * 2 * 16, generator=generator)
    inputs = {"input_ids": ids[None], "mm_token_type_ids": 2 * (ids == video)[None].long()}
    inputs |= {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([[frames, 16, 16]])}
    prompt = prompt_from_processor(inputs | {"second_per_grid_ts": [1.0]}, policy.positions, "long")
    answers = torch.randint(0, 4000, (GENERATIONS, RESPONSE_TOKENS), generator=generator)
    rollouts = tuple(Rollout(row, torch.full((RESPONSE_TOKENS,), -8.3), "stop") for row in answers)
    advantages = tuple(0.7 - 0.2 * index for index in range(GENERATIONS))
    sample = Sample("long", "?", (), (), "A", "multiple_choice", "test", "test")
    return RolloutGroup(sample, prompt, rollouts, policy.weights_version, (), advantages)


def difference(ours: str, theirs: str) -> dict[str, float]:
    """Largest difference of a weight's gradient, relative to its norm."""
    import torch

    got, expected = torch.load(ours), torch.load(theirs)
    errors = [float((got[name] - g).norm() / g.norm().clamp_min(1e-12)) for name, g in expected.items()]
    return {"gradient_difference": max(errors)}


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def machine() -> dict[str, Any]:
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    return {"when": datetime.now(UTC).isoformat(), "cpu": cpu, "python": platform.python_version(),
            "torch": torch.__version__, "threads": os.environ.get("OMP_NUM_THREADS", "1")}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
