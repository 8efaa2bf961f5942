"""One update on a group behind a long video under a limit of memory that the kernel enforces.

``docs/benchmarks/measure_long.py`` makes the update, in a process of its own: a Qwen2.5-VL with a trained tower,
training's own step. What an update may map privately is limited (RLIMIT_DATA); beyond it an allocation fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ONE_THREAD_NO_GPU
from tests.support.runs import ROOT

# The usual run counts bytes of live tensors instead (tests/unit/models/test_memory.py).
pytestmark = pytest.mark.matrix
MIB = 2**20


def measure(*arguments: str, folder: Path, timeout_seconds: int) -> list[dict[str, Any]]:
    command = [sys.executable, str(ROOT / "docs/benchmarks/measure_long.py"), *arguments, "--folder", str(folder)]
    environment = os.environ | ONE_THREAD_NO_GPU | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_seconds, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    print(*lines, sep="\n")
    return lines


def test_a_long_prefix_trains_under_a_limit_that_is_too_low_without(tmp_path: Path) -> None:
    arguments = ("--prefixes", "2048", "--ways", "small", "plain", "--cap-mb", "160")
    small, plain = measure(*arguments, folder=tmp_path, timeout_seconds=300)
    assert small["grad_norm"] > 0 and small["file_bytes"] > 0 and small["peak_bytes"] < 160 * MIB
    assert "can't allocate memory" in plain["failed"]


def test_gradients_agree_where_all_ways_fit(tmp_path: Path) -> None:
    lines = measure("--prefixes", "4096", "16384", folder=tmp_path, timeout_seconds=3600)
    assert len(lines) == 6 and all(line.get("gradient_difference", 0.0) < 2e-5 for line in lines)
    peaks = {(line["prefix"], line["way"]): line["peak_bytes"] for line in lines}
    for prefix in (4096, 16384):
        assert peaks[prefix, "small"] < peaks[prefix, "checkpointed"] < peaks[prefix, "plain"]
    # Layer inputs, keys and values grow by four.
    assert peaks[16384, "small"] < 4 * peaks[4096, "small"]


def test_65536_visual_tokens_train_under_a_limit(tmp_path: Path) -> None:
    arguments = ("--prefixes", "65536", "--ways", "small", "--cap-mb", "1800")
    (line,) = measure(*arguments, folder=tmp_path, timeout_seconds=3 * 3600)
    assert line["grad_norm"] > 0 and line["peak_bytes"] < 1800 * MIB
