"""Faults between records: repeated questions, and evaluation on media or questions that were trained on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace

from vlm_pg.check.findings import Finding, error, warning
from vlm_pg.data.dedup import Ledger, text_key
from vlm_pg.errors import SampleError
from vlm_pg.media.decode_file import MediaFacts
from vlm_pg.types import Sample


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
