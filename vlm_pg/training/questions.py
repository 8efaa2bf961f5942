"""The questions of each step, from one order over all samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlm_pg.config import RunConfig
from vlm_pg.data.sample_sets import EpochOrder, Mixture
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
        position: the next one in the order.
        on_bad: called on all ranks with the number of samples this rank has tried, and the unusable ones.
    """

    def __init__(
        self,
        config: RunConfig,
        data: TrainingData,
        position: int,
        on_bad: Callable[[int, Sequence[BadSample]], None],
        ranks: RankLayout,
        should_stop: Callable[[], bool] = lambda: False,
    ):
        self._samples, self._order, self._source = data.samples, data.order, data.source
        self._seed, self._shuffle = config.run.seed, config.data.shuffle
        self._prompts_per_step = config.training.prompts_per_step  # at least
        # Where rollouts train on the rank that samples them, every mini-batch should have some on each rank.
        rollouts_stay = not (config.training.balance and config.model.share_prefix)
        self._strided = rollouts_stay and config.algorithm.minibatches > 1
        self._on_bad, self._should_stop, self._ranks = on_bad, should_stop, ranks
        self.position = position

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return len(self._order)

    def take(self, count: int, without: Collection[str] = ()) -> list[Sample]:
        """The next ``count`` distinct samples without the ids in ``without``; fewer if there are no more.

        A question twice in a step would have the same rollouts, so it is skipped.
        """
        found: dict[str, Sample] = {}
        seen: set[str] = set()
        # Orders of two epochs overlap, so it may take two rounds to see everything.
        while len(found) < count and len(seen) < len(self._order):
            sample = self._at(self.position)
            self.position += 1
            seen.add(sample.sample_id)
            if sample.sample_id not in without:
                found.setdefault(sample.sample_id, sample)
        return list(found.values())

    def load(self, samples: Sequence[Sample]) -> list[tuple[Sample, Prompt]]:
        """Prompts of this rank's share of ``samples``; unusable ones are recorded."""
        mine = self._share(samples)
        questions, bad = self._source.load(mine, should_stop=self._should_stop)
        self._on_bad(len(mine), bad)
        return questions

    def record(self, bad: Sequence[BadSample]) -> None:
        """Record questions that turned out to be unusable after loading; called on all ranks."""
        self._on_bad(0, bad)

    def load_tampered(self, samples: Sequence[Sample], tamper: Tamper) -> list[tuple[Sample, Prompt]]:
        """Prompts of these samples with tampered media, without those that cannot be tampered with."""
        return self._source.load(samples, tamper, self._should_stop)[0]

    def decode_ahead(self, steps: int) -> None:
        """Start decoding the media of the next steps; cancel stale prefetch requests."""
        upcoming: list[Sample] = []
        for step in range(steps):
            first = self.position + step * self._prompts_per_step
            samples = [self._at(position) for position in range(first, first + self._prompts_per_step)]
            upcoming += self._share(list({sample.sample_id: sample for sample in samples}.values()))
        self._source.expect(upcoming)

    def _share(self, samples: Sequence[Sample]) -> list[Sample]:
        return share_of_rank(samples, self._ranks.rank, self._ranks.world_size, self._strided)

    def _at(self, position: int) -> Sample:
        return self._samples[self._order.index_at(position, self._seed, self._shuffle)]


def share_of_rank(samples: Sequence[Sample], rank: int, world_size: int, strided: bool = False) -> list[Sample]:
    """One of ``world_size`` blocks of almost equal size, after moving questions next to earlier ones on the same media.

    Ranks cannot share computed features, so questions on one video belong on one rank. Samples and updates do not
    depend on the rank. Otherwise the (random) order is kept, which mixes long prompts with short ones.

        questions on videos a, b, a, c, two ranks: (a, a) and (b, c)

    Args:
        strided: every ``world_size``-th question instead, whatever its media, so any run of questions is spread evenly.
    """
    if strided:
        return list(samples[rank::world_size])
    first: dict[object, int] = {}
    keys = [first.setdefault(sample.media, index) if sample.media else index for index, sample in enumerate(samples)]
    grouped = [sample for _, sample in sorted(zip(keys, samples, strict=True), key=lambda pair: pair[0])]
    return grouped[rank * len(samples) // world_size : (rank + 1) * len(samples) // world_size]
