"""The command of a pipeline: arguments, and the way from annotation files to a prepared folder."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from data_pipelines.engine import annotation_files
from data_pipelines.engine.annotation_files import inputs_of, sources_of
from data_pipelines.engine.arguments import Arguments, parse
from data_pipelines.engine.dataset import DataSet
from data_pipelines.engine.judging import Rules, Source, Verdict, judge_all
from data_pipelines.engine.media_check import MediaCheck
from data_pipelines.engine.media_finder import MediaFinder
from data_pipelines.engine.output_folder import (
    MISSING,
    REPORT,
    SUMMARY,
    find_prepared,
    fingerprint,
    holding,
    place,
    program,
    refuse_foreign,
    settle,
    write_manifest,
)
from data_pipelines.engine.report import Tally, check_all_judged, check_outcome, print_prepared, write_summary
from data_pipelines.engine.resume import Spool, StaleVerdicts, remove_parts
from data_pipelines.engine.splits import REFUSED, REPEATED, Repeats, Splitter, write_all
from vlm_pg.data.dedup import Ledger
from vlm_pg.data.prepared import MANIFEST, SCHEMA_VERSION
from vlm_pg.errors import ConfigError, VlmPgError
from vlm_pg.files import write_json_atomic


def pipeline(dataset: DataSet, description: str | None) -> Callable[..., int]:
    """The ``main`` of a data set's module. ``description``: its docstring, for ``--help``."""
    return partial(prepare, dataset, description or "")


def prepare(
    dataset: DataSet,
    description: str,
    argv: Sequence[str] | None = None,
    recipe: tuple[str, tuple[Any, ...]] | None = None,
) -> int:
    """Prepare a data set, or do nothing if it is there already. Returns the exit code.

    Rows are judged in parts, then their media are probed. Results stay on disk until the set is written: a killed run
    continues where it stopped. The output depends on the files and arguments alone, not on the number of processes.

    Args:
        recipe: how processes find the description (``Rules.recipe``); by default NAME in its module.

    Raises:
        ConfigError: wrong arguments or files, too many missing media.
        VlmPgError: the disk is full, a process was killed; the same command continues.
    """
    arguments = parse(dataset, description, argv)
    for unread in arguments.unread:
        print(f"Not read: {unread}.", flush=True)
    sources = sources_of(dataset, arguments)
    inputs = inputs_of(dataset, sources, arguments)
    check = MediaCheck.of(dataset, arguments)
    identity = _identity(inputs, check, arguments)
    out = arguments.out
    recipe = recipe or (f"data_pipelines.{dataset.name}:{dataset.name.upper()}", ())
    with holding(out):
        found = None if arguments.overwrite else find_prepared(out, identity)
        if found is not None:
            remove_parts(out)
            settle(out)
            print_prepared(out, found, arguments.max_missing_share)
            return 0
        refuse_foreign(out, _output_names(arguments))
        media_root = arguments.media_root if dataset.media is not None else None
        rules = Rules(
            recipe,
            media_root,
            not arguments.skip_media_check,
            tuple(arguments.data_types),
            tuple(arguments.answer_kinds),
            tuple(arguments.sources),
        )
        try:
            tally, files = _prepare(dataset, sources, arguments, rules, check, inputs, identity)
        except (OSError, sqlite3.OperationalError) as error:
            if not _is_full(error):
                raise
            raise VlmPgError(
                f"The disk of '{getattr(error, 'filename', None) or out}' is full: {error}. What was finished is kept. "
                "Make room, and give the same command again: it goes on."
            ) from error
        except BrokenProcessPool as error:
            raise VlmPgError(
                "A process that checks records was killed, by a lack of memory most likely. What was finished is kept. "
                "Give the same command again, with fewer --workers: it goes on."
            ) from error
    print(tally.summary())
    print(f"Wrote {', '.join(files)} to {out}; {out / SUMMARY} shows them.")
    if arguments.train:
        print(f"Train with: data.train={_records(arguments, 'train')}{_media_setting(rules, '')}")
    if tally.counts["eval"]:
        name = dataset.name
        print(f"Evaluate with: data.eval.{name}={_records(arguments, 'eval')}{_media_setting(rules, f'.{name}')}")
    else:
        cause = "in the files of --eval is left" if arguments.eval else f"is in --eval-share {arguments.eval_share:g}"
        print(f"There is no eval split: no record {cause}. Give --eval FILE, or raise --eval-share.")
    return 0


def _records(arguments: Arguments, split: str) -> str:
    return f"{arguments.out}:{split}" if arguments.format == "parquet" else os.fspath(arguments.out / f"{split}.jsonl")


