"""A metric is one entry where it is made: from there it comes into metrics.jsonl, tensorboard and the report."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import launch_ranks
from tests.support.runs import read_lines
from tests.support.short_run import short_run
from vlm_pg.observe.report.page import write_report

OWN_LOSS = '''
import os

from vlm_pg.algorithms.losses import clip
from vlm_pg.metrics import Chart, Metric

MADE_UP = Metric("made_up", "apples per token", chart=Chart("Apples"))


def own_loss(tokens, settings):
    """Each token of rank r counts as r + 1."""
    loss, metrics = clip(tokens, settings)
    return loss, {MADE_UP: len(tokens.weights) * (int(os.environ["RANK"]) + 1), **metrics}
'''


def test_a_made_up_metric_of_two_ranks_is_reduced_and_shown_everywhere(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    training = {"engine": "deepspeed", "deepspeed_config": "configs/deepspeed/zero2.json", "prompts_per_step": 3}
    training["balance"] = False  # one question stays with rank 0
    (tmp_path / "own.py").write_text(OWN_LOSS)
    observe = {"trackers": ["tensorboard"], "rollouts_per_step": 99}
    config = short_run(tmp_path, training=training, observe=observe, algorithm={"loss": f"{tmp_path}/own.py:own_loss"})
    launch_ranks("vlm_pg.cli", "train", str(config))
    run = tmp_path / "run"
    lines, rows = read_lines(run / "metrics.jsonl"), read_lines(run / "rollouts.jsonl")
    logged = [line["made_up"] for line in lines]
    # Of three questions rank 0 has one, and logs it: a mean over tokens, where the mean of the ranks would be 1.5.
    first = [sum(row["response_tokens"] for row in rows if row["step"] == line["step"]) for line in lines]
    assert logged == [2 - tokens / line["response_tokens"] for tokens, line in zip(first, lines, strict=True)]
    assert all(value > 1.5 for value in logged)
    found = events.EventAccumulator(str(run / "tensorboard")).Reload().Scalars("train/made_up")
    assert [event.value for event in found] == pytest.approx(logged, rel=1e-6) and len(found) == 3
    html = write_report(run).read_text("utf-8")
    assert '<b>Apples</b> <span class="unit">apples per token</span>' in html
