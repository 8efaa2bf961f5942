"""Orders in which questions on the same media follow each other."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from vlm_pg.data.prepared import ShardWriter, to_row
from vlm_pg.data.sample_sets import EpochOrder, SeveralSets, media_of, open_records, order_of
from vlm_pg.types import MediaRef, Sample

TEXT = Sample("t", "?", (), (), "A", "exact", "s", "c")
# Of each sample the number of its video; -1: text alone. Scattered over the file; one video has many.
VIDEOS = [0, 1, 2, 0, -1, 3, 1, 0, 0, -1, 2, 0, 4]


def samples(videos: list[int] = VIDEOS) -> list[Sample]:
    return [
        replace(TEXT, sample_id=str(i), media=(MediaRef("video", f"{v}.mp4", start=1.0),) if v >= 0 else ())
        for i, v in enumerate(videos)
    ]


def epoch(order: EpochOrder, number: int, seed: int = 0, shuffle: bool = True) -> list[int]:
    first = number * len(order)
    return [order.index_at(position, seed, shuffle) for position in range(first, first + len(order))]


def runs_of(indices: list[int]) -> list[int]:
    """The videos in order of appearance, each run once."""
    return [video for video, _ in groupby(VIDEOS[i] if VIDEOS[i] >= 0 else -1 - i for i in indices)]


def test_each_epoch_has_every_sample_once_and_media_together() -> None:
    order = order_of(samples(), {}, media_together=True)
    assert isinstance(order, EpochOrder)
    orders = [epoch(order, number) for number in range(6)]
    for indices in orders:
        assert sorted(indices) == list(range(len(VIDEOS)))
        assert len(runs_of(indices)) == 7  # five videos, two texts
    assert len({tuple(indices) for indices in orders}) == 6
    assert orders[2] == epoch(order_of(samples(), {}, media_together=True), 2)  # type: ignore[arg-type]
    within = {tuple(i for i in indices if VIDEOS[i] == 0) for indices in orders}
    assert len(within) > 1, "questions of a video are shuffled too"


def test_no_medium_comes_early_for_having_many_questions() -> None:
    """Over many epochs each medium is first, and last, equally often."""
    order = EpochOrder(len(VIDEOS), media_of(samples()))
    first, last = Counter[int](), Counter[int]()
    for number in range(1400):
        runs = runs_of(epoch(order, number))
        first[runs[0]] += 1
        last[runs[-1]] += 1
    for counts in (first, last):
        assert len(counts) == 7 and all(140 < count < 260 for count in counts.values())  # 200 each, +-5 sigma


def test_without_shuffling_the_file_is_followed_medium_by_medium() -> None:
    order = EpochOrder(len(VIDEOS), media_of(samples()))
    assert epoch(order, 0, shuffle=False) == [0, 3, 7, 8, 11, 1, 6, 2, 10, 4, 5, 9, 12]
    assert epoch(order, 1, seed=9, shuffle=False) == epoch(order, 0, shuffle=False)


def test_prepared_and_several_sets_know_their_media(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "train")
    for sample in samples():
        writer.add(to_row(sample))
    writer.close()
    stored, _ = open_records(tmp_path)
    assert media_of(stored).tolist() == media_of(samples()).tolist()
    both = media_of(SeveralSets({"a": samples(), "b": stored}))
    assert both[: len(VIDEOS)].tolist() == media_of(samples()).tolist()
    assert not set(both[: len(VIDEOS)]) & set(both[len(VIDEOS) :])


@pytest.mark.parametrize("together", [True, False])
def test_a_mixture_keeps_its_shares(together: bool) -> None:
    mixed = [replace(sample, source="ab"[i % 2]) for i, sample in enumerate(samples())]
    order = order_of(mixed, {"a": 3.0, "b": 1.0}, media_together=together)
    drawn = [order.index_at(position, 0, True) for position in range(400)]
    assert abs(sum(index % 2 == 0 for index in drawn) / 400 - 0.75) < 0.02
    counts = np.bincount(drawn, minlength=len(VIDEOS))
    assert counts[::2].max() - counts[::2].min() <= 1, "every sample of a source once per epoch of it"
