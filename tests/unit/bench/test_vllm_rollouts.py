"""What the comparison with vLLM makes of its runs, and what it refuses; the runs themselves need a vLLM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.vllm_rollouts import cpu_seconds, main, resident_bytes, summarise, summary_lines, tree_of
from vlm_pg.errors import ConfigError


def numbers(contestant: str, response: int, seconds: float, peak: int) -> dict[str, Any]:
    return {
        "contestant": contestant,
        "response": response,
        "seconds": seconds,
        "cpu_seconds": seconds / 2,
        "tokens_a_second": 8 * response / seconds,
        "load": 1.0,
        "peak_resident_bytes": peak * 2**30,
        "rest_resident_bytes": 2**30,
    }


def test_medians_of_whole_responses_and_of_first_tokens() -> None:
    runs = [numbers("ours", 64, seconds, 2) for seconds in (4.0, 2.0, 3.0)] + [numbers("ours", 1, 1.0, 3)]
    runs += [numbers("vllm", 64, 6.0, 4), numbers("vllm", 1, 4.0, 4)]
    summary = summarise(runs)
    ours = summary["ours"]
    assert (ours["fastest_seconds"], ours["median_seconds"], ours["slowest_seconds"]) == (2.0, 3.0, 4.0)
    assert ours["median_first_seconds"] == 1.0 and ours["peak_resident_bytes"] == 3 * 2**30
    lines = summary_lines(summary)
    assert "3.00 s (2.00 to 4.00), of which first tokens 1.00; 1.50 processor seconds; 170.7 tok/s" in lines[0]
    assert lines[2] == "vLLM / ours: seconds 2.00, processor seconds 2.00, to the first 4.00"


def test_a_process_and_what_it_holds() -> None:
    assert os.getpid() in tree_of(os.getppid())
    assert resident_bytes([os.getpid()]) > 2**20 and cpu_seconds([os.getpid()]) > 0
    # Ended between being listed and being read.
    assert resident_bytes([2**30]) == cpu_seconds([2**30]) == 0


def test_what_cannot_be_measured_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLM_PG_VLLM", raising=False)
    with pytest.raises(ConfigError, match=r"VLM_PG_VLLM is not set\. .*scripts/vllm_env\.sh"):
        main([])
    monkeypatch.setenv("VLM_PG_VLLM", "vllm")
    (tmp_path / "there.json").touch()
    with pytest.raises(ConfigError, match=r"there\.json exists\. Measurements are not thrown away"):
        main(["--out", str(tmp_path / "there.json")])
    with pytest.raises(ConfigError, match=r"--visual-tokens is 1000 .* multiples of 512"):
        main(["--visual-tokens", "1000"])
