"""Which rank works on which of a step's questions, and the step's order, which does not depend on that."""

from __future__ import annotations

from collections.abc import Sequence

from vlm_pg.types import Sample


def share_of_rank(samples: Sequence[Sample], rank: int, world_size: int, in_turn: bool = False) -> list[Sample]:
    """One of ``world_size`` blocks of almost equal size; a question stands next to an earlier one on the same media.

    Ranks cannot share what they have computed, so questions on one video are worth most on one rank. What is sampled
    and learned does not depend on who does it. Otherwise the order is kept: it is a random one, and mixes long prompts
    with short ones.

        questions on videos a, b, a, c, two ranks: (a, a) and (b, c)

    Args:
        in_turn: every ``world_size``-th question instead, whatever its media: so any run of questions is spread evenly.
    """
    if in_turn:
        return list(samples[rank::world_size])
    first: dict[object, int] = {}
    places = [first.setdefault(sample.media, place) if sample.media else place for place, sample in enumerate(samples)]
    together = [sample for _, sample in sorted(zip(places, samples, strict=True), key=lambda pair: pair[0])]
    return together[rank * len(samples) // world_size : (rank + 1) * len(samples) // world_size]


def step_order(orders: Sequence[Sequence[int]]) -> list[list[int]]:
    """Of every rank's groups: their numbers from 0 over all ranks, by ``RolloutGroup.order``.

    Equal ones are counted rank by rank.

        step_order([[0, 3], [2]]) -> [[0, 2], [1]]
    """
    groups = sorted((order, rank, at) for rank, of_rank in enumerate(orders) for at, order in enumerate(of_rank))
    numbers = {group[1:]: number for number, group in enumerate(groups)}
    return [[numbers[rank, at] for at in range(len(of_rank))] for rank, of_rank in enumerate(orders)]
