"""The rewarder: parts and their weights, one pool per process, nothing started before it is needed."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.unit.answers.helpers import make_sample, respond
from vlm_pg.answers import grading
from vlm_pg.answers.verdict import Verdict
from vlm_pg.errors import ConfigError
from vlm_pg.rewards import Response, Rewarder, RewardSettings
from vlm_pg.rewards.rewarder import RESERVED_PARTS
from vlm_pg.rewards.settings import (
    CheckerSettings,
    FunctionSettings,
    LanguageSettings,
    LengthSettings,
    RepetitionSettings,
)

CHECKER = CheckerSettings(workers=2, timeout_seconds=30.0)


def test_parts_are_there_if_they_have_a_weight():
    sample = make_sample("numerical", "5")
    settings = RewardSettings(
        length=LengthSettings(weight=0.5, max_tokens=10),
        repetition=RepetitionSettings(weight=0.25),
        language=LanguageSettings(weight=-1.0),
    )
    with Rewarder(settings) as rewarder:
        counted, uncounted, plain = rewarder.score(
            [Response(sample, respond("5"), 15), Response(sample, respond("5")), Response(sample, "12 34", 5)]
        )
        assert rewarder.pids == []
    assert dict(counted.parts) == {"accuracy": 1.0, "format": 1.0, "length": 0.5, "repetition": 1.0, "language": 1.0}
    assert counted.total == pytest.approx(1.0 + 0.1 + 0.5 * 0.5 + 0.25 - 1.0)
    assert uncounted.parts["length"] is None and uncounted.total is None
    assert uncounted.notes == {"length": "its tokens were not counted"}
    assert plain.parts["language"] == 1.0, "no letter is in another script"
    with Rewarder(RewardSettings()) as rewarder:
        [reward] = rewarder.score([Response(sample, respond("5"), 15)])
        assert rewarder.score([]) == []
    assert list(reward.parts) == ["accuracy", "format"]


def test_a_step_mixes_kinds_and_keeps_its_order():
    answers = [("mathematics", "\\frac12", "0.5"), ("numerical", "3", "4"), ("mathematics", "x", "y")] * 4
    answers.append(("exact", "red", "red"))
    with Rewarder(RewardSettings(checker=CHECKER)) as rewarder:
        rewards = rewarder.score([Response(make_sample(kind, gold), respond(text)) for kind, gold, text in answers])
        assert [reward.parts["accuracy"] for reward in rewards] == [1.0, 0.0, 0.0] * 4 + [1.0]
        pids = rewarder.pids
        assert len(pids) == 2
        # A forked process, such as a worker of somebody's data loader, must not talk to its parent's checkers.
        child = os.fork()
        if child == 0:
            [reward] = rewarder.score([Response(make_sample("mathematics", "5"), respond("5"))])
            own = reward.total is not None and not set(rewarder.pids) & set(pids)
            rewarder.close()
            os._exit(0 if own else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        [reward] = rewarder.score([Response(make_sample("mathematics", "5"), respond("5"))])
        assert reward.parts["accuracy"] == 1.0 and rewarder.pids == pids, "the parent's processes are as they were"
    with pytest.raises(RuntimeError, match="closed"):
        rewarder.score([])


def test_two_parts_of_one_name_are_refused(tmp_path: Path):
    path = tmp_path / "own.py"
    path.write_text("def accuracy(response): return 1\ndef own(response): return 1\n")
    (tmp_path / "kl.py").write_text("def kl(response): return 1\n")
    for name in RESERVED_PARTS:
        with pytest.raises(ConfigError, match=f"has {name}, which another part"):
            Rewarder(RewardSettings(functions=(FunctionSettings(function=f"{tmp_path}/kl.py:kl", name=name),)))
    for names, twice in ((("accuracy",), "accuracy"), (("own", "own"), "own")):
        functions = tuple(FunctionSettings(function=f"{path}:{name}") for name in names)
        with pytest.raises(ConfigError, match=f"has {twice}, which another part"):
            Rewarder(RewardSettings(functions=functions))
    Rewarder(RewardSettings(functions=(FunctionSettings(function=f"{path}:accuracy", name="other"),))).close()


def test_names_that_training_adds_are_reserved():
    from vlm_pg.training.groups import SHAPED_PARTS

    assert RESERVED_PARTS == SHAPED_PARTS


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_part_that_is_not_finite_is_no_value(monkeypatch: pytest.MonkeyPatch, value: float):
    monkeypatch.setitem(grading.CHECKERS, "exact", lambda answer, sample, settings: Verdict(value))
    response = Response(make_sample("exact", "red"), respond("red"))
    with Rewarder(RewardSettings()) as rewarder:
        [reward] = rewarder.score([response])
        assert rewarder.accuracies([response]) == [None]
    assert reward.parts["accuracy"] is None and reward.total is None
    assert reward.notes == {"accuracy": f"it came out as {value}, which is no number to train on"}


def test_scoring_stops_when_it_should(tmp_path: Path):
    path = tmp_path / "own.py"
    path.write_text(
        "import time\ndef waits(response):\n    time.sleep(600 if response == 'long' else 0)\n    return 1\n"
    )
    entry = FunctionSettings(function=f"{path}:waits", isolated=True)
    checker = CheckerSettings(workers=1, timeout_seconds=600.0)
    sample = make_sample("exact", "red")
    with Rewarder(RewardSettings(functions=(entry,), checker=checker)) as rewarder:
        assert rewarder.score([Response(sample, "short")], lambda: False)[0].parts["waits"] == 1.0
        [pid] = rewarder.pids
        polls: list[int] = []
        with pytest.raises(InterruptedError):
            rewarder.score([Response(sample, "long")] * 3, lambda: polls.append(1) or len(polls) == 2)
        assert pid not in rewarder.pids
        assert rewarder.score([Response(sample, "short")])[0].parts["waits"] == 1.0


def test_rewards_import_neither_torch_nor_sympy():
    """Checking processes start as fast as their imports; sympy's parser evaluates and stays out of the trainer."""
    code = """
        import sys
        import vlm_pg.rewards, vlm_pg.answers.pool
        assert not {"torch", "sympy", "math_verify", "httpx2", "openai", "jiwer", "rouge_score"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)
