"""The process that measures one point: ``python -m vlm_pg.bench.worker SPEC.json RESULT.json``.

On a CPU it first forks one child per contestant, which builds the model, warms up on a tiny group and runs the group
once for its peak memory. Then it builds the model itself, runs every contestant once (warm-up, and the check that all
agree) and times them in turn: A B C, A B C, ...
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from vlm_pg.bench.contestants import CONTESTANTS, Case, Contestant, make_case
from vlm_pg.bench.contestants.base import gradient_norm
from vlm_pg.bench.memory import CUDA, give_freed_memory_back, peak_above_baseline
from vlm_pg.bench.models import random_model
from vlm_pg.bench.process import Spec, measure_from_files, peaks_in_children, timed
from vlm_pg.models.loading import DTYPES, make_policy
from vlm_pg.models.settings import ModelSettings

# Largest relative difference of loss and gradient norm between contestants. In bf16 each of them rounds differently.
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}
# Prefix and responses of a group that only warms up.
TINY = (16, (2, 3))


def main(argv: Sequence[str]) -> int:
    """Measure what the specification names and write the numbers."""
    return measure_from_files(argv, measure)


def measure(spec: Spec) -> dict[str, Any]:
    """Peak memory, seconds, loss and gradient norm per contestant; and per contestant that failed, the reason."""
    names: list[str] = spec["contestants"]
    measured: dict[str, dict[str, Any]] = {name: {} for name in names}
    failed: dict[str, str] = {}
    on_cpu = spec["device"] == "cpu"
    if on_cpu and spec["memory"]:
        peaks, failed = peaks_in_children(names, lambda name: _memory_in_child(spec, CONTESTANTS[name]))
        measured |= peaks
    case = _build(spec, spec["prefix"], spec["lengths"])
    alive = [name for name in names if name not in failed]
    for name in alive:
        print(f"  {name}: warm-up", flush=True)
        try:
            measured[name] |= _warm_up(case, CONTESTANTS[name])
        except torch.OutOfMemoryError as error:
            failed[name] = f"out of GPU memory: {str(error).splitlines()[0]}"
        if name in failed:  # only now is nothing held by the error any more
            case.policy.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
    alive = [name for name in alive if name not in failed]
    check_agreement({name: measured[name] for name in alive}, TOLERANCE[spec["dtype"]])
    for repeat in range(spec["repeats"]):
        print(f"  timed run {repeat + 1} of {spec['repeats']} of each", flush=True)
        for name in alive:
            case.policy.zero_grad(set_to_none=True)
            seconds, cpu_seconds = timed(case.device, partial(CONTESTANTS[name].step, case))
            measured[name].setdefault("seconds", []).append(seconds)
            if on_cpu:
                measured[name].setdefault("cpu_seconds", []).append(cpu_seconds)
    return {"contestants": {name: measured[name] for name in alive}, "failed": failed}


def check_agreement(measured: dict[str, dict[str, Any]], tolerance: float) -> None:
    """Raise unless all contestants found the same loss and the same gradient norm."""
    names = list(measured)
    for name in names[1:]:
        for key in ("loss", "gradient_norm"):
            expected, came = measured[names[0]][key], measured[name][key]
            if not math.isclose(came, expected, rel_tol=tolerance):
                raise RuntimeError(
                    f"The contestants disagree: {key} is {expected!r} for {names[0]} and {came!r} for {name}; "
                    f"{tolerance:g} relative is allowed. Nothing was timed: they do not compute the same thing."
                )


def _build(spec: Spec, prefix: int, lengths: Sequence[int]) -> Case:
    settings = ModelSettings(path=spec["model"], dtype=spec["dtype"], gradient_checkpointing=spec["checkpointing"])
    model = random_model(spec["model"], device=spec["device"], dtype=DTYPES[spec["dtype"]])
    return make_case(make_policy(model, None, settings), prefix, lengths)


def _run_tiny(tiny: Case, contestant: Contestant) -> None:
    """Libraries that are loaded and buffers that are made on first use are not part of the work."""
    contestant.step(tiny)
    tiny.policy.zero_grad(set_to_none=True)


def _memory_in_child(spec: Spec, contestant: Contestant) -> dict[str, Any]:
    give_freed_memory_back()
    tiny = _build(spec, *TINY)
    _run_tiny(tiny, contestant)
    case = make_case(tiny.policy, spec["prefix"], spec["lengths"])
    _, peak = peak_above_baseline(lambda: contestant.step(case))
    return {"peak_bytes": peak.num_bytes, "peak_method": peak.method}


def _warm_up(case: Case, contestant: Contestant) -> dict[str, Any]:
    case.policy.zero_grad(set_to_none=True)
    cuda = case.device.type == "cuda"
    if cuda:
        _run_tiny(make_case(case.policy, *TINY), contestant)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    loss = contestant.step(case)
    found: dict[str, Any] = {"loss": loss, "gradient_norm": gradient_norm(case)}
    if cuda:
        found |= {"peak_bytes": torch.cuda.max_memory_allocated() - before, "peak_method": CUDA}
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
