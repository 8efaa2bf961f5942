"""From verdicts to record files: split by media content, duplicates, writing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from data_pipelines.engine.judging import Verdict
from vlm_pg.data.bad import line_of
from vlm_pg.data.dedup import Ledger, path_key, text_key
from vlm_pg.data.prepared import ShardWriter, to_row
from vlm_pg.data.records import line_of_record
from vlm_pg.errors import SampleError, printable
from vlm_pg.files import replacing
from vlm_pg.types import BadSample, Sample

if TYPE_CHECKING:
    from data_pipelines.engine.report import Tally
    from vlm_pg.media.decode_file import MediaFacts

Format = Literal["parquet", "jsonl"]
REFUSED, REPEATED = "refused.jsonl", "repeated.jsonl"


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
            if one.refused is not None:
                yield one.refused
            elif one.sample is None:
                yield one.skipped
            elif not self._ledger.add(f"ids of {one.split}", one.sample.sample_id, one.sample.where):
                yield self._duplicate_id(one.split, one.sample)
            else:
                yield self._assigned(one, one.sample)

    def _duplicate_id(self, split: str, sample: Sample) -> BadSample:
        name, first = printable(sample.sample_id, 200), self._ledger.look(f"ids of {split}", sample.sample_id)
        message = (
            f"the id '{name}' was used before, at {first}. Each row needs its own. Give each file once; where ids "
            "begin anew in each file, or in each row's list of questions, number them through, or leave the ids out."
        )
        return BadSample(sample.sample_id, "duplicate_id", message, sample.where)

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

    def line(self) -> bytes:
        """Its line in ``repeated.jsonl``."""
        return (json.dumps(asdict(self), ensure_ascii=True) + "\n").encode()


class Repeats:
    """Finds duplicates by text, options, and content and part of the media, whatever file names and blanks."""

    def __init__(self, ledger: Ledger):
        self._ledger = ledger

    def of(self, sample: Sample, facts: Sequence[MediaFacts]) -> Repeat | None:
        """The duplicate that a question is; None for a new one, which is remembered."""
        contents = [one.content for one in facts] or [path_key(ref.path) for ref in sample.media]
        parts = [
            (ref.kind, ref.folder_fps, ref.start, ref.end, ref.times, path_key(ref.subtitles)) for ref in sample.media
        ]
        texts = [text_key(text) for text in (sample.question, *sample.options)]
        asked = _digest([texts, contents, parts])
        answer = _digest([sample.answer_kind, sample.answer])
        if self._ledger.add("asked", asked, f"{answer} {sample.sample_id}"):
            return None
        first_answer, _, first = (self._ledger.look("asked", asked) or "").partition(" ")
        return Repeat(sample.sample_id, first, "same" if answer == first_answer else "other", sample.where)


def _digest(values: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


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
                        repeated.write(repeat.line())
                    continue
                one = fault
            tally.refuse(one)
            refused.write(line_of(one).encode(errors="backslashreplace"))
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
        self._temporary = folder / f".{split}.jsonl.tmp"
        self._file = self._temporary.open("wb")

    def add(self, record: Sample) -> None:
        self._file.write(line_of_record(record))
        self._count += 1

    def close(self) -> dict[str, int]:
        self._file.close()
        self._temporary.replace(self._path)
        return {self._path.name: self._count}
