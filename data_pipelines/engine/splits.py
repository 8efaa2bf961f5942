"""From verdicts to record files: split by media content, duplicates, counts, writing."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from heapq import nlargest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from data_pipelines.engine.judging import data_type
from data_pipelines.engine.resume import Verdict
from vlm_pg.data.bad import line_of
from vlm_pg.data.dedup import Ledger, path_key, text_key
from vlm_pg.data.prepared import ShardWriter, to_row
from vlm_pg.data.records import line_of_record
from vlm_pg.errors import SampleError, printable
from vlm_pg.files import replacing
from vlm_pg.types import BadSample, Sample

if TYPE_CHECKING:
    from vlm_pg.media.decode_file import MediaFacts

Format = Literal["parquet", "jsonl"]
REFUSED, REPEATED = "refused.jsonl", "repeated.jsonl"
_SHOWN = 12


@dataclass(frozen=True)
class Assigned:
    """A kept question with its split and the facts of its media."""

    split: str
    sample: Sample
    facts: tuple[MediaFacts, ...] = ()


class Splitter:
    """Assigns questions to splits, over all parts in order: no medium, by content, is in two of them.

    A medium counts by its content where it was probed, whatever its file name; else by its path.

    Args:
        ledger: remembers keys of media and ids.
        eval_share: share of the media (without media: of the questions) of training files for evaluation.
        seed: selects them.
    """

    def __init__(self, ledger: Ledger, eval_share: float, seed: int):
        self._ledger, self._eval_share, self._seed = ledger, eval_share, seed

    def note(self, verdicts: Iterable[Verdict]) -> None:
        """First pass over all verdicts: remember the media of evaluation files."""
        for one in verdicts:
            for key in (*one.keys, *_contents(one)) if one.split == "eval" else ():
                self._ledger.add("evaluated", key)

    def assign(self, verdicts: Iterable[Verdict]) -> Iterator[Assigned | BadSample | str]:
        """Second pass: each is assigned, refused, or left out for a reason."""
        for one in verdicts:
            if one.sample is None:
                yield one.refused or one.skipped
            elif self._ledger.add(f"ids of {one.split}", one.sample.sample_id, one.sample.where):
                yield self._assigned(one, one.sample)
            else:
                first = self._ledger.look(f"ids of {one.split}", one.sample.sample_id)
                message = (
                    f"the id '{printable(one.sample.sample_id, 200)}' was used before, at {first}. Each row needs its "
                    "own. Give each file once; where ids begin anew in each file, or in each row's list of questions, "
                    "number them through, or leave the ids out."
                )
                yield BadSample(one.sample.sample_id, "duplicate_id", message, one.sample.where)

    def _assigned(self, one: Verdict, sample: Sample) -> Assigned | str:
        if one.split == "eval":
            return Assigned("eval", sample, one.facts)
        contents = _contents(one)
        if any(self._ledger.look("evaluated", key) is not None for key in (*one.keys, *contents)):
            return "also in the evaluation file"
        sides = {self._is_for_evaluation(key) for key in contents or one.keys}
        if len(sides) == 2:
            return "media in both files"
        return Assigned("eval" if True in sides else "train", sample, one.facts)

    def _is_for_evaluation(self, key: str) -> bool:
        """A fixed share of all keys, whatever else the files hold."""
        digest = hashlib.sha256(f"{self._seed}:{key}".encode(errors="surrogatepass")).digest()
        return int.from_bytes(digest[:8], "big") < self._eval_share * 2**64


def _contents(one: Verdict) -> tuple[str, ...]:
    return tuple(f"sha256:{facts.content}" for facts in one.facts)


@dataclass(frozen=True)
class Repeat:
    """A kept duplicate of a question. ``answers``: whether its gold answer is that of the first one."""

    sample_id: str
    first: str
    answers: Literal["same", "other"]
    where: str

    def __str__(self) -> str:
        question, first = printable(self.sample_id, 200), printable(self.first, 200)
        answer = "the same answer" if self.answers == "same" else "another answer: one of them is wrong"
        return f"with {answer}, for example {question} asks what {first} asks"


class Repeats:
    """Finds duplicates by text, options, responses, and content and part of the media, whatever file names."""

    def __init__(self, ledger: Ledger):
        self._ledger = ledger

    def of(self, sample: Sample, facts: Sequence[MediaFacts]) -> Repeat | None:
        """The duplicate that a question is; None for a new one, which is remembered."""
        contents = [one.content for one in facts] or [path_key(ref.path) for ref in sample.media]
        parts = [
            (ref.kind, ref.folder_fps, ref.start, ref.end, ref.times, path_key(ref.subtitles)) for ref in sample.media
        ]
        texts = [text_key(text) for text in (sample.question, *sample.options)]
        question = _digest([texts, contents, parts, sample.turns, sample.rejected])
        answer = _digest([sample.answer_kind, sample.answer])
        if self._ledger.add("questions", question, f"{answer} {sample.sample_id}"):
            return None
        first_answer, _, first = (self._ledger.look("questions", question) or "").partition(" ")
        return Repeat(sample.sample_id, first, "same" if answer == first_answer else "other", sample.where)


def _digest(values: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


@dataclass
class Histogram:
    """Counts by size, in bins that double: bin 0 is up to ``first``, bin 1 up to twice as much, and so on."""

    title: str
    first: float
    counts: Counter[int] = field(default_factory=Counter)

    def add(self, size: float) -> None:
        self.counts[max(0, math.ceil(math.log2(max(size, self.first) / self.first)))] += 1

    def bars(self) -> list[tuple[str, int, float]]:
        """Label, count and width in percent of each bar."""
        most, bins = max(self.counts.values()), range(min(self.counts), max(self.counts) + 1)
        return [(f"up to {self.first * 2**i:,.0f}", self.counts[i], 100 * self.counts[i] / most) for i in bins]


@dataclass
class Tally:
    """Counts of questions by outcome, and a few kept ones to show.

    Args:
        option_columns: how many fields of a row hold an option each; 0: none.
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
        """Count a question that was written. ``facts``: of its media, where they were probed."""
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
        # Samples with the largest hashes: a choice that depends on the samples alone and needs one pass.
        rank = hashlib.sha256(sample.sample_id.encode(errors="surrogatepass")).hexdigest()
        self.shown = nlargest(_SHOWN, [*self.shown, (rank, sample)], key=lambda one: one[0])

    def refuse(self, bad: BadSample) -> None:
        """Count a question that cannot be used."""
        self.refused[bad.reason] += 1
        self.examples.setdefault(bad.reason, bad)

    def repeat(self, repeat: Repeat) -> None:
        """Count a kept duplicate of a question."""
        self.repeated[repeat.answers] += 1
        self.repeats.setdefault(repeat.answers, repeat)

    def report(self) -> dict[str, Any]:
        """The counts in ``report.json``."""
        report: dict[str, Any] = {"train": self.counts["train"], "eval": self.counts["eval"]}
        counters = {"kept_by_data_type": self.by_data_type, "kept_by_answer_kind": self.by_answer_kind,
                    "kept_by_source": self.by_source, "left_out": self.left_out, "refused": self.refused,
                    "repeated": self.repeated}  # fmt: skip
        for name, counter in counters.items():
            report[name] = dict(sorted(counter.items(), key=lambda one: (-one[1], one[0])))
        if self.option_columns:
            report["fewer_options_than_columns"] = self.fewer_options
        if self.subtitled:
            report["without_subtitles"] = self.without_subtitles
        return report

    def summary(self) -> str:
        """A few lines for people: how many were kept, left out, refused and repeated, and why."""
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


