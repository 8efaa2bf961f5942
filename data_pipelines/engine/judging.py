"""Rows to verdicts: samples, refusals and rows that filters skip; in several processes where there are many."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from data_pipelines.engine.dataset import DataSet, Split
from data_pipelines.engine.media_finder import MISSING_MEDIA, MediaFinder, MissingMedia
from data_pipelines.engine.resume import Spool, Verdict
from data_pipelines.engine.rows import MediaStore, RowReader, SkippedRow
from vlm_pg.data.dedup import path_key, text_key
from vlm_pg.data.files import RecordLocation, root_of
from vlm_pg.errors import SampleError
from vlm_pg.media.paths import resolve
from vlm_pg.processes import outlive_signals
from vlm_pg.progress import Bar
from vlm_pg.rewards import Rewarder, RewardSettings
from vlm_pg.rewards.rewarder import gold_faults
from vlm_pg.rewards.settings import CheckerSettings
from vlm_pg.types import BadSample, Sample

DATA_TYPES = ("image", "video", "mixed", "text")
PART_ROWS = 256
# Fewer are judged before processes have started.
_FEW_PARTS = 8


@dataclass(frozen=True)
class AnnotationFile:
    """One annotation file: index of its form, prefix of its rows' names, and split."""

    path: Path
    form: int
    name: str
    split: Split


@dataclass(frozen=True)
class Part:
    """Rows of one file that are judged together. ``number`` counts the parts of all files from 0."""

    number: int
    source: AnnotationFile
    rows: Sequence[tuple[RecordLocation, Any]]


@dataclass(frozen=True)
class Rules:
    """How questions are judged.

    Args:
        recipe: where processes find the data set's description: ``module:NAME``, and arguments of a function.
        media_root: folder of the media; None for a set without.
        check_media: check that they exist.
        data_types, answer_kinds, sources: filters; empty ``sources``: all.
        only_folder: see ``MediaFinder``.
    """

    recipe: tuple[str, tuple[Any, ...]]
    media_root: Path | None
    check_media: bool
    data_types: tuple[str, ...]
    answer_kinds: tuple[str, ...]
    sources: tuple[str, ...]
    only_folder: str | None = None


def dataset_of(recipe: tuple[str, tuple[Any, ...]]) -> DataSet:
    """The description that a recipe names."""
    path, arguments = recipe
    module, _, name = path.partition(":")
    found = getattr(importlib.import_module(module), name)
    return found if isinstance(found, DataSet) else found(*arguments)


class Judge:
    """Judges parts one after the other; a context manager."""

    def __init__(self, rules: Rules):
        self._rules, self._dataset = rules, dataset_of(rules.recipe)
        root = rules.media_root
        self._finder = None if root is None else MediaFinder(root, self._dataset, rules.only_folder)
        self._missing = None if self._finder is None else MissingMedia(self._finder)
        self._store = None if root is None else MediaStore(root)
        self._rewarder = Rewarder(RewardSettings(checker=CheckerSettings(workers=1)))

    def __enter__(self) -> Judge:
        self._rewarder.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._rewarder.__exit__(*error)

    def judge(self, part: Part) -> list[Verdict]:
        """The outcome of each question of a part, in order."""
        source, finder = part.source, self._finder
        reader = RowReader(self._dataset, self._dataset.forms[source.form], finder, self._store, root_of(source.path))
        verdicts: list[Verdict] = []
        if finder is not None:
            finder.queries.clear()
        for location, row in part.rows:
            for one in reader.samples(row, f"{source.name}-{location.key}", location.within(source.path)):
                verdict = self._parsed(source.split, one)
                verdicts.append(verdict if finder is None else replace(verdict, found=finder.take_found()))
        parsed = [(index, one.sample) for index, one in enumerate(verdicts) if one.sample is not None]
        gold = gold_faults([sample for _, sample in parsed], self._rewarder)
        for (index, sample), gold_fault in zip(parsed, gold, strict=True):
            if (fault := self._media_fault(sample) or gold_fault) is not None:
                bad = BadSample(sample.sample_id, fault.reason, str(fault), sample.where)
                verdicts[index] = replace(verdicts[index], sample=None, refused=bad)
        return verdicts

    def _parsed(self, split: Split, one: Sample | BadSample | SkippedRow) -> Verdict:
        if isinstance(one, BadSample):
            return Verdict(split, refused=one)
        if isinstance(one, SkippedRow):
            return Verdict(split, skipped=one.reason)
        # Filters come first: questions that are filtered out need not be right.
        filters = (
            ("data type", data_type(one), self._rules.data_types),
            ("answer kind", one.answer_kind, self._rules.answer_kinds),
            ("source", one.source, self._rules.sources or (one.source,)),
        )
        for what, value, wanted in filters:
            if value not in wanted:
                return Verdict(split, skipped=f"{what} {value}")
        return Verdict(split, sample=one, keys=split_keys(one))

    def _media_fault(self, sample: Sample) -> SampleError | None:
        root = self._rules.media_root
        if root is None or not self._rules.check_media:
            return None
        for ref in sample.media:
            try:
                resolve(ref, root)
            except SampleError as fault:
                if fault.reason != MISSING_MEDIA or self._finder is None or ref.path not in self._finder.queries:
                    return fault
                assert self._missing is not None
                return self._missing.fault(ref.path)
        return None


