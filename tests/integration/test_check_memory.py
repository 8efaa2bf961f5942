"""Checking ten times as many records takes no more memory.

``pytest -m matrix -s tests/integration/test_check_memory.py`` prints the peaks.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.processes import ROOT, ModuleProcess
from tests.support.runs import write_config

pytestmark = pytest.mark.matrix


def write_questions(path: Path, count: int) -> None:
    """Every tenth has a fault, every hundredth is there already."""
    with path.open("w") as file:
        for number in range(count):
            same = number - 1 if number % 100 == 99 else number
            answer = "many" if number % 10 == 0 else str(same + 1)
            record = {
                "problem_id": number,
                "problem": f"How much is {same} and 1? " + "Say it in digits. " * (same % 7),
                "data_type": "text",
                "problem_type": "numerical",
                "solution": f"<answer>{answer}</answer>",
            }
            file.write(json.dumps(record) + "\n")


def peak_mib(folder: Path, records: int) -> float:
    write_questions(folder / f"{records}.jsonl", records)
    command = ["check", str(folder / f"{records}.jsonl"), str(folder / "run.yaml"), "--out", str(folder / f"{records}")]
    done = ModuleProcess("tests.support.peak", *command).finish(24 * 3600)
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((folder / f"{records}/check.json").read_text())["sets"]["DATA"]
    assert report["errors"] == {"unscorable_gold_answer": records // 10}
    assert report["warnings"] == {"duplicate_question": records // 100}
    return int(done.stdout.rsplit("peak KiB", 1)[1]) / 1024


@pytest.mark.parametrize(("records", "workers"), [(3_000, 0), (1_000_000, 2)])
def test_memory_does_not_grow_with_the_records(tmp_path: Path, records: int, workers: int) -> None:
    model, training = {"path": str(ROOT / "assets/tiny-qwen2_5-vl")}, {"steps": 1, "micro_batch_tokens": 40_000}
    write_config(tmp_path / "run.yaml", {"model": model, "media": {"workers": workers}, "training": training})
    tenth, whole = (peak_mib(tmp_path, count) for count in (records // 10, records))
    print(f"{records:,} records: {whole:.0f} MiB, a tenth of them {tenth:.0f} MiB")
    assert whole < tenth + 32