def write_all(
    folder: Path,
    assigned: Iterable[Assigned | BadSample | str],
    repeats: Repeats,
    splits: Sequence[str],
    form: Format,
    tally: Tally,
) -> dict[str, int]:
    """Write and count the records of each split, ``refused.jsonl`` and ``repeated.jsonl``.

    Returns:
        The number of records in each file; an empty split has none.
    """
    writers: dict[str, ShardWriter | JsonlWriter] = {}
    with replacing(folder / REFUSED, durable=False) as refused, replacing(folder / REPEATED, durable=False) as repeated:
        for one in assigned:
            if isinstance(one, str):
                tally.left_out[one] += 1
                continue
            if isinstance(one, Assigned):
                fault = _write(one, writers, folder, form)
                if fault is None:
                    tally.keep(one.split, one.sample, one.facts)
                    if repeat := repeats.of(one.sample, one.facts):
                        tally.repeat(repeat)
                        repeated.write((json.dumps(asdict(repeat)) + "\n").encode())
                    continue
                one = fault
            tally.refuse(one)
            refused.write(line_of(one))
    ordered = [writers[split] for split in splits if split in writers]
    files = {name: count for writer in ordered for name, count in writer.close().items()}
    return {**files, REFUSED: sum(tally.refused.values()), REPEATED: sum(tally.repeated.values())}


def _write(one: Assigned, writers: dict[str, Any], folder: Path, form: Format) -> BadSample | None:
    """Write a record, the first of its split into a new file; one that this format cannot hold is refused."""
    try:
        record = to_row(one.sample) if form == "parquet" else one.sample
    except SampleError as fault:
        return BadSample(one.sample.sample_id, fault.reason, str(fault), one.sample.where)
    if one.split not in writers:
        writers[one.split] = (ShardWriter if form == "parquet" else JsonlWriter)(folder, one.split)
    writers[one.split].add(record)
    return None


class JsonlWriter:
    """Writes a split as one file of JSON lines; see ``ShardWriter``."""

    def __init__(self, folder: Path, split: str):
        self._path, self._count = folder / f"{split}.jsonl", 0
        self._file = self._path.open("wb")

    def add(self, record: Sample) -> None:
        self._file.write(line_of_record(record))
        self._count += 1

    def close(self) -> dict[str, int]:
        self._file.close()
        return {self._path.name: self._count}
