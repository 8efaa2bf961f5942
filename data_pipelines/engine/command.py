"""The command of a pipeline: its arguments, and the steps from annotation files to a prepared folder."""

from __future__ import annotations

import argparse
import errno
import os
import shlex
import shutil
import sqlite3
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from data_pipelines import run
from data_pipelines.engine import annotation_files
from data_pipelines.engine.annotation_files import find_files, refuse_inside, sources_of
from data_pipelines.engine.archives import archives_below, unpack, unsupported_below, unsupported_message
from data_pipelines.engine.dataset import DataSet
from data_pipelines.engine.judging import DATA_TYPES, AnnotationFile, Rules, judge_all
from data_pipelines.engine.media_check import MediaCheck, media_settings
from data_pipelines.engine.media_finder import MediaFinder
from data_pipelines.engine.output_folder import (
    MISSING,
    REPORT,
    SUMMARY,
    find_prepared,
    fingerprint,
    locked,
    program,
    publish,
    refuse_foreign,
    settle,
    write_manifest,
)
from data_pipelines.engine.report import check_outcome, print_prepared, write_summary
from data_pipelines.engine.resume import Spool, StaleVerdicts, Verdict, remove_parts
from data_pipelines.engine.splits import REFUSED, REPEATED, Repeats, Splitter, Tally, write_all
from vlm_pg.data.dedup import Ledger
from vlm_pg.data.prepared import MANIFEST, SCHEMA_VERSION
from vlm_pg.errors import ConfigError, VlmPgError
from vlm_pg.files import write_json_atomic
from vlm_pg.types import ANSWER_KINDS

DEFAULT_EVAL_SHARE, DEFAULT_MISSING_SHARE = 0.01, 0.5
PATCHES = (28, 32)


def pipeline(dataset: DataSet, description: str | None, module: str = "") -> Callable[..., int]:
    """The ``main`` of a data set's module, which runs at once where the module is a script.

    Args:
        description: the module's docstring, for ``--help``.
        module: its ``__name__``.
    """
    main = partial(prepare, dataset, description or "")
    if module == "__main__":
        raise SystemExit(run(main))
    return main


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
    sources = sources_of(dataset, {"train": arguments.train, "eval": arguments.eval}, arguments.out)
    check = _media_check(dataset, arguments)
    inputs = _inputs(dataset, sources, arguments)
    identity = _identity(inputs, check, arguments)
    out, media_root = arguments.out, arguments.media_root if dataset.media is not None else None
    recipe = recipe or (f"data_pipelines.{dataset.name}:{dataset.name.upper()}", ())
    with locked(out, waits=False):
        if (found := None if arguments.overwrite else find_prepared(out, identity)) is not None:
            remove_parts(out)
            settle(out)
            print_prepared(out, found, arguments.max_missing_share)
            return 0
        refuse_foreign(out, _output_names(arguments))
        kinds = {name: tuple(getattr(arguments, name)) for name in ("data_types", "answer_kinds", "sources")}
        rules = Rules(recipe, media_root, not arguments.skip_media_check, **kinds, only_folder=None)
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
        print(f"Train with: {_setting(arguments, media_root, 'train', '')}")
    if tally.counts["eval"]:
        print(f"Evaluate with: {_setting(arguments, media_root, 'eval', f'.{dataset.name}')}")
    else:
        cause = "in the files of --eval is left" if arguments.eval else f"is in --eval-share {arguments.eval_share:g}"
        print(f"There is no eval split: no record {cause}. Give --eval FILE, or raise --eval-share.")
    return 0


