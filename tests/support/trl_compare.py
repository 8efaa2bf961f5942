"""Both trainers through one case: responses, losses, gradients and metrics of each step must agree.

``python -m tests.support.trl_compare NAME FOLDER`` runs a case in a process of its own.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from trl.trainer import grpo_trainer

from tests.support.trl import Recorded, largest_error
from tests.support.trl_cases import CASES, Case
from vlm_pg.integrations.trl import GroupedGRPOTrainer

# What a clock says, and what only one of the two trainers writes.
NOT_COMPARED = ("step_time", "runtime", "per_second", "vlm_pg/")


# An epsilon that keeps Adam from turning a gradient that is rounding noise into a whole learning rate.
BASE: dict[str, Any] = {"max_steps": 3, "adam_epsilon": 1e-2}


def run(case: Case, trainer_class: type, folder: Path, **others: Any) -> Recorded:
    """Three steps of one trainer."""
    with pytest.MonkeyPatch.context() as patch:
        if case.prepare is not None:
            case.prepare(patch)
        options = dict(case.options)
        after = options.pop("after", None)
        recorded = Recorded(trainer_class, folder, **options, **(BASE | case.settings | others))
        if after is not None:
            after(recorded)
        if case.evaluate:
            torch.manual_seed(0)
            recorded.trainer.evaluate()
        else:
            recorded.trainer.train()
    return recorded


def compare(case: Case, folder: Path) -> tuple[Recorded, Recorded]:
    """Run both trainers and raise AssertionError where they differ."""
    with same_responses(None) as responses:
        theirs = run(case, trl.GRPOTrainer, folder)
    # Half precision samples other tokens soon, whatever weights differ by. In fp32 ours must sample the same by itself.
    with same_responses(responses if case.rounded else None) as own:
        ours = run(case, GroupedGRPOTrainer, folder)
    assert own == responses
    for mine, expected in zip(ours.inputs, theirs.inputs, strict=True):
        assert torch.equal(mine["completion_ids"], expected["completion_ids"])
        torch.testing.assert_close(mine["advantages"], expected["advantages"])
    if case.rounded:
        with same_responses(responses):
            exact = run(case, trl.GRPOTrainer, folder, **EXACT)
        _assert_near(ours, theirs, exact)
    else:
        _assert_equal(ours, theirs)
    return ours, theirs


EXACT: dict[str, Any] = {"bf16": False, "bf16_full_eval": False, "model_init_kwargs": {"dtype": "float32"}}


@contextmanager
def same_responses(first: list[Any] | None) -> Iterator[list[Any]]:
    """What a run generates, in order; with ``first``'s list the run gets that instead of its own."""
    generate = grpo_trainer.GRPOTrainer._generate_single_turn
    generated: list[Any] = []

    def replay(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = generate(self, *args, **kwargs)
        generated.append(own if first is None else first[len(generated)])
        return copy.deepcopy(generated[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo_trainer.GRPOTrainer, "_generate_single_turn", replay)
        yield generated


def _assert_equal(ours: Recorded, theirs: Recorded) -> None:
    assert len(theirs.losses) == len(ours.losses) > 0
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-4, abs=1e-4)
    assert len(theirs.gradients) == len(ours.gradients)
    assert not theirs.gradients or any(g.any() for step in theirs.gradients for g in step.values())
    for step, (mine, expected) in enumerate(zip(ours.gradients, theirs.gradients, strict=True)):
        if not any(gradient.any() for gradient in expected.values()):
            assert not any(gradient.any() for gradient in mine.values())
            continue
        error, name = largest_error(mine, expected)
        assert error <= 1e-4, f"gradient of {name} at step {step}: {error}"
    _assert_metrics(ours, theirs, 1e-4)


def _assert_metrics(ours: Recorded, theirs: Recorded, tolerance: float) -> None:
    histories = (theirs.trainer.state.log_history, ours.trainer.state.log_history)
    assert len(histories[0]) == len(histories[1]) > 0
    for expected, mine in zip(*histories, strict=True):
        for key, value in expected.items():
            if any(part in key for part in NOT_COMPARED):
                continue
            assert mine[key] == pytest.approx(value, rel=tolerance, abs=tolerance), key


def _assert_near(ours: Recorded, theirs: Recorded, exact: Recorded) -> None:
    """Half precision: ours is no farther from TRL's, and from the truth, than twice what TRL's is from the truth."""
    differ = [abs(a - b) for a, b in zip(theirs.losses, exact.losses, strict=True)]
    assert ours.losses == pytest.approx(theirs.losses, abs=2 * max(differ) + 1e-3)
    if theirs.gradients:
        mine, expected, true = (_all_gradients(recorded) for recorded in (ours, theirs, exact))
        rounding = (expected - true).norm()
        assert 0 < rounding < 0.3 * true.norm()
        assert (mine - expected).norm() <= 2 * rounding
        assert (mine - true).norm() <= 2 * rounding
    _assert_metrics(ours, theirs, 0.1)


def _all_gradients(recorded: Recorded) -> torch.Tensor:
    """Of all steps and parameters as one vector."""
    return torch.cat([step[name].float().flatten() for step in recorded.gradients for name in sorted(step)])


def main() -> None:
    torch.set_num_threads(1)
    compare(CASES[sys.argv[1]], Path(sys.argv[2]))
    print("equal")


if __name__ == "__main__":
    main()
