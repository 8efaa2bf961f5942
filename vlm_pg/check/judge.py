"""What is wrong with some samples, each by itself: its words, its gold answer, the length of its prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from vlm_pg.check.finding import Finding, error
from vlm_pg.check.probing import Facts
from vlm_pg.check.words import word_findings
from vlm_pg.errors import SampleError
from vlm_pg.media.probe import MediaFacts
from vlm_pg.prompts.measure import PromptMeasure
from vlm_pg.rewards import Rewarder, RewardSettings
from vlm_pg.rewards.gold import gold_faults, gold_settings
from vlm_pg.types import Prompt, Sample


class Judge(AbstractContextManager["Judge"]):
    """Judges samples; a context manager, which ends the processes that check answers.

    Args:
        reward: settings of the reward, by which gold answers are scored.
        measure: makes prompts without pixels.
        fits_model: raises SampleError for a prompt that the model cannot answer.
        num_tokens: counts the tokens of a text, for reward functions that ask for that.
        warn: shown the first error of each reward function.

    Raises:
        ConfigError: a reward function that cannot be found or called.
    """

    def __init__(
        self,
        reward: RewardSettings,
        measure: PromptMeasure,
        fits_model: Callable[[Prompt], None],
        num_tokens: Callable[[str], int],
        warn: Callable[[str], None] = print,
    ):
        self._rewarder = Rewarder(gold_settings(reward), warn)
        self._measure, self._fits_model = measure, fits_model
        self._num_tokens = num_tokens if reward.functions else None

    def __exit__(self, *_: Any) -> None:
        self._rewarder.close()

    def judge(
        self,
        samples: Sequence[Sample],
        facts: Sequence[Sequence[Facts]],
        on_length: Callable[[int], None] = lambda tokens: None,
    ) -> Iterator[list[Finding]]:
        """The findings about each sample, in order.

        Args:
            samples: the questions; several at a time, whose answers are checked side by side.
            facts: of each sample's media, or why there are none.
            on_length: told how many tokens each prompt has.

        Raises:
            ModelError: a sample has media and the model reads text alone.
        """
        faults = gold_faults(samples, self._rewarder, self._num_tokens)
        for sample, of_media, gold_fault in zip(samples, facts, faults, strict=True):
            found = [error(sample, one) for one in of_media if isinstance(one, SampleError)]
            found += word_findings(sample)
            found += [error(sample, gold_fault)] if gold_fault is not None else []
            found += self._lengths(sample, [one for one in of_media if isinstance(one, MediaFacts)], on_length)
            yield found

    def _lengths(
        self, sample: Sample, facts: Sequence[MediaFacts], on_length: Callable[[int], None]
    ) -> Iterator[Finding]:
        if len(facts) < len(sample.media):
            return
        try:
            prompt = self._measure.measure(sample, facts)
            on_length(prompt.num_tokens)
            self._measure.check(sample, prompt)
            self._fits_model(prompt)
        except SampleError as fault:
            yield error(sample, fault)
