"""All parts of the annotation files judged, by several processes where there are many, and spooled."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import islice

from data_pipelines.engine.dataset import DataSet
from data_pipelines.engine.judging import Judge, Part, Rules, Source, Verdict
from data_pipelines.engine.progress import Bar
from data_pipelines.engine.spool import Spool
from vlm_pg.processes import outlive_signals

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
