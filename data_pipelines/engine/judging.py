"""Rows to verdicts: samples, refusals and rows that filters leave out; in several processes where there are many."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_pipelines.engine.dataset import DataSet, Split
from data_pipelines.engine.media_finder import REASON, Found, MediaFinder, Missing
from data_pipelines.engine.rows import LeftOut, MediaStore, RowReader
from vlm_pg.data.dedup import path_key, text_key
from vlm_pg.data.files import RecordPlace, root_of
from vlm_pg.errors import SampleError
from vlm_pg.media.paths import resolve
from vlm_pg.processes import outlive_signals
from vlm_pg.progress import Bar
from vlm_pg.rewards import Rewarder, RewardSettings
from vlm_pg.rewards.gold import gold_faults
from vlm_pg.rewards.settings import CheckerSettings
from vlm_pg.types import BadSample, Sample

if TYPE_CHECKING:
    from data_pipelines.engine.resume import Spool
    from vlm_pg.media.probe import MediaFacts


DATA_TYPES = ("image", "video", "mixed", "text")


@dataclass(frozen=True)
class Source:
    """One annotation file: which of the data set's forms it is of, what its rows are named after, its split."""

    path: Path
    form: int
    name: str
    split: Split


@dataclass(frozen=True)
class Part:
    """Some rows of one file, which are judged together. ``number`` counts the parts of all files from 0."""

    number: int
    source: Source
    rows: Sequence[tuple[RecordPlace, Any]]


@dataclass(frozen=True)
class Verdict:
    """What became of one question: one of ``sample``, ``refused`` and ``left_out`` (why) is there.

    ``keys``: what must not be in training and evaluation, of questions that were read, refused ones too: their media's
    paths, or without media the question. ``facts``: of a sample's media, once they were looked at. ``found``: where its
    media lay, and what was asked for.
    """

    split: Split
    sample: Sample | None = None
    refused: BadSample | None = None
    left_out: str = ""
    keys: tuple[str, ...] = ()
    facts: tuple[MediaFacts, ...] = ()
    found: tuple[Found, ...] = ()


@dataclass(frozen=True)
class Rules:
    """By which questions are judged.

    Args:
        recipe: where the data set's description is found, ``module:NAME``, and arguments where that is a function.
        media_root: folder of the media; None for a set without.
        check_media: look whether they are there.
        data_types, answer_kinds, sources: what is kept; empty ``sources``: all.
        only_folder: the one folder that all rows' media are in; see ``MediaFinder``.
    """

    recipe: tuple[str, tuple[Any, ...]]
    media_root: Path | None
    check_media: bool
    data_types: tuple[str, ...]
    answer_kinds: tuple[str, ...]
    sources: tuple[str, ...]
    only_folder: str | None = None


def dataset_of(recipe: tuple[str, tuple[Any, ...]]) -> DataSet:
    """The description that a recipe leads to."""
    place, arguments = recipe
    module, _, name = place.partition(":")
    found = getattr(importlib.import_module(module), name)
    return found if isinstance(found, DataSet) else found(*arguments)


class Judge:
    """Judges parts, one after the other. Use it as a context manager."""

    def __init__(self, rules: Rules):
        self._rules, self._dataset = rules, dataset_of(rules.recipe)
        root = rules.media_root
        self._finder = None if root is None else MediaFinder(root, self._dataset, rules.only_folder)
        self._missing = None if root is None else Missing(root, self._dataset, rules.only_folder)
        self._store = None if root is None else MediaStore(root)
        self._rewarder = Rewarder(RewardSettings(checker=CheckerSettings(workers=1)))

    def __enter__(self) -> Judge:
        self._rewarder.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._rewarder.__exit__(*error)

    def judge(self, part: Part) -> list[Verdict]:
        """What becomes of each question of a part, in order."""
        source = part.source
        reader = RowReader(self._dataset.forms[source.form], self._finder, self._store, root_of(source.path))
        found: list[Verdict] = []
        finder = self._finder
        if finder is not None:
            finder.asked.clear()
        for place, row in part.rows:
            for one in reader.samples(row, f"{source.name}-{place.key}", place.within(source.path)):
                verdict = self._read(source.split, one)
                found.append(verdict if finder is None else replace(verdict, found=finder.latest()))
        return self._checked(found)

    def _read(self, split: Split, one: Sample | BadSample | LeftOut) -> Verdict:
        """What is known of a question before it is checked."""
        if isinstance(one, BadSample):
            return Verdict(split, refused=one)
        if left_out := one.why if isinstance(one, LeftOut) else self._filtered_by(one):
            return Verdict(split, left_out=left_out)
        assert isinstance(one, Sample)
        return Verdict(split, sample=one, keys=split_keys(one))

    def _filtered_by(self, sample: Sample) -> str:
        """The filter that leaves a sample out. Filters come first: what nobody asked for need not be right."""
        if data_type(sample) not in self._rules.data_types:
            return f"data type {data_type(sample)}"
        if sample.answer_kind not in self._rules.answer_kinds:
            return f"answer kind {sample.answer_kind}"
        if self._rules.sources and sample.source not in self._rules.sources:
            return f"source {sample.source}"
        return ""

    def _checked(self, verdicts: Sequence[Verdict]) -> list[Verdict]:
        samples = [one.sample for one in verdicts if one.sample is not None]
        faults = iter(gold_faults(samples, self._rewarder))
        checked = []
        for one in verdicts:
            if one.sample is None:
                checked.append(one)
                continue
            gold_fault = next(faults)
            fault = self._media_fault(one.sample) or gold_fault
            if fault is not None:
                bad = BadSample(one.sample.sample_id, fault.reason, str(fault), one.sample.where)
                one = replace(one, sample=None, refused=bad)
            checked.append(one)
        return checked

    def _media_fault(self, sample: Sample) -> SampleError | None:
        root = self._rules.media_root
        if root is None or not self._rules.check_media:
            return None
        for ref in sample.media:
            try:
                resolve(ref, root)
            except SampleError as fault:
                return self._explained(fault, ref.path)
        return None

    def _explained(self, fault: SampleError, path: str) -> SampleError:
        """A medium's fault, with where it was looked for if it is not there."""
        finder, missing = self._finder, self._missing
        if fault.reason != REASON or finder is None or missing is None or path not in finder.asked:
            return fault
        return missing.fault(path, finder.asked[path], finder.looked_in())


