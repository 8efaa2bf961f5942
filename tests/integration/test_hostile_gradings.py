"""Thousands of hostile gradings of all kinds: none runs anything, none hangs.

All run in a checking process. Its deadline is long: what exceeds it hangs, however busy the machine is. What a grading
takes is processor time, which other processes do not add to; the long table prints it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration import hostile
from vlm_pg.answers.grading import PREPARE
from vlm_pg.answers.pool import Call, CheckerPool
from vlm_pg.rewards.settings import CheckerSettings

pytestmark = pytest.mark.matrix

WATCH = Call(f"{hostile.__name__}:watch")
DEADLINE_SECONDS = 20.0


def graded(count: int, seed: int, canary: Path) -> list[dict[str, Any]]:
    """What all gradings came to; none executed anything, none hung, none failed."""
    gradings = list(hostile.gradings(count, seed, canary))
    pool = CheckerPool(CheckerSettings(workers=1, timeout_seconds=DEADLINE_SECONDS), [PREPARE, WATCH])
    try:
        outcomes = pool.run([Call(f"{hostile.__name__}:grade", grading) for grading in gradings])
        [after] = pool.run([Call(f"{hostile.__name__}:grade", ("mathematics", "5", "$x = 5$"))])
    finally:
        pool.close()
    pairs = list(zip(gradings, outcomes, strict=True))
    assert not [(grading[:2], grading[2][:200], outcome.problem) for grading, outcome in pairs if outcome.problem]
    values = [outcome.value for outcome in outcomes]
    assert not canary.exists(), "a text was executed"
    assert not [value["noted"] for value in values if value["noted"]], "a grading reached out of its process"
    unusable = [grading[:2] for grading, outcome in pairs if outcome.value["value"] is None]
    assert not unusable, "every gold answer is usable, whatever the answer"
    assert all(0.0 <= value["value"] <= 1.0 for value in values)
    assert after.value["value"] == 1.0, "the pool answers as before"
    return values


def test_hostile_gradings_run_nothing_and_end(tmp_path: Path) -> None:
    assert len(graded(400, 0, tmp_path / "canary")) == 400


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(1, 11))
def test_ten_thousand_hostile_gradings(tmp_path: Path, seed: int) -> None:
    seconds = sorted(value["cpu_seconds"] for value in graded(1_000, seed, tmp_path / "canary"))
    print(f"seed {seed}: median {seconds[500]:.4f} s, p99 {seconds[990]:.3f} s, longest {seconds[-1]:.2f} s")


def test_a_grading_that_would_run_something_is_noticed(tmp_path: Path) -> None:
    """The guard itself: code that is run leaves its file, and the audit hook tells of it."""
    pool = CheckerPool(CheckerSettings(workers=1, timeout_seconds=DEADLINE_SECONDS), [WATCH])
    try:
        [outcome] = pool.run([Call(f"{hostile.__name__}:disobey", (str(tmp_path / "canary"),))])
    finally:
        pool.close()
    assert (tmp_path / "canary").exists()
    assert "open" in outcome.value["noted"][0]


def test_the_generator_gives_the_same_texts_again_and_reaches_every_kind(tmp_path: Path) -> None:
    first, second = (list(hostile.gradings(300, 7, tmp_path)) for _ in range(2))
    assert first == second
    assert {kind for kind, _, _ in first} == set(hostile.GOLD)
    assert any(len(answer) > 900_000 for _, _, answer in first)
