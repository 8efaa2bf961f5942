"""The process that measures one point: ``python -m vlm_pg.bench.worker SPEC.json RESULT.json PARENT``.

On a CPU it first forks one child per contestant, which builds the model, warms up on a tiny case and runs the point
once for its peak memory. Then it builds the model itself, runs every contestant once (warm-up, and the check that all
agree) and times them in turn: A B C, A B C, ...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from vlm_pg.bench.case import ModelCase, Spec
from vlm_pg.bench.memory import Peak, end_with_parent, give_freed_memory_back, in_child, peak_above_baseline
from vlm_pg.bench.runner import CannotRun
from vlm_pg.models.liger import liger_of
from vlm_pg.processes import resolve

T = TypeVar("T")


def main(argv: Sequence[str]) -> int:
    """Measure by the specification (first path) and write the numbers (second path), while the parent lives.

    ``argv``: both paths, and the number of the process that started this one.
    """
    end_with_parent(int(argv[2]))
    spec_path, result_path = (Path(word) for word in argv[:2])
    spec = json.loads(spec_path.read_text())
    torch.set_num_threads(spec["threads"])
    result_path.write_text(json.dumps(measure(spec)))
    return 0


def measure(spec: Spec) -> dict[str, Any]:
    """Per contestant: peak memory, compared values, seconds of each run; and per contestant that failed, why."""
    build = resolve(spec["case"]).build
    runs = {name: resolve(path) for name, path in spec["contestants"].items()}
    measured: dict[str, dict[str, Any]] = {name: {} for name in runs}
    failed: dict[str, str] = {}
    on_cpu = spec["device"] == "cpu"
    if on_cpu and spec["memory"]:
        for name, run in runs.items():
            print(f"  {name}: peak memory", flush=True)
            peak = _tried(partial(in_child, partial(_peak_in_child, build, spec, run)), name, failed)
            measured[name] |= _peak_entry(peak)
    case: ModelCase = build(spec)
    outcomes: dict[str, Any] = {}
    for name, run in runs.items():
        if name in failed:
            continue
        print(f"  {name}: warm-up", flush=True)
        if warm := _tried(partial(_warm_up, case, run), name, failed):
            outcomes[name], peak = warm
            measured[name] |= _peak_entry(peak)
    for name, agreed in case.agreement(outcomes, spec["dtype"]).items():
        measured[name] |= agreed
    for repeat in range(spec["repeats"]):
        print(f"  timed run {repeat + 1} of {spec['repeats']} of each", flush=True)
        for name in [name for name in outcomes if name not in failed]:
            for key, seconds in (_tried(partial(case.time, runs[name]), name, failed) or {}).items():
                measured[name].setdefault(key, []).append(seconds)
    if parts := liger_of(case.model).parts:
        for entry in measured.values():
            entry["liger"] = parts
    return {"contestants": {name: measured[name] for name in outcomes if name not in failed}, "failed": failed}


def _tried(run: Callable[[], T], name: str, failed: dict[str, str]) -> T | None:
    """Its result, or None where this contestant cannot run, with the reason in ``failed``."""
    try:
        return run()
    except CannotRun as error:
        failed[name] = str(error)
    except torch.OutOfMemoryError as error:
        failed[name] = f"out of GPU memory: {str(error).splitlines()[0]}"
    if torch.cuda.is_available():  # only now is nothing held by the error any more
        torch.cuda.empty_cache()
    return None


def _peak_entry(peak: Peak | None) -> dict[str, Any]:
    return {} if peak is None else {"peak_bytes": peak.num_bytes, "peak_method": peak.method}


def _peak_in_child(build: Callable[[Spec], ModelCase], spec: Spec, run: Any) -> Peak:
    give_freed_memory_back()
    case = build(spec)
    _warm_libraries(case.tiny(), run)
    return peak_above_baseline(lambda: case.run(run))[1]


def _warm_libraries(tiny: ModelCase, run: Any) -> None:
    """Libraries that are loaded and buffers that are made on first use are not part of the work."""
    tiny.run(run)
    tiny.forget()


def _warm_up(case: ModelCase, run: Any) -> tuple[Any, Peak | None]:
    """Values that contestants must agree on; on a GPU also the peak of memory."""
    if case.device.type != "cuda":
        return case.outcome(case.run(run)), None
    _warm_libraries(case.tiny(), run)
    result, peak = peak_above_baseline(lambda: case.run(run), on_gpu=True)
    return case.outcome(result), peak


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
