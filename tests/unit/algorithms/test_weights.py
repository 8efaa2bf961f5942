"""Weights come from the whole optimizer batch and do not depend on how it is split."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_pg.algorithms.losses import response_token_weights
from vlm_pg.algorithms.settings import AlgorithmSettings

AVERAGES = ["token_mean", "sequence_mean", "sequence_sum", "constant_length"]
MAX_NEW_TOKENS = 2000
RESPONSES = st.lists(
    st.tuples(st.integers(1, MAX_NEW_TOKENS), st.sampled_from([0.0, 1.0, 1.0, 2.5])), min_size=1, max_size=40
)


def test_by_hand() -> None:
    def weights(average: str, **options: list[float]) -> list[float]:
        return response_token_weights([2, 3], average, 5, 2, 10, **options)

    assert weights("token_mean") == [1 / 5, 1 / 5]
    assert weights("sequence_mean") == [1 / 4, 1 / 6]
    assert weights("sequence_sum") == [1 / 2, 1 / 2]
    assert weights("constant_length") == [1 / 20, 1 / 20]
    assert weights("sequence_mean", kept=[0.0, 2.0]) == [0.0, 1 / 3]


@pytest.mark.parametrize("average", AVERAGES)
@settings(deadline=None)
@given(responses=RESPONSES, cut=st.integers(0, 40))
def test_equals_the_loss_averages_and_survives_a_split(
    average: str, responses: list[tuple[int, float]], cut: int
) -> None:
    """The weighted sum of any token values is the average that the name promises, over what trains."""
    lengths, kept = [length for length, _ in responses], [factor for _, factor in responses]
    training = [length for length, factor in responses if factor > 0]
    totals = (sum(training), len(training), MAX_NEW_TOKENS)
    whole = response_token_weights(lengths, average, *totals, kept)
    split = response_token_weights(lengths[:cut], average, *totals, kept[:cut])
    split += response_token_weights(lengths[cut:], average, *totals, kept[cut:])
    assert split == whole
    generator = np.random.default_rng(len(lengths))
    values = [generator.standard_normal(length) for length in lengths]
    sums = np.array([factor * value.sum() for value, factor in zip(values, kept, strict=True)])
    expected = {
        "token_mean": sums.sum() / max(1, sum(training)),
        "sequence_mean": (sums / lengths).sum() / max(1, len(training)),
        "sequence_sum": sums.sum() / max(1, len(training)),
        "constant_length": sums.sum() / MAX_NEW_TOKENS / max(1, len(training)),
    }[average]
    weighted = sum(weight * value.sum() for weight, value in zip(whole, values, strict=True))
    assert weighted == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("average", ["token_mean", "sequence_mean"])
@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, MAX_NEW_TOKENS), min_size=1, max_size=40))
def test_the_means_add_up_to_one(average: str, lengths: list[int]) -> None:
    weights = response_token_weights(lengths, average, sum(lengths), len(lengths), MAX_NEW_TOKENS)
    assert sum(weight * length for weight, length in zip(weights, lengths, strict=True)) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("average", AVERAGES)
def test_a_masked_response_is_as_if_it_had_not_been_sampled(average: str) -> None:
    masked = response_token_weights([4, 7, 2], average, 6, 2, 10, kept=[1.0, 0.0, 1.0])
    assert masked == [
        *response_token_weights([4], average, 6, 2, 10),
        0.0,
        *response_token_weights([2], average, 6, 2, 10),
    ]


@pytest.mark.parametrize("average", AVERAGES)
def test_no_sequences_on_this_rank(average: str) -> None:
    assert response_token_weights([], average, 0, 0, 10) == []
    assert response_token_weights([], average, 7, 2, 10) == []
    assert response_token_weights([5], average, 0, 0, 10, kept=[0.0]) == [0.0]


def test_an_empty_response_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[2, 0\]\. Each must be at least 1 token\. Leave empty responses out"):
        response_token_weights([2, 0], "token_mean", 2, 2, 10)


@pytest.mark.parametrize("totals", [(4, 2), (5, 1)])
def test_totals_of_a_part_only_are_refused(totals: tuple[int, int]) -> None:
    message = "at least the 5 tokens and 2 sequences given that train. Pass the totals of the whole optimizer batch"
    with pytest.raises(ValueError, match=re.escape(message)):
        response_token_weights([2, 3], "token_mean", *totals, 10)
    with pytest.raises(ValueError, match=re.escape(message)):
        response_token_weights([2, 9, 3], "token_mean", *totals, 10, kept=[1.0, 0.0, 0.5])


@pytest.mark.parametrize("kept", [[1.0], [1.0, -1.0], [1.0, float("nan")]])
def test_factors_that_do_not_fit_are_refused(kept: list[float]) -> None:
    with pytest.raises(ValueError, match=r"Factors of 2 sequences are .*one for each, at least 0. Pass 0 for"):
        response_token_weights([2, 3], "token_mean", 5, 2, 10, kept=kept)


def test_a_response_needs_room() -> None:
    with pytest.raises(ValueError, match=r"max_new_tokens is 0. It must be at least 1. Set rollout.max_new_tokens"):
        response_token_weights([2], "constant_length", 2, 1, 0)


def test_an_unknown_average_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"'mean'. Allowed are token_mean, sequence_mean, .*Set algorithm.loss_average"
    ):
        response_token_weights([2], "mean", 2, 1, 10)  # type: ignore[arg-type]


def test_defaults_are_grpo_without_kl() -> None:
    algorithm = AlgorithmSettings()
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.kl_coef) == (0.2, 0.2, 0.0)
    assert (algorithm.scale_advantages, algorithm.loss_average, algorithm.log_ratio_clamp) == (
        "std",
        "token_mean",
        20.0,
    )
