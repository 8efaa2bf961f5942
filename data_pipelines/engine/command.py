"""The command of a pipeline: arguments, and the way from annotation files to a prepared folder."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from data_pipelines.engine.annotation_files import (
    MANY_FILES,
    count_rows,
    details_of,
    inputs_of,
    refuse_changed,
    sources_of,
)
from data_pipelines.engine.arguments import Arguments, parse
from data_pipelines.engine.dataset import DataSet
from data_pipelines.engine.judging import Rules, Source, Verdict, judge_all
from data_pipelines.engine.media_check import MediaLook
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
from data_pipelines.engine.report import Tally, check_all_judged, check_outcome, tell_prepared, write_summary
from data_pipelines.engine.resume import Doubt, Spool, remove_left
from data_pipelines.engine.splits import REFUSED, REPEATED, Repeats, Splitter, write_all
from vlm_pg.data.dedup import Ledger
from vlm_pg.data.manifest import MANIFEST
from vlm_pg.data.prepared import SCHEMA_VERSION
from vlm_pg.errors import ConfigError, VlmPgError
from vlm_pg.files import write_json_atomic


def prepare(
    dataset: DataSet,
    description: str,
    argv: Sequence[str] | None,
    recipe: tuple[str, tuple[Any, ...]] | None = None,
) -> int:
    """Prepare a data set, or do nothing if it is there already. Returns the exit code.

    Rows are judged in parts, then their media are looked at. What is known stays on disk until the set is written: a
    run that was killed goes on where it stopped. What is written depends on the files and arguments alone, not on the
    number of processes.

    Args:
        dataset: its description.
        description: what ``--help`` says of it.
        argv: the command's arguments.
        recipe: how processes find the description (``Rules.recipe``); by default it is what its module calls NAME.

    Raises:
        ConfigError: wrong arguments or files, too many media that are not there.
        VlmPgError: the disk is full, a process was killed; the same command goes on.
    """
    arguments = parse(dataset, description, argv)
    for unread in arguments.unread:
        print(f"Not read: {unread}.", flush=True)
    sources = sources_of(dataset, arguments)
    inputs = inputs_of(dataset, sources, arguments)
    look = MediaLook.of(dataset, arguments)
    identity = _identity(inputs, look, arguments)
    out = arguments.out
    recipe = recipe or (f"data_pipelines.{dataset.name}:{dataset.name.upper()}", ())
    with holding(out):
        found = None if arguments.overwrite else find_prepared(out, identity)
        if found is not None:
            remove_left(out)
            settle(out)
            tell_prepared(out, found, arguments.max_missing_share)
            return 0
        refuse_foreign(out, _to_write(arguments))
        try:
            rules = _rules(dataset, arguments, recipe)
            tally, files = _prepare(dataset, sources, arguments, rules, look, inputs, identity)
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
        print(f"Train with: {_settings(dataset, arguments)}")
    if tally.counts["eval"]:
        print(f"Evaluate with: {_eval_settings(dataset, arguments)}")
    else:
        cause = "in the files of --eval is left" if arguments.eval else f"is in --eval-share {arguments.eval_share:g}"
        print(f"There is no eval split: no record {cause}. Give --eval FILE, or raise --eval-share.")
    return 0


def is_prepared(dataset: DataSet, description: str, argv: Sequence[str] | None) -> bool:
    """Whether the set is there already, as these arguments ask for it, so that ``prepare`` would do nothing."""
    arguments = parse(dataset, description, argv)
    inputs = inputs_of(dataset, sources_of(dataset, arguments), arguments)
    identity = _identity(inputs, MediaLook.of(dataset, arguments), arguments)
    try:
        return not arguments.overwrite and find_prepared(arguments.out, identity) is not None
    except ConfigError:  # with other arguments, or its files were changed
        return False


def _identity(inputs: Mapping[str, Any], look: MediaLook, arguments: Arguments) -> dict[str, Any]:
    """What a prepared set depends on."""
    return {
        **inputs,
        **look.identity,
        "eval_share": arguments.eval_share,
        "seed": arguments.seed,
        "format": arguments.format,
    }


def _prepare(
    dataset: DataSet,
    sources: Sequence[Source],
    arguments: Arguments,
    rules: Rules,
    look: MediaLook,
    inputs: Mapping[str, Any],
    identity: Mapping[str, Any],
) -> tuple[Tally, dict[str, int]]:
    out = arguments.out
    spool = Spool(out, fingerprint({**inputs, "program": program()}), arguments.overwrite)
    print(f"Counting the rows of {len(sources)} file(s)", flush=True)
    rows, only_folder = count_rows(dataset, sources)
    rules = replace(rules, only_folder=only_folder)
    if rules.media_root is not None:
        finder = MediaFinder(rules.media_root, dataset, only_folder)
        if again := spool.forget(Doubt(rules.media_root, finder)):
            print(f"Media were not there, or lie elsewhere now: {again} part(s) of the run before are judged again.")
    total = sum(rows[source.path] for source in sources)
    parts = judge_all(sources, dataset, rules, spool, total, arguments.workers)
    with ExitStack() as stack:
        knows = stack.enter_context(look.at(spool, parts))

        def verdicts() -> Iterator[Verdict]:
            return knows.with_media(spool.verdicts(parts))

        ledger = stack.enter_context(Ledger(spool.folder / "ledger.sqlite"))
        splitter = Splitter(ledger, arguments.eval_share, arguments.seed)
        splitter.note(verdicts())
        written = spool.folder / "written"
        shutil.rmtree(written, ignore_errors=True)  # of a run that was killed
        written.mkdir()
        splits = ["train", "eval"] if arguments.train else ["eval"]
        placed = splitter.placed(verdicts())
        tally = Tally(dataset.option_columns, any(dataset.forms[source.form].subtitled for source in sources))
        files = write_all(written, placed, Repeats(ledger), splits, arguments.format, tally)
        details = details_of(dataset, sources, rows)
        refuse_changed(inputs, inputs_of(dataset, sources, arguments))
        check_all_judged(tally, total, spool.totals(parts))
        check_outcome(tally, splits[0], arguments, verdicts())
        tally.tokens.title += look.shown
        write_json_atomic(written / REPORT, {**_told(dataset, arguments), **look.identity, **tally.report()})
        write_summary(written / SUMMARY, dataset.name, tally, rules.media_root, knows.pool, arguments.unread)
    refuse_foreign(out, _to_write(arguments))
    place(written, out)
    more = {"schema_version": SCHEMA_VERSION, "sources": details, **_unread(arguments), "counts": tally.report()}
    write_manifest(out, identity, files, more, beside=(REPORT, SUMMARY))
    settle(out)
    spool.remove()
    return tally, files


def _is_full(error: OSError | sqlite3.OperationalError) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return error.sqlite_errorcode == sqlite3.SQLITE_FULL


def _rules(dataset: DataSet, arguments: Arguments, recipe: tuple[str, tuple[Any, ...]]) -> Rules:
    return Rules(
        recipe,
        arguments.media_root if dataset.media is not None else None,
        not arguments.skip_media_check,
        tuple(arguments.data_types),
        tuple(arguments.answer_kinds),
        tuple(arguments.sources),
    )


def _to_write(arguments: Arguments) -> list[str]:
    """Names in the output folder of what will be written there, and of shards that would not go with those."""
    names = [MANIFEST, REPORT, SUMMARY, REFUSED, REPEATED, MISSING]
    for split in ("train", "eval"):
        shards = arguments.out.glob(f"{split}-?????-of-?????.parquet")
        names += [path.name for path in shards] if arguments.format == "parquet" else [f"{split}.jsonl"]
    return names


def _told(dataset: DataSet, arguments: Arguments) -> dict[str, Any]:
    """How the report begins."""
    told: dict[str, Any] = {"pipeline": dataset.name}
    for split, paths in (("train_files", arguments.train), ("eval_files", arguments.eval)):
        told[split] = [str(path) for path in paths[:MANY_FILES]]
    told |= _unread(arguments)
    return told | ({"media_root": str(arguments.media_root)} if dataset.media is not None else {})


def _unread(arguments: Arguments) -> dict[str, Any]:
    return {"unread_files": [one.told() for one in arguments.unread]}


def _settings(dataset: DataSet, arguments: Arguments) -> str:
    out = arguments.out
    train = f"{out}:train" if arguments.format == "parquet" else os.fspath(out / "train.jsonl")
    media = f" data.media_root={arguments.media_root.resolve()}" if dataset.media is not None else ""
    return f"data.train={train}{media}"


def _eval_settings(dataset: DataSet, arguments: Arguments) -> str:
    name, out = dataset.name, arguments.out
    records = f"{out}:eval" if arguments.format == "parquet" else os.fspath(out / "eval.jsonl")
    media = f" data.media_root.{name}={arguments.media_root.resolve()}" if dataset.media is not None else ""
    return f"data.eval.{name}={records}{media}"
