"""Samplers choose as transformers' own logits processors would, from random numbers that depend on names only."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from vlm_pg.rollout.sampling import choose_tokens, rollout_key, uniforms

DRAWS = 20_000
# 99.9 % quantile of chi-square by degrees of freedom (the tokens that can be drawn, less one).
CHI_SQUARE_999 = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32, 8: 26.12, 9: 27.88}


def logits() -> torch.Tensor:
    return torch.tensor([[2.0, 1.5, 0.3, 0.0, -0.5, -1.0, 1.0, -2.0, 0.7, -0.1]])


@pytest.mark.parametrize(
    "temperature, top_p, top_k", [(1.0, 1.0, 0), (0.6, 1.0, 0), (1.0, 0.8, 0), (1.0, 1.0, 4), (1.3, 0.7, 6)]
)
def test_draws_follow_transformers_distribution(temperature: float, top_p: float, top_k: int) -> None:
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)] if temperature != 1.0 else [])
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        processors.append(TopPLogitsWarper(top_p))
    expected = processors(torch.zeros(1, 1, dtype=torch.long), logits().clone()).softmax(-1)[0].numpy()

    uniform = torch.from_numpy(uniforms([rollout_key(0, 1, "sample", 0)], DRAWS)[0])
    nothing = torch.zeros(10, dtype=torch.bool)
    tokens, logprobs = choose_tokens(logits().expand(DRAWS, -1), uniform, nothing, temperature, top_p, top_k)
    counts = np.bincount(tokens.numpy(), minlength=10)

    possible = expected > 0
    assert (counts[~possible] == 0).all()
    chi_square = (((counts - DRAWS * expected) ** 2)[possible] / (DRAWS * expected[possible])).sum()
    assert chi_square < CHI_SQUARE_999[possible.sum() - 1]
    plain = (logits() / temperature).log_softmax(-1)[0]
    assert torch.allclose(logprobs, plain[tokens], atol=1e-6)


def test_forbidden_tokens_are_never_chosen_and_log_probabilities_stay_the_policys() -> None:
    forbidden = torch.zeros(10, dtype=torch.bool)
    forbidden[0] = forbidden[1] = True
    uniform = torch.from_numpy(uniforms([3], 2000)[0])
    tokens, logprobs = choose_tokens(logits().expand(2000, -1), uniform, forbidden, 1.0, 1.0, 0)
    assert not set(tokens.tolist()) & {0, 1}
    assert torch.allclose(logprobs, logits().log_softmax(-1)[0][tokens], atol=1e-6)
    assert choose_tokens(logits(), uniform[:1], forbidden, 0.0, 1.0, 0)[0].item() == 6


def test_the_edges_of_the_unit_interval_choose_possible_tokens() -> None:
    """A probability of exactly 0 at either end of the vocabulary is stepped over."""
    edge = torch.tensor([[-torch.inf, 1.0, 1.0, -torch.inf]]).expand(2, -1)
    uniform = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)
    tokens, _ = choose_tokens(edge, uniform, torch.zeros(4, dtype=torch.bool), 1.0, 1.0, 0)
    assert tokens.tolist() == [1, 2]


def test_streams_are_uniform_and_independent() -> None:
    values = uniforms([rollout_key(0, 1, "a", i) for i in range(100)], 500)
    assert values.min() >= 0.0 and values.max() < 1.0
    counts = np.histogram(values, bins=10, range=(0, 1))[0]
    assert ((counts - 5000) ** 2 / 5000).sum() < CHI_SQUARE_999[9]
    correlation = np.corrcoef(values[:, :-1].ravel(), values[:, 1:].ravel())[0, 1]
    assert abs(correlation) < 0.02
    assert abs(np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1]) < 0.02


def test_every_part_of_the_name_matters() -> None:
    keys = {
        rollout_key(0, 1, "a", 0),
        rollout_key(1, 1, "a", 0),
        rollout_key(0, 2, "a", 0),
        rollout_key(0, 1, "b", 0),
        rollout_key(0, 1, "a", 1),
        rollout_key(0, "1 a", "", 0),
    }
    assert len(keys) == 6
