"""Faults of single samples: media, options, gold answer, length of the prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import compress
from typing import Any

from vlm_pg.answers.options import choices_of, same_text
from vlm_pg.check.findings import Finding, error, warning
from vlm_pg.check.lengths import LengthRules, PromptLengths
from vlm_pg.check.sets import Facts
from vlm_pg.errors import SampleError
from vlm_pg.media.decode_file import MediaFacts
from vlm_pg.rewards import Rewarder, RewardSettings
from vlm_pg.rewards.gold import gold_faults, gold_settings, same_gold
from vlm_pg.rewards.judge import Judge
from vlm_pg.types import Sample, right_letters


class RecordChecker(AbstractContextManager["RecordChecker"]):
    """Checks samples one by one; a context manager, which ends the processes that check answers.

    Args:
        reward: settings of the reward, by which gold answers are scored.
        lengths: measures prompts; its owner closes it.
        num_tokens: counts the tokens of a text, for reward functions that request it.
        warn: prints the first error of each reward function.

    Raises:
        ConfigError: a reward function that cannot be found or called, a judge that cannot be used.
    """

    def __init__(
        self,
        reward: RewardSettings,
        lengths: PromptLengths,
        num_tokens: Callable[[str], int],
        warn: Callable[[str], None] = print,
    ):
        if reward.judge.weight:
            Judge(reward.judge)  # raises as training would; sends no request
        self._rewarder = Rewarder(gold_settings(reward), warn)
        self._lengths = lengths
        self._num_tokens = num_tokens if reward.functions else None

    def __exit__(self, *_: Any) -> None:
        self._rewarder.close()

    def same_gold(self, first: Sample, second: Sample) -> bool:
        """Whether two samples of one question have one gold answer, as the reward reads it."""
        return same_gold(first, second, self._rewarder, self._num_tokens)

    def check(
        self,
        samples: Sequence[Sample],
        facts: Sequence[Sequence[Facts]],
        rules: LengthRules,
        on_length: Callable[[int], None],
    ) -> Iterator[list[Finding]]:
        """The findings about each sample, in order; several samples run in parallel.

        Args:
            facts: of each sample's media, or why there are none.
            rules: of their prompts.
            on_length: called with the number of tokens of each prompt.

        Raises:
            ModelError: a sample has media and the model reads text alone.
        """
        known = [tuple(one for one in of_media if isinstance(one, MediaFacts)) for of_media in facts]
        is_whole = [len(found) == len(sample.media) for sample, found in zip(samples, known, strict=True)]
        lengths_of = self._lengths.start(list(compress(zip(samples, known, strict=True), is_whole)), rules)
        faults = list(gold_faults(samples, self._rewarder, self._num_tokens))
        lengths = iter(lengths_of())
        for sample, of_media, fault, all_there in zip(samples, facts, faults, is_whole, strict=True):
            found = [error(sample, one, is_refusal=True) for one in of_media if isinstance(one, SampleError)]
            found += equal_options(sample)
            found += [] if fault is None else [error(sample, fault)]
            if all_there:
                length = next(lengths)
                if length.tokens is not None:
                    on_length(length.tokens)
                if length.fault is not None:
                    found.append(error(sample, SampleError(*length.fault), is_refusal=True))
            yield found


def equal_options(sample: Sample) -> Iterator[Finding]:
    """Options of equal text, as the reward compares texts (``rewards/options.py: same_text``)."""
    if sample.answer_kind not in ("multiple_choice", "multiple_select"):
        return
    letters: dict[str, list[str]] = {}
    for letter, text in choices_of(sample):
        first = next((other for other in letters if same_text(text, other)), text)
        letters.setdefault(first, []).append(letter)
    for text, equal in letters.items():
        if len(equal) < 2:
            continue
        came = f"the options {', '.join(equal)} have one text as rewards read it, '{text[:80]}'"
        right = sorted(right_letters(sample.answer) & set(equal))
        if right:
            fault = (
                f"{came}, and {', '.join(right)} is right. An answer in words could not be told from a wrong "
                "one. Correct 'options', or remove the record."
            )
            yield error(sample, SampleError("equal_options", fault))
        else:
            fault = f"{came}. Neither is right, so that fewer options are left to choose from. Correct 'options'."
            yield warning(sample, "equal_wrong_options", fault)
