"""What was measured on a GPU beside what is counted of the same work: least and expected seconds, as a table.

    python docs/benchmarks/count_beside.py docs/benchmarks/DATE-GPU.json > table.md

Each figure of the file: "figure", "point" as ``vlm-pg bench paper`` takes it, "seconds"; of an update "contestant",
else "kernels". Takes one to two minutes of a free core.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from vlm_pg.bench.paper import generation
from vlm_pg.bench.paper.command import checked, parser
from vlm_pg.bench.paper.contestants import counted
from vlm_pg.bench.paper.devices import DEVICES, REACHED
from vlm_pg.bench.paper.plan import specifications
from vlm_pg.bench.paper.record import entry_of
from vlm_pg.bench.paper.replaced import replaced
from vlm_pg.bench.paper.roofline import LAUNCH_SECONDS, expected_seconds, roofline
from vlm_pg.bench.paper.table import seconds_words
from vlm_pg.rollout import ragged
from vlm_pg.rollout.fused.choice import FusedStep

DEVICE = "H100 SXM"


@cache
def entry(work: str, point: str, contestant: str, kernels: str) -> dict[str, Any]:
    """Of ``vlm-pg bench paper``; checkpointing, of a whole step with LoRA of rank 16."""
    name = {"step": "points", "rollout": "rollout-points", "grpo-step": "grpo-points"}[work]
    words = ["7b", "--works", work, f"--{name}", point, "--checkpointing", "--few-layers", "--contestants", contestant]
    (spec,) = specifications(checked(parser().parse_args(words + ["--lora", "16"] * (work == "grpo-step"))))
    with ExitStack() as stack:
        # When these were measured, four steps were launched one by one before each recording.
        stack.enter_context(replaced(generation, REACHED=replace(REACHED, capture_steps=4 + REACHED.capture_steps)))
        if kernels == "torch":
            stack.enter_context(replaced(ragged, fused_unchecked=lambda _: FusedStep("torch")))
            stack.enter_context(replaced(generation, prefill_unchecked=lambda _: nullcontext()))
        return entry_of(spec, counted(spec), LAUNCH_SECONDS)


def seconds(figure: dict[str, Any]) -> tuple[float, float]:
    """Least and expected ones of a figure."""
    name, point, kernels = figure["figure"], figure["point"], figure.get("kernels", "")
    if name.startswith("GRPO step"):
        found = entry("grpo-step", point, "ours", kernels)
        _, _, phase = name.partition(", ")
        roof = (found["phases"][phase] if phase else found)["roofline"][DEVICE]
    elif name == "update":
        roof = entry("step", point, figure["contestant"], kernels)["roofline"][DEVICE]
    else:
        found = entry("rollout", point, "ours", kernels)
        roof = found["middle_roofline" if name == "decode step" else "roofline"][DEVICE]
        if name == "prefill":
            counts, device = found["parts"]["prefill"], DEVICES[DEVICE]
            roof = roofline(counts, counts["launches"], device, "bf16", LAUNCH_SECONDS)
            roof["expected_seconds"] = expected_seconds(counts, counts["launches"], device, "bf16")
    return roof["seconds"], roof["expected_seconds"]


def main(path: Path) -> None:
    print("| figure | point | | measured | least | expected | expected by measured |\n" + "|---" * 7 + "|")
    for figure in json.loads(path.read_text())["figures"]:
        least, expected = seconds(figure)
        words = [figure["figure"], figure["point"], figure.get("contestant") or figure["kernels"]]
        words += map(seconds_words, (figure["seconds"], least, expected))
        print("| " + " | ".join([*words, f"{expected / figure['seconds']:.2f}"]) + " |", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
