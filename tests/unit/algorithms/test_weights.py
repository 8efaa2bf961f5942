"""Weights over the whole optimizer batch add up to 1 and do not depend on how it is split."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.algorithms.weights import response_token_weights


def test_by_hand() -> None:
    assert response_token_weights([2, 3], "token_mean", 5, 2) == [1 / 5, 1 / 5]
    assert response_token_weights([2, 3], "sequence_mean", 5, 2) == [1 / 4, 1 / 6]


@pytest.mark.parametrize("average", ["token_mean", "sequence_mean"])
@given(lengths=st.lists(st.integers(1, 2000), min_size=1, max_size=40), cut=st.integers(0, 40))
def test_weights_sum_to_one_and_survive_a_split(average: str, lengths: list[int], cut: int) -> None:
    totals = (sum(lengths), len(lengths))
    whole = response_token_weights(lengths, average, *totals)
    split = response_token_weights(lengths[:cut], average, *totals)
    split += response_token_weights(lengths[cut:], average, *totals)
    assert split == whole
    assert sum(weight * length for weight, length in zip(whole, lengths, strict=True)) == pytest.approx(1.0, abs=1e-9)


def test_no_sequences_on_this_rank() -> None:
    assert response_token_weights([], "token_mean", 0, 0) == []
    assert response_token_weights([], "sequence_mean", 7, 2) == []


def test_an_empty_response_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[2, 0\]\. Each must be at least 1 token\. Leave empty responses out"):
        response_token_weights([2, 0], "token_mean", 2, 2)


@pytest.mark.parametrize("totals", [(4, 2), (5, 1)])
def test_totals_of_a_part_only_are_refused(totals: tuple[int, int]) -> None:
    message = (
        "They must cover at least the 5 tokens and 2 sequences given. Pass the totals of the whole optimizer batch"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        response_token_weights([2, 3], "token_mean", *totals)


def test_an_unknown_average_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'mean'. Allowed are token_mean, sequence_mean. Set algorithm.loss_average"):
        response_token_weights([2], "mean", 2, 1)  # type: ignore[arg-type]


def test_defaults_are_grpo_without_kl() -> None:
    settings = AlgorithmSettings()
    assert (settings.clip_low, settings.clip_high, settings.kl_coef) == (0.2, 0.2, 0.0)
    assert (settings.scale_advantages, settings.loss_average, settings.log_ratio_clamp) == ("std", "token_mean", 20.0)
