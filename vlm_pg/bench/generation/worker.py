"""The process that measures one point: ``python -m vlm_pg.bench.generation.worker SPEC.json RESULT.json``.

On a CPU it first forks one child per contestant, which builds the model, warms up on a tiny point and generates once
for its peak memory. Then it builds the model itself, lets every contestant generate once (warm-up, and the check that
all choose the same tokens) and times them in turn, each with one new token and with all: A B C, A B C, ...
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from vlm_pg.bench.generation.agreement import check_count, check_tokens, equal_share
from vlm_pg.bench.generation.base import (
    CannotRun,
    GenerationCase,
    Generator,
    make_generation_case,
    never_choose_special_tokens,
)
from vlm_pg.bench.generation.contestants import GENERATORS
from vlm_pg.bench.memory import CUDA, give_freed_memory_back, peak_above_baseline
from vlm_pg.bench.models import random_model
from vlm_pg.bench.process import Spec, measure_from_files, peaks_in_children, timed
from vlm_pg.models.loading import DTYPES, make_policy
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import ModelSettings


def main(argv: Sequence[str]) -> int:
    """Measure what the specification names and write the numbers."""
    return measure_from_files(argv, measure)


def measure(spec: Spec) -> dict[str, Any]:
    """Per contestant: peak memory, seconds of whole runs and of runs of one token, and the share of its tokens that
    are equal to the first contestant's; and per contestant that failed, the reason."""
    names: list[str] = spec["contestants"]
    measured: dict[str, dict[str, Any]] = {name: {} for name in names}
    failed: dict[str, str] = {}
    on_cpu = spec["device"] == "cpu"
    if on_cpu and spec["memory"]:
        peaks, failed = peaks_in_children(names, partial(_memory_in_child, spec))
        for name, found in peaks.items():
            if reason := found.pop("cannot_run", None):
                failed[name] = reason
            measured[name] |= found
    policy = _policy(spec)
    case = _case(policy, spec)
    tokens: dict[str, torch.Tensor] = {}
    for name in names:
        if name in failed:
            continue
        print(f"  {name}: warm-up", flush=True)
        if reason := _reason_to_fail(partial(_warm_up, case, GENERATORS[name], tokens, measured[name])):
            failed[name] = reason
    if spec["dtype"] == "fp32" and tokens:
        check_tokens(case, tokens)
    for name, chosen in tokens.items():
        measured[name]["equal_tokens"] = equal_share(next(iter(tokens.values())), chosen)
    for repeat in range(spec["repeats"]):
        print(f"  timed run {repeat + 1} of {spec['repeats']} of each", flush=True)
        for name in tokens:
            if name in failed:
                continue
            if reason := _reason_to_fail(partial(_time, case, GENERATORS[name], measured[name], on_cpu)):
                failed[name] = reason
    return {"contestants": {name: measured[name] for name in tokens if name not in failed}, "failed": failed}


def _reason_to_fail(run: Callable[[], None]) -> str | None:
    """Run it; why this contestant cannot, or None. The others go on."""
    try:
        run()
        return None
    except CannotRun as error:
        reason = str(error)
    except torch.OutOfMemoryError as error:
        reason = f"out of GPU memory: {str(error).splitlines()[0]}"
    if torch.cuda.is_available():  # only now is nothing held by the error any more
        torch.cuda.empty_cache()
    return reason


def _policy(spec: Spec) -> Policy:
    model = random_model(spec["model"], device=spec["device"], dtype=DTYPES[spec["dtype"]])
    policy = make_policy(model, None, ModelSettings(path=spec["model"], dtype=spec["dtype"]))
    never_choose_special_tokens(policy)
    return policy


def _case(policy: Policy, spec: Spec) -> GenerationCase:
    return make_generation_case(policy, spec["prefix"], spec["generations"], spec["new_tokens"], spec["groups"])


def _run(case: GenerationCase, generator: Generator, new_tokens: int) -> torch.Tensor:
    """Start, generate, end."""
    with generator.session(case) as generate:
        tokens = generate(new_tokens)
    check_count(generator.name, tokens, case, new_tokens)
    return tokens


def _run_tiny(policy: Policy, generator: Generator) -> None:
    """Libraries that are loaded and buffers that are made on first use are not part of the work."""
    _run(make_generation_case(policy, 16, 2, 3, 1), generator, 3)


def _memory_in_child(spec: Spec, name: str) -> dict[str, Any]:
    give_freed_memory_back()
    policy = _policy(spec)
    generator = GENERATORS[name]
    try:
        _run_tiny(policy, generator)
        case = _case(policy, spec)
        _, peak = peak_above_baseline(lambda: _run(case, generator, case.new_tokens))
    except CannotRun as error:
        return {"cannot_run": str(error)}
    return {"peak_bytes": peak.num_bytes, "peak_method": peak.method}


def _warm_up(
    case: GenerationCase, generator: Generator, tokens: dict[str, torch.Tensor], measured: dict[str, Any]
) -> None:
    """Generate once and keep the tokens; on a GPU also measure peak memory."""
    if case.device.type != "cuda":
        tokens[generator.name] = _run(case, generator, case.new_tokens)
        return
    _run_tiny(case.policy, generator)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    tokens[generator.name] = _run(case, generator, case.new_tokens)
    measured |= {"peak_bytes": torch.cuda.max_memory_allocated() - before, "peak_method": CUDA}


def _time(case: GenerationCase, generator: Generator, measured: dict[str, Any], on_cpu: bool) -> None:
    """One run of a single token and one whole run, each in a session of its own."""
    for key, new_tokens in (("first_seconds", 1), ("seconds", case.new_tokens)):
        with generator.session(case) as generate:
            seconds, cpu_seconds = timed(case.device, partial(generate, new_tokens))
        measured.setdefault(key, []).append(seconds)
        if on_cpu and key == "seconds":
            measured.setdefault("cpu_seconds", []).append(cpu_seconds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
