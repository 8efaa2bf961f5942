"""Ratios of tokens and of sequences, and the truncated weights that make up for how another engine computes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.unit.algorithms.oracles import random_batch
from vlm_pg.algorithms.tokens import importance_weights, log_ratios


def test_sequence_level_is_the_mean_of_each_response() -> None:
    policy = torch.tensor([1.0, 2.0, 6.0, -3.0], dtype=torch.float64)
    behaviour = torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    assert log_ratios(policy, behaviour, [3, 1], "token").tolist() == [1.0, 1.0, 5.0, -3.0]
    assert log_ratios(policy, behaviour, [3, 1], "sequence").tolist() == pytest.approx([7 / 3] * 3 + [-3.0], rel=1e-12)


def test_the_mean_is_held_and_not_its_terms() -> None:
    policy = torch.tensor([30.0, 2.0, 1e4, 0.0], dtype=torch.float64, requires_grad=True)
    ratios = log_ratios(policy, torch.zeros(4, dtype=torch.float64), [2, 2], "sequence", 20.0)
    assert ratios.tolist() == [16.0, 16.0, 20.0, 20.0]
    ratios.sum().backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("lengths", [[2, 1], [4, 0], [5, -1]])
def test_lengths_that_do_not_fit_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"for 4 tokens. Each must be at least 1 and their sum the number of tokens"):
        log_ratios(torch.zeros(4), torch.zeros(4), lengths, "token")


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match=r"level 'turn'. Allowed are token, sequence. Set algorithm.ratio_level"):
        log_ratios(torch.zeros(1), torch.zeros(1), [1], "turn")  # type: ignore[arg-type]


@pytest.mark.parametrize("num_tokens", [1, 50])
def test_importance_weights_equal_numpy(num_tokens: int) -> None:
    trainer, rollout, *_ = random_batch(1, num_tokens, spread=2.0)
    weights = importance_weights(trainer, rollout, cap=2.0, clamp=1.0)
    expected = np.minimum(np.exp(np.clip((trainer - rollout).numpy(), -1.0, 1.0)), 2.0)
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-9, atol=1e-9)


def test_importance_weights_carry_no_graph_and_stay_finite() -> None:
    trainer = torch.tensor([1e4, -1e4, 0.0], requires_grad=True)
    weights = importance_weights(trainer, torch.zeros(3), cap=100.0, clamp=20.0)
    assert not weights.requires_grad
    assert weights.tolist() == pytest.approx([100.0, math.exp(-20.0), 1.0])
    assert importance_weights(trainer, torch.zeros(3), cap=0.5).tolist() == pytest.approx([0.5, math.exp(-20.0), 0.5])


def test_importance_weights_of_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rollout_logprobs \[2\].*All must be \[R_total\]"):
        importance_weights(torch.zeros(3), torch.zeros(2), cap=2.0)
