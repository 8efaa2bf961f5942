"""Which rank works on which of a step's questions."""

from __future__ import annotations

from collections.abc import Sequence

from vlm_pg.types import Sample


def share_of_rank(samples: Sequence[Sample], rank: int, world_size: int) -> list[Sample]:
    """One of ``world_size`` blocks of almost equal size; a question stands next to an earlier one on the same media.

    Ranks cannot share what they have computed, so questions on one video are worth most on one rank. What is sampled
    and learned does not depend on who does it. Otherwise the order is kept: it is a random one, and mixes long prompts
    with short ones.

        questions on videos a, b, a, c, two ranks: (a, a) and (b, c)
    """
    first: dict[object, int] = {}
    places = [first.setdefault(sample.media, place) if sample.media else place for place, sample in enumerate(samples)]
    together = [sample for _, sample in sorted(zip(places, samples, strict=True), key=lambda pair: pair[0])]
    return together[rank * len(samples) // world_size : (rank + 1) * len(samples) // world_size]
