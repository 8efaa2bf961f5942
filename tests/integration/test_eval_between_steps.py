"""Evaluations between steps are those that stand at the end: the same answers, on two ranks and under ZeRO-3."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import ROOT, launch_ranks
from tests.support.runs import read_lines
from tests.support.small_run import STEPS, small_run

MATRIX = [pytest.param(engine, marks=pytest.mark.matrix) for engine in ("zero3", "zero3 in turns")]


@pytest.mark.parametrize("engine", [*MATRIX, "torch"])
def test_the_last_step_is_evaluated_as_the_end_is(tmp_path: Path, engine: str) -> None:
    config, run = small_run(tmp_path), tmp_path / "run"
    overrides = [
        f"run.dir={run}",
        "eval.every=1",
        "training.learning_rate=0.01",
        "eval.num_generations=4",
        "eval.temperature=1.0",
        "eval.before=true",
        "eval.after=true",
    ]
    if engine != "torch":
        overrides += ["training.engine=deepspeed", f"training.deepspeed_config={ROOT}/configs/deepspeed/zero3.json"]
        overrides.append(f"rollout.gather={'layers' if 'turns' in engine else 'all'}")
    launch_ranks("vlm_pg.cli", "train", str(config), *overrides)
    answers = {path.name: path.read_bytes() for path in run.glob("eval_seen_*.jsonl")}
    steps = [f"eval_seen_step-{step:06d}.jsonl" for step in range(1, STEPS + 1)]
    assert sorted(answers) == ["eval_seen_after.jsonl", "eval_seen_before.jsonl", *steps]
    assert answers[steps[-1]] == answers["eval_seen_after.jsonl"]
    assert len(set(answers.values())) > 1
    assert [line["step"] for line in read_lines(run / "metrics.jsonl") if "eval/accuracy" in line] == [1, 2, 3]
