"""Which questions come next: one order over all samples, taken from its beginning by every step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlm_pg.config import RunConfig
from vlm_pg.data.order import EpochOrder, Mixture
from vlm_pg.distributed import RankLayout
from vlm_pg.prompts.prompt_source import PromptSource, Tamper
from vlm_pg.types import BadSample, Prompt, Sample


@dataclass(frozen=True)
class TrainingData:
    """Questions of a run and their order. ``digests``: of the files they come from, for checkpoints."""

    samples: Sequence[Sample]
    order: EpochOrder | Mixture
    source: PromptSource
    digests: Mapping[str, Any] = field(default_factory=dict)


class QuestionStream:
    """The samples epoch after epoch, in an order that depends on the seed alone, and their prompts.

    All ranks hold the same stream and take the same samples from it; each loads its own share.

    Args:
        place: how many places of the order are behind already.
        on_bad: takes how many samples this rank has tried, and which of them cannot be used; called on all ranks.
    """

    def __init__(
        self,
        config: RunConfig,
        data: TrainingData,
        place: int,
        on_bad: Callable[[int, Sequence[BadSample]], None],
        ranks: RankLayout,
        should_stop: Callable[[], bool] = lambda: False,
    ):
        self._samples, self._order, self._source = data.samples, data.order, data.source
        self._seed, self._shuffle = config.run.seed, config.data.shuffle
        self._prompts_per_step = config.training.prompts_per_step  # the least that a step takes
        # Where rollouts train on the rank that samples them, every mini-batch should have some on each rank.
        rollouts_stay = not (config.training.balance and config.model.share_prefix)
        self._in_turn = rollouts_stay and config.algorithm.minibatches > 1
        self._on_bad, self._should_stop, self._ranks = on_bad, should_stop, ranks
        self.place = place

    @property
    def num_samples(self) -> int:
        """How many different ones there are: the places of an epoch."""
        return len(self._order)

    def take(self, count: int, without: Collection[str] = ()) -> list[Sample]:
        """The next ``count`` samples, none of them twice and none of the ids in ``without``; fewer if there are none.

        The same question a second time in a step would have the same rollouts, so its place is passed over.
        """
        found: dict[str, Sample] = {}
        seen: set[str] = set()
        # Orders of two epochs overlap, so it may take two rounds to see everything.
        while len(found) < count and len(seen) < len(self._order):
            sample = self._at(self.place)
            self.place += 1
            seen.add(sample.sample_id)
            if sample.sample_id not in without:
                found.setdefault(sample.sample_id, sample)
        return list(found.values())

    def load(self, samples: Sequence[Sample]) -> list[tuple[Sample, Prompt]]:
        """Prompts of this rank's share of ``samples``; what cannot be used is recorded."""
        mine = self._share(samples)
        questions, bad = self._source.load(mine, should_stop=self._should_stop)
        self._on_bad(len(mine), bad)
        return questions

    def record(self, bad: Sequence[BadSample]) -> None:
        """Questions that were loaded and turned out to be unusable later; called on all ranks."""
        self._on_bad(0, bad)

    def load_tampered(self, samples: Sequence[Sample], tamper: Tamper) -> list[tuple[Sample, Prompt]]:
        """Prompts of these samples with tampered media; those that the tampering is impossible with are left out."""
        return self._source.load(samples, tamper, self._should_stop)[0]

    def decode_ahead(self, steps: int) -> None:
        """Start decoding the media of the next steps; cancel stale prefetch requests."""
        ahead: list[Sample] = []
        for step in range(steps):
            first = self.place + step * self._prompts_per_step
            block: dict[str, Sample] = {}
            for place in range(first, first + self._prompts_per_step):
                sample = self._at(place)
                block.setdefault(sample.sample_id, sample)
            ahead += self._share(list(block.values()))
        self._source.expect(ahead)

    def _share(self, samples: Sequence[Sample]) -> list[Sample]:
        return share_of_rank(samples, self._ranks.rank, self._ranks.world_size, self._in_turn)

    def _at(self, place: int) -> Sample:
        return self._samples[self._order.index_at(place, self._seed, self._shuffle)]


def share_of_rank(samples: Sequence[Sample], rank: int, world_size: int, in_turn: bool = False) -> list[Sample]:
    """One of ``world_size`` blocks of almost equal size; a question stands next to an earlier one on the same media.

    Ranks cannot share what they have computed, so questions on one video are worth most on one rank. What is sampled
    and learned does not depend on the rank. Otherwise the order is kept: it is a random one, and mixes long prompts
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
