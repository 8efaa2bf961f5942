"""Faults of samples: of one (media, options, gold answer, length of the prompt), and between them (repeated questions,
evaluation on media or questions that were trained on)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, replace
from itertools import compress
from typing import Any

from vlm_pg.answers.options import choices_of, same_text
from vlm_pg.check.findings import Finding, error, warning
from vlm_pg.check.lengths import LengthRules, PromptLengths
from vlm_pg.check.sets import Facts
from vlm_pg.data.dedup import Ledger, text_key
from vlm_pg.errors import SampleError
from vlm_pg.media.decode_file import MediaFacts
from vlm_pg.rewards import Rewarder, RewardSettings
from vlm_pg.rewards.judge import Judge
from vlm_pg.rewards.rewarder import gold_faults, gold_settings, same_gold
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


class LeakageCheck:
    """Compares each record of a set with those before it, training sets first; media by content, not by file name.

    ``same_gold``: whether two samples of one question have one gold answer.
    """

    def __init__(self, ledger: Ledger, name: str, trains: bool, same_gold: Callable[[Sample, Sample], bool]):
        self._ledger, self._name, self._trains, self._same_gold = ledger, name, trains, same_gold

    def findings(self, sample: Sample, facts: Sequence[MediaFacts]) -> Iterator[Finding]:
        """Findings about a sample that a run would use, whose media all could be read."""
        key, where = question_key(sample, facts), f"{sample.where} ({sample.sample_id})"
        yield from self._repetition(sample, key, where)
        if self._trains:
            self._ledger.first("questions trained on", key, where)
            for ref, one in zip(sample.media, facts, strict=True):
                self._ledger.first("media trained on", one.content, f"'{ref.path}' of {where}")
        else:
            yield from self._leakage(sample, facts, key)

    def _repetition(self, sample: Sample, key: str, where: str) -> Iterator[Finding]:
        # Training sets are one set to the policy.
        table = "questions to train on" if self._trains else f"questions of {self._name}"
        own = [self._name, where, sample.answer, sample.answer_kind]
        if sample.turns or sample.rejected:  # a question may have many conversations and preference pairs
            key += json.dumps([sample.turns, sample.rejected])
        name, first, answer, kind = json.loads(self._ledger.first(table, key, json.dumps(own)))
        if (name, first) == (self._name, where):
            return
        first = first if name == self._name else f"{name}, {first}"
        if self._same_gold(replace(sample, answer=answer, answer_kind=kind), sample):
            came = "so is the answer" if answer == sample.answer else f"its answer '{answer[:80]}' is worth the same"
            yield warning(
                sample,
                "duplicate_question",
                f"the question, its options and its media are those of {first}, and {came}. It counts twice. Remove "
                "one of them, unless that is meant.",
            )
        else:
            fault = (
                f"the question, its options and its media are those of {first}, whose answer is '{answer[:80]}', not "
                f"'{sample.answer[:80]}'. One of them rewards what is wrong. Correct 'solution', or remove one of them."
            )
            yield error(sample, SampleError("contradictory_answer", fault))

    def _leakage(self, sample: Sample, facts: Sequence[MediaFacts], key: str) -> Iterator[Finding]:
        for content, path in {one.content: ref.path for ref, one in zip(sample.media, facts, strict=True)}.items():
            trained = self._ledger.look("media trained on", content)
            if trained is not None:
                fault = (
                    f"'{path}' is byte for byte {trained}, which is trained on. Evaluation needs media that training "
                    "has not seen. Leave the records about it out of one of the sets."
                )
                yield error(sample, SampleError("media_trained_on", fault))
        trained = None if sample.media else self._ledger.look("questions trained on", key)
        if trained is not None:
            fault = (
                f"the question is that of {trained}, which is trained on. Evaluation needs questions that training has "
                "not seen. Leave it out of one of the sets."
            )
            yield error(sample, SampleError("question_trained_on", fault))


def question_key(sample: Sample, facts: Sequence[MediaFacts]) -> str:
    """A hash: equal for equal questions (by ``text_key``) with equal options about equal parts of equal media."""
    media = [
        [ref.kind, one.content, ref.folder_fps, ref.start, ref.end, ref.times, list(map(astuple, one.subtitles))]
        for ref, one in zip(sample.media, facts, strict=True)
    ]
    words = [text_key(text) for text in (sample.question, *sample.options)]
    return hashlib.sha256(json.dumps([words, media]).encode()).hexdigest()
