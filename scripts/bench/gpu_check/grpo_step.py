"""A whole GRPO step on one device: ``python -m scripts.bench.gpu_check.grpo_step --frames N --out FILE.json``.

A model of published dimensions with its tower, random weights, LoRA on the language model; one question on a video of N
frames (random pixels), 8 rollouts of it, one update, by the classes and with the memory decisions of ``vlm-pg train``.
Rewards are made up; decoding videos is not part of it. The second of two steps is timed by phase.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from scripts.bench.eval_files import TOWERS
from scripts.bench.gpu_check.stages import LORA_RANK
from vlm_pg.bench.case import SPECIAL_IDS, random_model
from vlm_pg.bench.runner import SIZES
from vlm_pg.config import RunConfig
from vlm_pg.distributed import RankLayout
from vlm_pg.files import write_json_atomic
from vlm_pg.models.liger import liger_of
from vlm_pg.models.loading import DTYPES, make_policy
from vlm_pg.models.policy import Policy
from vlm_pg.prompts.processor_outputs import prompt_from_processor
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.training.engines import Engine, TorchEngine
from vlm_pg.training.groups import Update
from vlm_pg.training.setup import choose_memory
from vlm_pg.training.step_features import StepFeatures
from vlm_pg.training.updates import UpdateSettings, update_policy
from vlm_pg.types import Prompt, RolloutGroup, Sample

# Of two frames: visual tokens of a picture, Video-R1's most; patches in height and width, of which 2 x 2 become one
# visual token; and the words around a video.
PAIR_TOKENS, ROWS, COLUMNS, WORDS = 128, 16, 32, 12
STEPS = 2


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, required=True, help="of the video, an even number")
    parser.add_argument("--model", choices=sorted(SIZES), default="7b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    if options.frames < 2 or options.frames % 2:
        parser.error(f"--frames is {options.frames}; two frames make one patch, so give an even number of 2 or more")
    asked = ("frames", "model", "generations", "new_tokens")
    found: dict[str, Any] = {key: getattr(options, key) for key in asked}
    found |= {"prompt_tokens": None, "peak_bytes": None, "seconds": {}, "failed": ""}
    try:
        found |= measure(options.frames, options.model, options.device, options.generations, options.new_tokens)
    except torch.OutOfMemoryError as error:
        found["failed"] = f"out of GPU memory: {str(error).splitlines()[0]}"
    write_json_atomic(options.out, found)
    print(found)
    return 1 if found["failed"] else 0


def measure(frames: int, model: str, device: str, generations: int, new_tokens: int) -> dict[str, Any]:
    """Seconds by phase, peak memory in bytes with and without what stands there before (weights), and lengths."""
    prompt_tokens = frames // 2 * PAIR_TOKENS + WORDS
    config = configuration(model, "bf16" if device == "cuda" else "fp32", prompt_tokens, generations, new_tokens)
    policy = make_policy(
        random_model(model, device=device, dtype=DTYPES[config.model.dtype], tower=TOWERS[model].config),
        None,
        config.model,
    )
    with torch.no_grad():  # ends and media are as good as never drawn
        policy.model.lm_head.weight[policy.vocab_size - SPECIAL_IDS :].zero_()
    engine = TorchEngine(policy, config.training)
    memory = choose_memory(config, policy, None, RankLayout.here())
    before = torch.cuda.memory_allocated() if device == "cuda" else None
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for step in range(STEPS):
        # A new video each time: nothing of it is kept from the step before.
        seconds, entry = one_step(engine, config, random_prompt(policy, frames, seed=step), step)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return {
        "prompt_tokens": prompt_tokens,
        "generations": generations,
        "new_tokens": new_tokens,
        "seconds": seconds | {"step": sum(seconds.values())},
        "peak_bytes": peak,
        "before_bytes": before,
        "memory": str(memory.choice),
        "liger": liger_of(policy.model).parts,
        **entry,
    }


def configuration(model: str, dtype: str, prompt_tokens: int, generations: int, new_tokens: int) -> RunConfig:
    """What a run with one such question a step would be configured by."""
    return RunConfig.model_validate(
        {
            "run": {"name": "grpo-step"},
            "data": {"train": "none.jsonl"},
            "model": {"path": model, "dtype": dtype, "gradient_checkpointing": True, "lora": {"rank": LORA_RANK}},
            "prompt": {"max_prompt_tokens": prompt_tokens},
            "rollout": {"num_generations": generations, "max_new_tokens": new_tokens},
            # The whole group in one pass where it fits; training cuts it by itself where it does not.
            "training": {
                "steps": STEPS,
                "prompts_per_step": 1,
                "micro_batch_tokens": prompt_tokens + generations * new_tokens,
            },
        }
    )


def one_step(engine: Engine, config: RunConfig, prompt: Prompt, step: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Seconds of vision, rollout and update; and what came of them."""
    policy, seconds = engine.policy, {}

    def timed(phase: str, run: Callable[[], Any]) -> Any:
        _wait(policy.device)
        start = time.perf_counter()
        result = run()
        _wait(policy.device)
        seconds[phase] = time.perf_counter() - start
        return result

    vision = timed("vision", lambda: StepFeatures(policy, [prompt], engine.sequence))
    sampler = RolloutEngine(policy, config.rollout, seed=step)
    (prompt,) = vision.prompts
    (rollouts,) = timed("rollout", lambda: sampler.generate([prompt], step=step))
    # Made up, of mean 0 and spread 1 where their number is even.
    advantages = tuple(1.0 if index % 2 else -1.0 for index in range(len(rollouts)))
    sample = Sample(prompt.sample_id, "?", (), (), "A", "multiple_choice", "made up", "made up")
    group = RolloutGroup(sample, prompt, rollouts, policy.weights_version, (), advantages)
    update = Update([group], 1e-6, vision=vision)
    metrics = timed("update", lambda: update_policy(engine, None, update, UpdateSettings.of(config)))
    sampled = sum(len(rollout.token_ids) for rollout in rollouts)
    return seconds, {"loss": metrics["loss"], "grad_norm": metrics["grad_norm"], "sampled_tokens": sampled}


def random_prompt(policy: Policy, frames: int, seed: int) -> Prompt:
    """A video of random pixels between a few words."""
    generator = torch.Generator().manual_seed(seed)
    pairs, video = frames // 2, policy.model.config.video_token_id
    ids = torch.cat([torch.arange(5), torch.full((pairs * PAIR_TOKENS,), video), torch.arange(WORDS - 5)])
    pixels = torch.randn(pairs * ROWS * COLUMNS, 3 * 2 * 14 * 14, generator=generator)
    inputs = {"input_ids": ids[None], "mm_token_type_ids": 2 * (ids == video)[None].long()}
    inputs |= {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([[pairs, ROWS, COLUMNS]])}
    return prompt_from_processor(inputs | {"second_per_grid_ts": [1.0]}, policy.positions, f"video {seed}")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
