"""Where a step may be given up, and where it may not any more."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch

from tests.support.groups import tiny_policy
from tests.support.training import make_groups
from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.distributed import SINGLE_RANK, AgreedStop, check_stop, forbid_stop
from vlm_pg.training.engines import TorchEngine
from vlm_pg.training.main import _Run
from vlm_pg.training.settings import TrainingSettings
from vlm_pg.training.stop import SIGNALS, StopRequest
from vlm_pg.training.updates import Update, UpdateSettings, update_policy


@pytest.mark.parametrize(
    "number, interrupted", [(signal.SIGTERM, False), (signal.SIGUSR1, False), (signal.SIGINT, True)]
)
def test_signals_are_heard_and_told_apart(number: signal.Signals, interrupted: bool) -> None:
    with StopRequest(SINGLE_RANK).listening() as stop:
        assert not stop.between_tokens()
        os.kill(os.getpid(), number)
        assert stop.between_tokens() and stop.interrupted is interrupted


def test_nobody_leaves_outside_of_the_block_or_behind_the_point_of_no_return() -> None:
    stop = StopRequest(SINGLE_RANK)
    stop.asked = True
    check_stop()
    with stop.together():
        forbid_stop()
        check_stop()
    with pytest.raises(AgreedStop), stop.together():
        check_stop()
    check_stop()


def test_behind_a_block_within_another_the_other_goes_on() -> None:
    within, around = StopRequest(SINGLE_RANK), StopRequest(SINGLE_RANK)
    around.asked = True
    with around.together():
        with within.together():
            check_stop()
            forbid_stop()
        with pytest.raises(AgreedStop):
            check_stop()
    check_stop()


def test_handlers_are_put_back_where_listening_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = [signal.getsignal(number) for number in SIGNALS]
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    with pytest.raises(RuntimeError, match="new thread"), StopRequest(replace(SINGLE_RANK, world_size=2)).listening():
        pass
    assert [signal.getsignal(number) for number in SIGNALS] == usual


@pytest.mark.parametrize("may_stop", [True, False])
def test_an_update_is_given_up_between_passes_or_made_whole(may_stop: bool) -> None:
    policy = tiny_policy()
    groups = make_groups(policy)
    engine = TorchEngine(policy, TrainingSettings(steps=1, learning_rate=1e-3))
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    update = Update(groups, 1e-3, may_stop=may_stop)
    stop = StopRequest(SINGLE_RANK)
    stop.asked = True

    def run() -> None:
        with stop.together():
            update_policy(engine, None, update, UpdateSettings(AlgorithmSettings(), 110))

    if may_stop:
        with pytest.raises(AgreedStop):
            run()
    else:
        run()
    changed = [name for name, p in policy.model.named_parameters() if not torch.equal(p, before[name])]
    assert bool(changed) is not may_stop


@pytest.mark.parametrize("here", [True, False])
def test_a_stop_while_one_rank_waits_is_one_for_all(here: bool) -> None:
    """Whoever has waited in vain and whoever is past that agree, and none of them trains."""
    run = object.__new__(_Run)
    run.policy = SimpleNamespace(device=torch.device("cpu"))  # type: ignore[assignment]
    agreed = Mock(return_value=True)
    run.stop = SimpleNamespace(agreed=agreed)  # type: ignore[assignment]
    waits = Mock(side_effect=InterruptedError if here else None)
    with patch.multiple(run, _make_trainer=Mock(), _wait_for_decoding=waits, create=True):
        assert run._ready_to_train(None) is None
        agreed.assert_called_once()
        agreed.return_value = False
        assert here or run._ready_to_train(None) is run._make_trainer.return_value  # type: ignore[attr-defined]
