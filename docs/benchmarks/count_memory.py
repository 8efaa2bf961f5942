"""What of one group of 32,768 + 8 x 512 tokens fits into 80 GB: Qwen2.5-VL-7B, full and LoRA, ZeRO-3 on 8 ranks.

Counted, not measured: activations by running the model's own code on tensors without values, states by arithmetic.

    python docs/benchmarks/count_memory.py docs/benchmarks/DATE-paper-memory.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vlm_pg.memory import GIB
from vlm_pg.models.memory_choice import smallest
from vlm_pg.models.settings import LoraSettings, ModelSettings
from vlm_pg.plan.memory import Plan, plan_memory, plan_to_fit
from vlm_pg.plan.setup import TEXT_TOKENS, Setup
from vlm_pg.plan.shape import counted_shape_of, published_config

NAME, GPU_GIB, PREFIX, RESPONSE = "Qwen2.5-VL-7B", 80, 32_768, 511
# Passes: the whole group, or its prefix and then so many response tokens at a time.
BUDGETS = {"whole": 10**9, "chunks of 2,048": PREFIX + 2048}


def plans() -> Iterator[dict[str, Any]]:
    """One entry for each way to train."""
    for adapter in (False, True):
        for checkpointing in (True, False):
            lora = LoraSettings() if adapter else None
            settings = ModelSettings(path=NAME, lora=lora, gradient_checkpointing=checkpointing)
            shape = counted_shape_of(published_config(NAME), settings)
            for words, budget in BUDGETS.items():
                setup = Setup(
                    checkpointing=checkpointing,
                    lora=adapter,
                    stage=3,
                    ranks=8,
                    # The shipped zero3.json.
                    bucket=2 * 500_000_000,
                    prefix=PREFIX,
                    patches=(PREFIX - TEXT_TOKENS) * 4,
                    response=RESPONSE,
                    budget=budget,
                    allowed=smallest(settings),
                )
                both = {"as set": plan_memory(shape, setup), "with all measures": plan_to_fit(shape, setup, GPU_GIB)}
                for measures, plan in both.items():
                    way = {"trains": "LoRA" if adapter else "all", "checkpointing": checkpointing, "passes": words}
                    yield way | {"measures": measures} | _entry(plan)


def _entry(plan: Plan) -> dict[str, Any]:
    return {
        "fits": plan.fits(GPU_GIB),
        "peak_gib": round(plan.peak / GIB, 2),
        "phase": plan.phase,
        "parts_gib": {part: round(size / GIB, 2) for part, size in plan.phases[plan.phase].items()},
        "phases_gib": {name: round(sum(parts.values()) / GIB, 2) for name, parts in plan.phases.items()},
    }


def main() -> None:
    entries = []
    for entry in plans():
        entries.append(entry)
        print(*entry.values(), flush=True)
    what = {"counted": True, "model": NAME, "gpu_gib": GPU_GIB, "stage": 3, "ranks": 8}
    Path(sys.argv[1]).write_text(json.dumps(what | {"plans": entries}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
