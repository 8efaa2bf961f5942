"""Every contestant computes the same loss and the same gradient: otherwise their times could not be compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from scripts.bench.others import CONTESTANTS, BottomRightMask, bottom_right_attention
from vlm_pg.bench.case import random_model
from vlm_pg.bench.step_case import TrainingCase, gradient_norm
from vlm_pg.models import micro_batches
from vlm_pg.models.loading import make_policy
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.processes import resolve
from vlm_pg.training import updates


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "checkpointing"])
def policy(request: pytest.FixtureRequest) -> Policy:
    settings = ModelSettings(path="bench", gradient_checkpointing=request.param)
    return make_policy(random_model("small"), None, settings)


def _gradients(case: TrainingCase) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in case.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", [name for name in CONTESTANTS if name != "grouped"])
@pytest.mark.parametrize("lengths", [(6, 6, 6), (2, 7, 5)], ids=["even", "ragged"])
def test_same_loss_and_every_gradient(policy: Policy, name: str, lengths: tuple[int, ...]) -> None:
    if reason := CONTESTANTS[name].unavailable_because():
        pytest.skip(reason)
    case = TrainingCase.random(policy, 33, lengths)
    results = []
    for side in ("grouped", name):
        results.append((case.run(resolve(CONTESTANTS[side].run)), gradient_norm(case), _gradients(case)))
    (loss, norm, gradients), (other_loss, other_norm, other_gradients) = results
    assert other_loss == pytest.approx(loss, rel=1e-5)
    assert other_norm == pytest.approx(norm, rel=1e-5)
    assert gradients.keys() == other_gradients.keys() and len(gradients) > 40
    for key, gradient in gradients.items():
        torch.testing.assert_close(other_gradients[key], gradient, rtol=1e-3, atol=1e-5 * norm)


def test_bottom_right_attention_matches_an_explicit_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 3, 8, generator=generator)
    k, v = (torch.randn(2, 2, 7, 8, generator=generator) for _ in range(2))
    out, _ = bottom_right_attention(None, q, k, v, None, scaling=0.3, bench_mask=BottomRightMask())
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = 0.3 * q @ keys.transpose(-1, -2)
    allowed = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0], [1] * 7], dtype=torch.bool)
    expected = scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ values
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_ours_is_the_loop_of_training(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training's passes and both of ours come from one function: who changes it changes what is measured."""
    assert updates.run_micro_batch is micro_batches.run_micro_batch
    ran: list[int] = []

    def counted(module: Any, streams: Any, features: Any, loss_of: Any, backward: Any, *more: Any) -> None:
        def counted_backward(loss: torch.Tensor) -> None:
            ran[-1] += 1
            backward(loss)

        ran.append(0)
        run_micro_batch(module, streams, features, loss_of, counted_backward, *more)

    run_micro_batch = micro_batches.run_micro_batch
    monkeypatch.setattr(micro_batches, "run_micro_batch", counted)
    case = TrainingCase.random(policy, 16, (600, 600))
    for name in ("grouped", "grouped-chunked"):
        case.run(resolve(CONTESTANTS[name].run))
    assert ran == [1, 3]  # one pass; two chunks and the prompts' backward


def test_a_contestant_that_is_not_there_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlm_pg.bench.runner.find_spec", lambda name: None)
    reason = CONTESTANTS["prefix-grouper-kind"].unavailable_because()
    assert reason is not None and "pip install prefix-grouper" in reason
