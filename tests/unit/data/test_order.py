"""The order of samples is a function of the position; sources by weight hold their shares at every moment."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_pg.data.sample_sets import EpochOrder, Mixture, index_at, order_of
from vlm_pg.errors import ConfigError
from vlm_pg.types import Sample

SOURCES = np.array([0, 1, 2, 1, 1, 0, 2, 1, 1, 1, 1, 2] * 9, dtype=np.int32)
NAMES = ["clevrer", "nextqa", "star"]
WEIGHTS = {"nextqa": 1.0, "star": 5.0, "clevrer": 0.5}


@given(num_samples=st.integers(1, 40), seed=st.integers(0, 2**40), shuffle=st.booleans())
def test_every_epoch_uses_every_sample_once(num_samples: int, seed: int, shuffle: bool) -> None:
    """The order is whole epochs end to end, each a permutation: nothing dropped or repeated at the border."""
    stream = [index_at(num_samples, position, seed, shuffle) for position in range(3 * num_samples)]
    for start in range(0, 3 * num_samples, num_samples):
        assert sorted(stream[start : start + num_samples]) == list(range(num_samples))


def test_order_by_hand() -> None:
    def epoch(num_samples: int, number: int, seed: int) -> list[int]:
        first = number * num_samples
        return [index_at(num_samples, position, seed, shuffle=True) for position in range(first, first + num_samples)]

    assert [index_at(5, position, seed=0, shuffle=False) for position in (3, 4, 5)] == [3, 4, 0]
    first, again = epoch(100, 0, 1), epoch(100, 0, 1)
    assert first == again != list(range(100))
    assert first != epoch(100, 1, 1)
    assert first != epoch(100, 0, 2)
    assert epoch(6, 0, 0) == [2, 1, 0, 3, 5, 4], "the order must never change"
    with pytest.raises(ValueError, match=r"There are 0 usable samples; at least one is needed\. Check"):
        index_at(0, 0, 0, True)


def mixture(weights: dict[str, float] | None = None) -> Mixture:
    return Mixture(NAMES, SOURCES, WEIGHTS if weights is None else weights)


def order(positions: range, seed: int = 7, shuffle: bool = True, weights: dict[str, float] | None = None) -> list[int]:
    mixed = mixture(weights)
    return [mixed.index_at(position, seed, shuffle) for position in positions]


@pytest.mark.parametrize("seed", range(2))
def test_shares_hold_at_every_moment(seed: int) -> None:
    drawn = SOURCES[order(range(10_000), seed)]
    total = sum(WEIGHTS.values())
    for source, name in enumerate(NAMES):
        seen = np.cumsum(drawn == source)
        expected = np.arange(1, len(drawn) + 1) * WEIGHTS[name] / total
        assert np.abs(seen - expected).max() < 4


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_source_is_used_epoch_after_epoch(shuffle: bool) -> None:
    drawn = np.array(order(range(3_000), shuffle=shuffle))
    for source in range(len(NAMES)):
        members = np.flatnonzero(source == SOURCES)
        own = [index for index in drawn if SOURCES[index] == source]
        assert own == [members[index_at(len(members), position, 7, shuffle)] for position in range(len(own))]
        assert len(own) < len(members) or set(own[: len(members)]) == set(members)


def test_a_position_needs_no_other_position() -> None:
    """Resumed in another process, any step gets the questions it would have had."""
    whole = order(range(9_000))
    assert order(range(8_190, 8_200)) == whole[8_190:8_200]
    backwards = order(range(8_999, 0, -977))
    assert backwards == whole[8_999:0:-977]
    assert order(range(50), seed=8) != whole[:50]


def test_a_source_of_weight_0_is_left_out() -> None:
    weights = {"nextqa": 1.0, "star": 0.0, "clevrer": 0.0}
    assert str(mixture()) == "clevrer 7.7% (18 records), nextqa 15.4% (63 records), star 76.9% (27 records)"
    assert len(mixture(weights)) == np.count_nonzero(SOURCES == 1) and len(mixture()) == len(SOURCES)
    for name, source in (("nextqa", 1), ("star", 2), ("clevrer", 0)):
        only = dict.fromkeys(NAMES, 0.0) | {name: 0.3}
        assert set(SOURCES[order(range(500), weights=only)]) == {source}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"nextqa": 1.0, "star": 1.0}, r"has no weight for clevrer\. Each source"),
        (WEIGHTS | {"vsi": 1.0}, r"a weight for vsi, which no record's data_source is\. The records' sources"),
        (dict.fromkeys(NAMES, 0.0), r"All weights of data\.mixture are 0"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mixture(weights)


def test_without_weights_every_sample_comes_once_per_epoch() -> None:
    samples = [Sample(str(n), "?", (), (), "a", "exact", NAMES[n % 3], "c") for n in range(12)]
    plain, mixed = order_of(samples, {}), order_of(samples, WEIGHTS)
    assert isinstance(plain, EpochOrder) and isinstance(mixed, Mixture)
    assert sorted(plain.index_at(position, 0, True) for position in range(12)) == list(range(12))
    assert {samples[mixed.index_at(position, 0, True)].source for position in range(20)} == set(NAMES)