def _prepare(
    dataset: DataSet,
    sources: Sequence[AnnotationFile],
    arguments: Namespace,
    rules: Rules,
    check: MediaCheck,
    inputs: Mapping[str, Any],
    identity: Mapping[str, Any],
) -> tuple[Tally, dict[str, int]]:
    out: Path = arguments.out
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
        annotation_files.refuse_changed(inputs, _inputs(dataset, sources, arguments))
        check_outcome(tally, splits[0], out, arguments.max_missing_share, verdicts())
        tally.tokens.title += check.shown
        unread = {"unread_files": [one.as_json() for one in arguments.unread]}
        report: dict[str, Any] = {"pipeline": dataset.name}
        for split, paths in (("train_files", arguments.train), ("eval_files", arguments.eval)):
            report[split] = [str(path) for path in paths[: annotation_files.MANY_FILES]]
        report |= unread | ({} if rules.media_root is None else {"media_root": str(rules.media_root)})
        write_json_atomic(written / REPORT, {**report, **check.identity, **tally.report()})
        write_summary(written / SUMMARY, dataset.name, tally, rules.media_root, media.pool, arguments.unread)
    refuse_foreign(out, _output_names(arguments))
    publish(written, out)
    more = {"schema_version": SCHEMA_VERSION, "sources": details, **unread, "counts": tally.report()}
    write_manifest(out, identity, files, more, beside=(REPORT, SUMMARY))
    settle(out)
    remove_parts(out)
    return tally, files


def _inputs(dataset: DataSet, sources: Sequence[AnnotationFile], arguments: Namespace) -> dict[str, Any]:
    """Everything that verdicts depend on, as JSON values; files by size and modification time."""
    inputs: dict[str, Any] = {"pipeline": dataset.name, "schema_version": SCHEMA_VERSION}
    inputs |= annotation_files.states_of(dataset, sources)
    inputs |= {name: sorted(getattr(arguments, name)) for name in ("data_types", "answer_kinds", "sources")}
    if dataset.media is not None:
        inputs["media_root"] = str(arguments.media_root.resolve())
        inputs["skip_media_check"] = arguments.skip_media_check
    return inputs


def _identity(inputs: Mapping[str, Any], check: MediaCheck, arguments: Namespace) -> dict[str, Any]:
    """Everything that a prepared set depends on."""
    names = ("eval_share", "seed", "format")
    return {**inputs, **check.identity, **{name: getattr(arguments, name) for name in names}}


def _media_check(dataset: DataSet, arguments: Namespace) -> MediaCheck:
    root = None if dataset.media is None or arguments.skip_media_check else arguments.media_root
    settings = media_settings(arguments.media, max(1, arguments.workers))
    return MediaCheck(root, settings, arguments.media, arguments.patch, arguments.decode)


def _setting(arguments: Namespace, media_root: Path | None, split: str, name: str) -> str:
    """The setting of a run that reads a split, and that of its media."""
    records = f"{arguments.out}:{split}" if arguments.format == "parquet" else arguments.out / f"{split}.jsonl"
    media = "" if media_root is None else f" data.media_root{name}={media_root.resolve()}"
    return f"data.{split}{name}={records}{media}"


def _is_full(error: OSError | sqlite3.OperationalError) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return error.sqlite_errorcode == sqlite3.SQLITE_FULL


def _output_names(arguments: Namespace) -> list[str]:
    """Names in the output folder that will be written, and of shards that would not belong to those."""
    names = [MANIFEST, REPORT, SUMMARY, REFUSED, REPEATED, MISSING]
    for split in ("train", "eval"):
        shards = arguments.out.glob(f"{split}-?????-of-?????.parquet")
        names += [path.name for path in shards] if arguments.format == "parquet" else [f"{split}.jsonl"]
    return names


