"""What became of a set's questions, counted in as much memory as there are reasons, kinds and sources."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import TYPE_CHECKING, Any

from data_pipelines.engine.judging import data_type
from data_pipelines.engine.repeats import Repeat
from vlm_pg.types import BadSample, Sample

if TYPE_CHECKING:
    from vlm_pg.media.probe import MediaFacts

_SHOWN = 12


@dataclass
class Histogram:
    """Counts by size, in bins that double: bin 0 is up to ``first``, bin 1 up to twice as much, and so on."""

    title: str
    first: float
    counts: Counter[int] = field(default_factory=Counter)

    def add(self, size: float) -> None:
        self.counts[max(0, math.ceil(math.log2(max(size, self.first) / self.first)))] += 1

    def label(self, place: int) -> str:
        return f"up to {self.first * 2**place:,.0f}"


@dataclass
class Tally:
    """What became of the questions, counted; and a few of them to show.

    Args:
        option_columns: how many fields of a row hold an option each; 0 where options come otherwise.
        subtitled: whether records name subtitles where their video has any.
    """

    option_columns: int = 0
    subtitled: bool = False
    fewer_options: int = 0
    without_subtitles: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    by_data_type: Counter[str] = field(default_factory=Counter)
    by_answer_kind: Counter[str] = field(default_factory=Counter)
    by_source: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    examples: dict[str, BadSample] = field(default_factory=dict)
    repeated: Counter[str] = field(default_factory=Counter)
    repeats: dict[str, Repeat] = field(default_factory=dict)
    shown: list[tuple[str, Sample]] = field(default_factory=list)
    words: Histogram = field(default_factory=lambda: Histogram("Words of question and options", 8))
    clips: Histogram = field(default_factory=lambda: Histogram("Seconds of clips", 1))
    seconds: Histogram = field(default_factory=lambda: Histogram("Seconds of whole videos", 1))
    tokens: Histogram = field(default_factory=lambda: Histogram("Visual tokens of a question", 16))

    def keep(self, split: str, sample: Sample, facts: Sequence[MediaFacts] = ()) -> None:
        """Count a question that was written. ``facts``: of its media, where they were looked at."""
        self.counts[split] += 1
        self.by_data_type[data_type(sample)] += 1
        self.by_answer_kind[sample.answer_kind] += 1
        self.by_source[sample.source] += 1
        self.words.add(sum(len(text.split()) for text in (sample.question, *sample.options)))
        self.fewer_options += 0 < len(sample.options) < self.option_columns
        self.without_subtitles += all(not ref.subtitles for ref in sample.media)
        for ref in sample.media:
            if ref.end is not None:
                self.clips.add(ref.end - (ref.start or 0.0))
        for one in facts:
            if one.seconds:
                self.seconds.add(one.seconds)
        if facts:
            self.tokens.add(sum(one.visual_tokens for one in facts))
        # A few that depend on nothing but themselves; largest of all hashes, so that the choice needs no second look.
        rank = hashlib.sha256(sample.sample_id.encode(errors="surrogatepass")).hexdigest()
        self.shown = nlargest(_SHOWN, [*self.shown, (rank, sample)], key=lambda one: one[0])

    def histograms(self) -> list[Histogram]:
        """How long questions, clips and videos are."""
        return [self.words, self.clips, self.seconds, self.tokens]

    def refuse(self, bad: BadSample) -> None:
        """Count a question that cannot be used."""
        self.refused[bad.reason] += 1
        self.examples.setdefault(bad.reason, bad)

    def repeat(self, repeat: Repeat) -> None:
        """Count a kept question that was asked before."""
        self.repeated[repeat.answers] += 1
        self.repeats.setdefault(repeat.answers, repeat)

    def report(self) -> dict[str, Any]:
        """As ``report.json`` has it."""
        fewer = {"fewer_options_than_columns": self.fewer_options} if self.option_columns else {}
        silent = {"without_subtitles": self.without_subtitles} if self.subtitled else {}
        return {
            "train": self.counts["train"],
            "eval": self.counts["eval"],
            "kept_by_data_type": _sorted(self.by_data_type),
            "kept_by_answer_kind": _sorted(self.by_answer_kind),
            "kept_by_source": _sorted(self.by_source),
            "left_out": _sorted(self.left_out),
            "refused": _sorted(self.refused),
            "repeated": _sorted(self.repeated),
            **fewer,
            **silent,
        }

    def summary(self) -> str:
        """A few lines for people: how many were kept, left out, refused and asked twice, and why."""
        lines = [f"kept     {self.counts['train']} for training, {self.counts['eval']} for evaluation"]
        lines += [f"left out {count:6}  {name}" for name, count in self.left_out.most_common()]
        for reason, count in self.refused.most_common():
            example = self.examples[reason]
            lines.append(f"refused  {count:6}  {reason}, for example {example.sample_id}: {example.message}")
        lines += [f"repeated {count:6}  {self.repeats[answers]}" for answers, count in self.repeated.most_common()]
        if self.fewer_options:
            lines.append(
                f"kept     {self.fewer_options:6}  of them have fewer options than {self.option_columns} columns"
            )
        if self.subtitled:
            lines.append(f"kept     {self.without_subtitles:6}  of them have no subtitles")
        return "\n".join(lines)


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda one: (-one[1], one[0])))
