"""Sources asked for by weight: as often as the weights say at every moment, each in its own order, by place alone."""

from __future__ import annotations

import numpy as np
import pytest

from vlm_pg.data.order import EachInTurn, Mixture, index_at, order_of
from vlm_pg.errors import ConfigError
from vlm_pg.types import Sample

SOURCES = np.array([0, 1, 2, 1, 1, 0, 2, 1, 1, 1, 1, 2] * 9, dtype=np.int32)
NAMES = ["clevrer", "nextqa", "star"]
WEIGHTS = {"nextqa": 1.0, "star": 5.0, "clevrer": 0.5}


def mixture(weights: dict[str, float] | None = None) -> Mixture:
    return Mixture(NAMES, SOURCES, WEIGHTS if weights is None else weights)


def order(places: range, seed: int = 7, shuffle: bool = True, weights: dict[str, float] | None = None) -> list[int]:
    mixed = mixture(weights)
    return [mixed.index_at(place, seed, shuffle) for place in places]


@pytest.mark.parametrize("seed", range(5))
def test_shares_hold_at_every_moment(seed: int) -> None:
    asked = SOURCES[order(range(10_000), seed)]
    total = sum(WEIGHTS.values())
    for place, name in enumerate(NAMES):
        seen = np.cumsum(asked == place)
        expected = np.arange(1, len(asked) + 1) * WEIGHTS[name] / total
        assert np.abs(seen - expected).max() < 4


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_source_is_used_epoch_after_epoch(shuffle: bool) -> None:
    asked = np.array(order(range(3_000), shuffle=shuffle))
    for place in range(len(NAMES)):
        members = np.flatnonzero(place == SOURCES)
        own = [index for index in asked if SOURCES[index] == place]
        assert own == [members[index_at(len(members), turn, 7, shuffle)] for turn in range(len(own))]
        assert len(own) < len(members) or set(own[: len(members)]) == set(members)


def test_a_place_needs_no_other_place() -> None:
    """Resumed in another process, any step asks what it would have asked."""
    whole = order(range(9_000))
    assert order(range(8_190, 8_200)) == whole[8_190:8_200]
    backwards = order(range(8_999, 0, -977))
    assert backwards == whole[8_999:0:-977]
    assert order(range(50), seed=8) != whole[:50]


def test_a_source_of_weight_0_is_left_out() -> None:
    weights = {"nextqa": 1.0, "star": 0.0, "clevrer": 0.0}
    assert len(mixture(weights)) == np.count_nonzero(SOURCES == 1) and len(mixture()) == len(SOURCES)
    for name, place in (("nextqa", 1), ("star", 2), ("clevrer", 0)):
        only = dict.fromkeys(NAMES, 0.0) | {name: 0.3}
        assert set(SOURCES[order(range(500), weights=only)]) == {place}


def test_what_the_log_says() -> None:
    assert str(mixture()) == "clevrer 7.7% (18 records), nextqa 15.4% (63 records), star 76.9% (27 records)"


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
    assert isinstance(plain, EachInTurn) and isinstance(mixed, Mixture)
    assert sorted(plain.index_at(place, 0, True) for place in range(12)) == list(range(12))
    assert {samples[mixed.index_at(place, 0, True)].source for place in range(20)} == set(NAMES)
