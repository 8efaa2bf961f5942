"""What measuring processes have in common: their files, peak memory in children, time on the clock."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vlm_pg.bench.memory import ChildKilled, in_child

Spec = dict[str, Any]


def measure_from_files(argv: Sequence[str], measure: Callable[[Spec], dict[str, Any]]) -> int:
    """Measure what the specification (first path) names and write the numbers (second path)."""
    spec_path, result_path = (Path(word) for word in argv)
    spec = json.loads(spec_path.read_text())
    torch.set_num_threads(spec["threads"])
    result = measure(spec)
    result_path.write_text(json.dumps(result))
    return 0


def peaks_in_children(
    names: Sequence[str], run: Callable[[str], dict[str, Any]]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """What ``run`` finds per contestant, each in a forked child; and per contestant whose child was killed, by what."""
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for name in names:
        print(f"  {name}: peak memory", flush=True)
        try:
            found[name] = in_child(partial(run, name))
        except ChildKilled as failure:
            failed[name] = f"memory run failed: {failure}"
    return found, failed


def timed(device: torch.device, run: Callable[[], Any]) -> tuple[float, float]:
    """Seconds on the clock, and processor seconds of all threads."""
    synchronize(device)
    start_seconds, start_cpu_seconds = time.perf_counter(), time.process_time()
    run()
    synchronize(device)
    return time.perf_counter() - start_seconds, time.process_time() - start_cpu_seconds


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()