def data_type(sample: Sample) -> str:
    """image, video, mixed or text."""
    kinds = {ref.kind for ref in sample.media}
    return "text" if not kinds else "mixed" if len(kinds) == 2 else kinds.pop()


def split_keys(sample: Sample) -> tuple[str, ...]:
    """What must not be in both splits: the media, or without media the question itself, however they are spelled."""
    return tuple(path_key(ref.path) for ref in sample.media) or (text_key(sample.question),)


PART_ROWS = 256
# Fewer are judged before processes have started.
_FEW_PARTS = 8


def parts_of(sources: Sequence[Source], dataset: DataSet) -> Iterator[Part]:
    """The rows of all files in runs of ``PART_ROWS``, whatever the number of processes."""
    number = 0
    for source in sources:
        rows = dataset.forms[source.form].rows(source.path)
        while some := list(islice(rows, PART_ROWS)):
            yield Part(number, source, some)
            number += 1


def judge_all(
    sources: Sequence[Source], dataset: DataSet, rules: Rules, spool: Spool, total_rows: int, workers: int
) -> int:
    """Judge what the spool does not have. Returns the number of parts.

    Args:
        total_rows: of all files, for the bar.
        workers: processes; at most one: this one.

    Raises:
        ConfigError: an annotation file cannot be read, or media cannot be written.
        BrokenProcessPool: a process was killed.
    """
    count = 0
    with Bar("Checking records", total_rows) as bar:

        def missing() -> Iterator[Part]:
            nonlocal count
            for part in parts_of(sources, dataset):
                count += 1
                if spool.has(part.number, len(part.rows)):
                    bar.advance(len(part.rows), redone=False)
                else:
                    yield part

        if workers > 1 and total_rows > _FEW_PARTS * PART_ROWS:
            _judge_in_processes(missing(), rules, spool, bar, workers)
        else:
            with Judge(rules) as judge:
                for part in missing():
                    spool.write(part.number, len(part.rows), judge.judge(part))
                    bar.advance(len(part.rows))
    return count


def _judge_in_processes(parts: Iterator[Part], rules: Rules, spool: Spool, bar: Bar, workers: int) -> None:
    """No more parts are read than processes have use for."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _begin, (rules,)) as pool:
        waiting: dict[Future[list[Verdict]], Part] = {}
        try:
            while True:
                for part in islice(parts, 2 * workers - len(waiting)):
                    waiting[pool.submit(_judge, part)] = part
                if not waiting:
                    return
                for done in wait(waiting, return_when=FIRST_COMPLETED).done:
                    part = waiting.pop(done)
                    spool.write(part.number, len(part.rows), done.result())
                    bar.advance(len(part.rows))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_judge_here: Judge | None = None


def _begin(rules: Rules) -> None:
    """In a new process: Ctrl-C is for the parent, whose end is this one's too."""
    global _judge_here
    outlive_signals()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _judge_here = Judge(rules).__enter__()


def _end_with_parent() -> None:
    """The pool's own queue would wait for ever: its workers hold both of its ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _judge(part: Part) -> list[Verdict]:
    assert _judge_here is not None
    return _judge_here.judge(part)
