"""``scripts/compare_checkouts.py`` sees what differs between two runs, and nothing else."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

SCRIPT = Path(__file__).parents[2] / "scripts/compare_checkouts.py"


def script() -> Any:
    spec = importlib.util.spec_from_file_location("compare_checkouts", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_folder(folder: Path, seconds: float) -> Path:
    checkpoint = folder / "checkpoints/step-000003"
    (checkpoint / "optimizer").mkdir(parents=True)
    save_file({"weight": torch.arange(6.0)}, checkpoint / "model.safetensors")
    save_file({"0.exp_avg": torch.ones(3)}, checkpoint / "optimizer/rank-00000-00000.safetensors")
    line = {"step": 1, "reward": 0.5, "seconds/rollout": seconds, "generation/peak_gib": seconds}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (folder / "rollouts.jsonl").write_text(json.dumps({"response": "A", "parts": {"accuracy": 1.0}}) + "\n")
    (folder / "eval_seen_after.jsonl").write_text(json.dumps({"outputs": [{"text": "B", "score": 0.0}]}) + "\n")
    return folder


def weight(folder: Path) -> None:
    save_file({"weight": torch.arange(6.0) + 1e-5}, folder / "checkpoints/step-000003/model.safetensors")


def moment(folder: Path) -> None:
    save_file({"0.exp_avg": torch.ones(4)}, folder / "checkpoints/step-000003/optimizer/rank-00000-00000.safetensors")


def rewritten(name: str, old: str, new: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text((folder / name).read_text().replace(old, new))


@pytest.mark.parametrize(
    "change, expected",
    [
        (weight, "model.safetensors: weight"),
        (moment, "0.exp_avg: (3,) torch.float32, (4,)"),
        (rewritten("metrics.jsonl", "0.5", "0.50001"), "metrics.jsonl:1 reward: 0.5, 0.50001"),
        (rewritten("rollouts.jsonl", '"A"', '"C"'), "rollouts.jsonl:1 response"),
        (rewritten("eval_seen_after.jsonl", "0.0", "1.0"), "outputs 0 score: 0.0, 1.0"),
        (lambda folder: (folder / "rollouts.jsonl").unlink(), "is in this alone"),
        (lambda folder: (folder / "checkpoints").rename(folder / "elsewhere"), "has no checkpoints"),
    ],
)
def test_what_differs_is_found(change: Callable[[Path], object], expected: str, tmp_path: Path) -> None:
    differences = script().differences
    one, other = run_folder(tmp_path / "one", 1.0), run_folder(tmp_path / "other", 2.0)
    assert list(differences(one, other, 0.0)) == [], "seconds and memory are as they are"
    change(other)
    found = list(differences(one, other, 0.0))
    assert found and any(expected in line for line in found), found
    close = list(differences(one, other, 1e-4))
    assert bool(close) == (change is not weight and "0.50001" not in expected)