def data_type(sample: Sample) -> str:
    """image, video, mixed or text."""
    kinds = {ref.kind for ref in sample.media}
    return "text" if not kinds else "mixed" if len(kinds) == 2 else kinds.pop()


def split_keys(sample: Sample) -> tuple[str, ...]:
    """What must not be in both splits, in normalized spelling: the media, or without media the question."""
    return tuple(path_key(ref.path) for ref in sample.media) or (text_key(sample.question),)


def judge_all(
    sources: Sequence[AnnotationFile], dataset: DataSet, rules: Rules, spool: Spool, total_rows: int, workers: int
) -> int:
    """Judge the parts that the spool lacks. Returns the number of all parts.

    Args:
        total_rows: of all files, for the progress bar.
        workers: processes; at most one: this one.

    Raises:
        ConfigError: an annotation file cannot be read, or media cannot be written.
        BrokenProcessPool: a process was killed.
    """
    count = 0
    with Bar("Checking records", total_rows) as bar:

        def missing() -> Iterator[Part]:
            """The rows of all files in runs of ``PART_ROWS``, whatever the number of processes."""
            nonlocal count
            for source in sources:
                rows = dataset.forms[source.form].rows(source.path)
                while some := list(islice(rows, PART_ROWS)):
                    if spool.has(count, len(some)):
                        bar.advance(len(some), redone=False)
                    else:
                        yield Part(count, source, some)
                    count += 1

        def keep(part: Part, verdicts: list[Verdict]) -> None:
            spool.write(part.number, len(part.rows), verdicts)
            bar.advance(len(part.rows))

        if workers > 1 and total_rows > _FEW_PARTS * PART_ROWS:
            _judge_in_processes(missing(), rules, workers, keep)
        else:
            with Judge(rules) as judge:
                for part in missing():
                    keep(part, judge.judge(part))
    return count


def _judge_in_processes(
    parts: Iterator[Part], rules: Rules, workers: int, keep: Callable[[Part, list[Verdict]], None]
) -> None:
    """Only as many parts are read ahead as keep all processes busy."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start_worker, (rules,)) as pool:
        waiting: dict[Future[list[Verdict]], Part] = {}
        try:
            while True:
                for part in islice(parts, 2 * workers - len(waiting)):
                    waiting[pool.submit(_judge_in_worker, part)] = part
                if not waiting:
                    return
                for done in wait(waiting, return_when=FIRST_COMPLETED).done:
                    keep(waiting.pop(done), done.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_worker_judge: Judge | None = None


def _start_worker(rules: Rules) -> None:
    """Ctrl-C is for the parent; a worker ends with it."""
    global _worker_judge
    outlive_signals()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker_judge = Judge(rules).__enter__()


def _end_with_parent() -> None:
    """The pool's own queue would wait forever: its workers hold both of its ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _judge_in_worker(part: Part) -> list[Verdict]:
    assert _worker_judge is not None
    return _worker_judge.judge(part)
