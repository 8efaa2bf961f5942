"""Stop requests: signals, where ranks stop together, and where no longer."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from tests.support.groups import tiny_policy
from tests.support.training import make_groups
from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.distributed import SINGLE_RANK, AgreedStop, check_stop, forbid_stop
from vlm_pg.observe.console import Console
from vlm_pg.training import main
from vlm_pg.training.engines import TorchEngine
from vlm_pg.training.phases import Phases
from vlm_pg.training.settings import TrainingSettings
from vlm_pg.training.stop import SIGNALS, StopRequest
from vlm_pg.training.updates import Update, UpdateSettings, update_policy


@pytest.mark.parametrize(
    "number, interrupted", [(signal.SIGTERM, False), (signal.SIGUSR1, False), (signal.SIGINT, True)]
)
def test_signals_are_distinguished(number: signal.Signals, interrupted: bool) -> None:
    with StopRequest(SINGLE_RANK).listening() as stop:
        assert not stop.between_tokens()
        os.kill(os.getpid(), number)
        assert stop.between_tokens() and stop.interrupted is interrupted


def test_ranks_stop_inside_of_the_block_until_that_is_forbidden() -> None:
    inner, outer = StopRequest(SINGLE_RANK), StopRequest(SINGLE_RANK)
    outer.requested = True
    check_stop()
    with outer.together():
        forbid_stop()
        check_stop()
    with outer.together():
        with inner.together():
            check_stop()
            forbid_stop()
        with pytest.raises(AgreedStop):
            check_stop()
    check_stop()


def test_handlers_are_restored_if_listening_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = [signal.getsignal(number) for number in SIGNALS]
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    with pytest.raises(RuntimeError, match="new thread"), StopRequest(replace(SINGLE_RANK, world_size=2)).listening():
        pass
    assert [signal.getsignal(number) for number in SIGNALS] == usual


@pytest.mark.parametrize("may_stop", [True, False])
def test_an_update_stops_between_passes_or_is_completed(may_stop: bool) -> None:
    policy = tiny_policy()
    groups = make_groups(policy)
    engine = TorchEngine(policy, TrainingSettings(steps=1, learning_rate=1e-3))
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    update = Update(groups, 1e-3, may_stop=may_stop)
    stop = StopRequest(SINGLE_RANK)
    stop.requested = True

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
def test_a_stop_while_one_rank_waits_is_one_for_all(here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that waited in vain and ranks past that agree, and none of them trains."""
    run = Mock(phases=Phases(), console=Console(enabled=False))
    run.config.data.prompt_cache_mb = 1
    run.sources.wait_until_ready.side_effect = InterruptedError if here else None
    monkeypatch.setattr(main, "Trainer", trainer := Mock())
    assert main._Run._ready_trainer(run, None) is None
    run.stop.agreed.assert_called_once()
    run.stop.agreed.return_value = False
    assert here or main._Run._ready_trainer(run, None) is trainer.return_value