def parse(dataset: DataSet, description: str, argv: Sequence[str] | None) -> Namespace:
    """The arguments with defaults filled in and files found. ``unread``: annotation files that are not read.

    Raises ConfigError: they do not go together, or name nothing.
    """
    given = _parser(dataset, description).parse_args(argv)
    given.unread = []
    given.media_root = given.media_root or given.folder or Path()
    if given.folder is not None:
        if given.train or given.eval:
            raise ConfigError(
                "A folder and --train or --eval are given. One of them is allowed: the folder that the data set "
                "unpacks to, or its files. Leave one out."
            )
        refuse_inside(given.out, [given.folder])
        if given.unpack:
            for archive in archives_below(given.folder):
                unpack(archive, log=print)
            if others := unsupported_below(given.folder):
                print(unsupported_message(others))
        found, given.unread = find_files(dataset, given.folder)
        given.train, given.eval = list(found["train"]), list(found["eval"])
    if not given.train and not given.eval:
        raise ConfigError(
            "Neither a folder nor --train nor --eval is given. The folder that the data set unpacks to, or its files, "
            "are needed. Name them."
        )
    if given.eval and given.eval_share is not None:
        raise ConfigError(
            "There are files to evaluate on, and --eval-share is given. One of them is allowed: such files, or a share "
            "of those to train on. Leave one out."
        )
    if given.eval_share is None:
        given.eval_share = 0.0 if given.eval else DEFAULT_EVAL_SHARE
    for name, most in (("eval_share", 1.0), ("max_missing_share", 1.0 + 1e-9)):
        if not 0.0 <= getattr(given, name) < most:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {getattr(given, name)}. At least 0 and less than 1 is allowed. Choose "
                "for example 0.01."
            )
    if dataset.media is not None and not given.media_root.is_dir():
        raise ConfigError(
            f"Media root '{given.media_root}' is not a folder. The folder that holds the media is expected, or an "
            "existing one for media that stand inside the rows. Correct --media-root, or create the folder: mkdir -p "
            f"{shlex.quote(str(given.media_root))}"
        )
    if given.skip_media_check and (given.decode or given.media):
        raise ConfigError(
            "--skip-media-check is given with --decode or --media. Media are looked at or not. Leave one out."
        )
    return given


def _parser(dataset: DataSet, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"vlm-pg prepare {dataset.name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    several = {"type": Path, "nargs": "+", "default": [], "metavar": "FILE"}
    add("folder", type=Path, nargs="?", help="the folder that the data set unpacks to, annotations in it")
    add("--unpack", action="store_true", help="first unpack the archives in the folder, each beside itself")
    add("--train", **several, help="instead of a folder: files, or FOLDER:split, to train on")  # type: ignore[arg-type]
    add("--eval", **several, help="the same, to evaluate on")  # type: ignore[arg-type]
    add("--out", type=Path, required=True, help="folder to write; it holds this one set")
    add("--skip-media-check", action="store_true", help="do not look whether media are there and can be read")
    parser.set_defaults(media_root=None, decode=False, media=[], patch=PATCHES[0])  # of a set without media
    if dataset.media is not None:
        text = "existing folder of the media (default: the folder); those inside rows are written there"
        add("--media-root", type=Path, help=text)
        add("--decode", action="store_true", help="decode all frames a run would show; else of each video one")
        text = "look at media under these settings, as a run would (media.KEY); else no limit of a run's refuses any"
        add("--media", nargs="+", default=[], metavar="KEY=VALUE", help=text)
        text = "side of a merged patch, for counting visual tokens: 28 (default; Qwen2-VL, Qwen2.5-VL) or 32 (Qwen3-VL)"
        add("--patch", type=int, choices=PATCHES, default=PATCHES[0], help=text)
    text = f"refuse the set when media of a larger share are not there (default {DEFAULT_MISSING_SHARE})"
    add("--max-missing-share", type=float, default=DEFAULT_MISSING_SHARE, help=text)
    add("--data-types", nargs="+", choices=DATA_TYPES, default=list(DATA_TYPES), help="keep these (default: all)")
    add("--answer-kinds", nargs="+", choices=ANSWER_KINDS, default=list(ANSWER_KINDS), help="keep these (default: all)")
    add("--sources", nargs="+", default=[], metavar="NAME", help="keep these data_source names (default: all)")
    share = f"share of --train set apart for evaluation where there is no --eval (default {DEFAULT_EVAL_SHARE})"
    add("--eval-share", type=float, help=share)
    add("--seed", type=int, default=0, help="decides which are set apart (default 0)")
    add("--format", choices=("parquet", "jsonl"), default="parquet", help="of the records (default parquet)")
    add("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: one for each core)")
    add("--overwrite", action="store_true", help="replace what was prepared with other arguments")
    return parser