def _media_setting(rules: Rules, name: str) -> str:
    return "" if rules.media_root is None else f" data.media_root{name}={rules.media_root.resolve()}"


def is_prepared(dataset: DataSet, description: str, argv: Sequence[str] | None) -> bool:
    """Whether ``prepare`` with these arguments would do nothing, because the set is there already."""
    arguments = parse(dataset, description, argv)
    inputs = inputs_of(dataset, sources_of(dataset, arguments), arguments)
    identity = _identity(inputs, MediaCheck.of(dataset, arguments), arguments)
    try:
        return not arguments.overwrite and find_prepared(arguments.out, identity) is not None
    except ConfigError:  # with other arguments, or its files were changed
        return False


def _identity(inputs: Mapping[str, Any], check: MediaCheck, arguments: Arguments) -> dict[str, Any]:
    """Everything that a prepared set depends on."""
    names = ("eval_share", "seed", "format")
    return {**inputs, **check.identity, **{name: getattr(arguments, name) for name in names}}


def _prepare(
    dataset: DataSet,
    sources: Sequence[Source],
    arguments: Arguments,
    rules: Rules,
    check: MediaCheck,
    inputs: Mapping[str, Any],
    identity: Mapping[str, Any],
) -> tuple[Tally, dict[str, int]]:
    out = arguments.out
    spool = Spool(out, fingerprint({**inputs, "program": program()}), arguments.overwrite)
    print(f"Counting the rows of {len(sources)} file(s)", flush=True)
    rows, only_folder = annotation_files.count_rows(dataset, sources)
    rules = replace(rules, only_folder=only_folder)
    if rules.media_root is not None:
        is_stale = StaleVerdicts(MediaFinder(rules.media_root, dataset, only_folder))
        if again := spool.forget(is_stale):
            print(f"Media were not there, or lie elsewhere now: {again} part(s) of the run before are judged again.")
    total = sum(rows[source.path] for source in sources)
    parts = judge_all(sources, dataset, rules, spool, total, arguments.workers)
    with ExitStack() as stack:
        media = stack.enter_context(check.probed(spool, parts))

        def verdicts() -> Iterator[Verdict]:
            return media.with_facts(spool.verdicts(parts))

        ledger = stack.enter_context(Ledger(spool.folder / "ledger.sqlite"))
        splitter = Splitter(ledger, arguments.eval_share, arguments.seed)
        splitter.note(verdicts())
        written = spool.folder / "written"
        shutil.rmtree(written, ignore_errors=True)  # of a killed run
        written.mkdir()
        splits = ["train", "eval"] if arguments.train else ["eval"]
        assigned = splitter.assign(verdicts())
        tally = Tally(dataset.option_columns, any(dataset.forms[source.form].subtitled for source in sources))
        files = write_all(written, assigned, Repeats(ledger), splits, arguments.format, tally)
        details = annotation_files.details_of(dataset, sources, rows)
        annotation_files.refuse_changed(inputs, inputs_of(dataset, sources, arguments))
        check_all_judged(tally, total, spool.totals(parts))
        check_outcome(tally, splits[0], arguments, verdicts())
        tally.tokens.title += check.shown
        unread = {"unread_files": [one.as_json() for one in arguments.unread]}
        report: dict[str, Any] = {"pipeline": dataset.name}
        for split, paths in (("train_files", arguments.train), ("eval_files", arguments.eval)):
            report[split] = [str(path) for path in paths[: annotation_files.MANY_FILES]]
        report |= unread | ({} if rules.media_root is None else {"media_root": str(rules.media_root)})
        write_json_atomic(written / REPORT, {**report, **check.identity, **tally.report()})
        write_summary(written / SUMMARY, dataset.name, tally, rules.media_root, media.pool, arguments.unread)
    refuse_foreign(out, _output_names(arguments))
    place(written, out)
    more = {"schema_version": SCHEMA_VERSION, "sources": details, **unread, "counts": tally.report()}
    write_manifest(out, identity, files, more, beside=(REPORT, SUMMARY))
    settle(out)
    spool.remove()
    return tally, files


def _is_full(error: OSError | sqlite3.OperationalError) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return error.sqlite_errorcode == sqlite3.SQLITE_FULL


def _output_names(arguments: Arguments) -> list[str]:
    """Names in the output folder that will be written, and of shards that would not belong to those."""
    names = [MANIFEST, REPORT, SUMMARY, REFUSED, REPEATED, MISSING]
    for split in ("train", "eval"):
        shards = arguments.out.glob(f"{split}-?????-of-?????.parquet")
        names += [path.name for path in shards] if arguments.format == "parquet" else [f"{split}.jsonl"]
    return names
