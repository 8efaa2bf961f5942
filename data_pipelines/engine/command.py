"""The command of a pipeline: arguments, and the way from annotation files to a prepared folder."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from data_pipelines.common import MANIFEST, fingerprint, holding, is_prepared, state_of, write_manifest
from data_pipelines.engine.arguments import Arguments, parse
from data_pipelines.engine.assembling import write_all
from data_pipelines.engine.dataset import DataSet
from data_pipelines.engine.judging import Rules, Source, Verdict
from data_pipelines.engine.media_look import MediaLook
from data_pipelines.engine.outcome import MISSING, check_outcome
from data_pipelines.engine.reading import files_beside
from data_pipelines.engine.repeats import Repeats
from data_pipelines.engine.rows import form_of, row_names
from data_pipelines.engine.running import judge_all
from data_pipelines.engine.splitting import Splitter
from data_pipelines.engine.spool import Spool, remove_left
from data_pipelines.engine.summary import write_summary
from data_pipelines.engine.tally import Tally
from vlm_pg.data.folders import files_of
from vlm_pg.data.ledger import Ledger
from vlm_pg.data.prepared import SCHEMA_VERSION
from vlm_pg.errors import VlmPgError
from vlm_pg.files import write_json_atomic

_MANY_FILES = 50
REPORT, SUMMARY = "report.json", "summary.html"


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
    sources = _sources(dataset, arguments)
    inputs = _inputs(dataset, sources, arguments)
    look = MediaLook.of(dataset, arguments)
    identity = {
        **inputs,
        **look.identity,
        "eval_share": arguments.eval_share,
        "seed": arguments.seed,
        "format": arguments.format,
    }
    out = arguments.out
    recipe = recipe or (f"data_pipelines.{dataset.name}:{dataset.name.upper()}", ())
    with holding(out):
        if not arguments.overwrite and is_prepared(out, identity):
            remove_left(out)
            print(f"{out} is already prepared.")
            return 0
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
    return 0


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
    spool = Spool(out, fingerprint(inputs))
    print(f"Counting the rows of {len(sources)} file(s)", flush=True)
    rows = {source.path: sum(1 for _ in dataset.forms[source.form].rows(source.path)) for source in sources}
    parts = judge_all(sources, dataset, rules, spool, sum(rows.values()), arguments.workers)
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
        tally = Tally(dataset.option_columns)
        files = write_all(written, placed, Repeats(ledger), splits, arguments.format, tally)
        check_outcome(tally, splits[0], arguments, spool, verdicts())
        tally.tokens.title += look.shown
        write_json_atomic(written / REPORT, {**_told(dataset, arguments), **look.identity, **tally.report()})
        write_summary(written / SUMMARY, dataset.name, tally, rules.media_root, knows.pool, arguments.unread)
    _remove_prepared(out)
    for path in sorted(written.iterdir()):
        path.replace(out / path.name)
    details = [
        {
            "path": str(source.path),
            "form": dataset.forms[source.form].name,
            "split": source.split,
            "rows": rows[source.path],
            "sha256": _sha256(files_of(source.path)),
        }
        for source in sources[:_MANY_FILES]
    ]
    more = {"schema_version": SCHEMA_VERSION, "sources": details, **_unread(arguments), "counts": tally.report()}
    write_manifest(out, identity, files, more)
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


def _sources(dataset: DataSet, arguments: Arguments) -> list[Source]:
    names = row_names([*arguments.train, *arguments.eval])
    found = []
    for split, paths in (("train", arguments.train), ("eval", arguments.eval)):
        form = None
        for number, path in enumerate(paths):
            # Of thousands of files of one object each the first tells for all.
            form = form_of(dataset, path) if form is None or number < _MANY_FILES else form
            found.append(Source(path, dataset.forms.index(form), names[path], split))  # type: ignore[arg-type]
    return found


def _inputs(dataset: DataSet, sources: Sequence[Source], arguments: Arguments) -> dict[str, Any]:
    """What judging depends on, as JSON values; files by their size and time of change."""
    files: dict[str, Any] = {}
    for split in ("train", "eval"):
        states = [state_of(source.path, f"--{split}") for source in sources if source.split == split]
        beside = {
            path
            for source in sources
            if source.split == split
            for path in files_beside(source.path, dataset.forms[source.form].beside)
        }
        states += [state_of(path, "the folder") for path in sorted(beside)]
        files[f"{split}_files"] = states if len(states) <= _MANY_FILES else [len(states), fingerprint({"all": states})]
    inputs: dict[str, Any] = {"pipeline": dataset.name, "schema_version": SCHEMA_VERSION, **files}
    if dataset.described_in:
        inputs["described_in"] = [state_of(path, "the command") for path in dataset.described_in]
    inputs |= {"data_types": sorted(arguments.data_types), "answer_kinds": sorted(arguments.answer_kinds)}
    inputs["sources"] = sorted(arguments.sources)
    if dataset.media is not None:
        inputs |= {
            "media_root": str(arguments.media_root.resolve()),
            "skip_media_check": arguments.skip_media_check,
        }
    return inputs


def _told(dataset: DataSet, arguments: Arguments) -> dict[str, Any]:
    """How the report begins."""
    told: dict[str, Any] = {"pipeline": dataset.name}
    for split, paths in (("train_files", arguments.train), ("eval_files", arguments.eval)):
        told[split] = [str(path) for path in paths[:_MANY_FILES]]
    told |= _unread(arguments)
    return told | ({"media_root": str(arguments.media_root)} if dataset.media is not None else {})


def _unread(arguments: Arguments) -> dict[str, Any]:
    return {"unread_files": [one.told() for one in arguments.unread]}


def _remove_prepared(out: Path) -> None:
    """Remove what an earlier run wrote, and nothing else: what its manifest lists, or shards without one."""
    manifest = out / MANIFEST
    try:
        listed = list(json.loads(manifest.read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        listed = []  # there is none, or not one of ours: nothing is known to be old
    for name in listed:
        if isinstance(name, str) and Path(name).name == name:  # in this folder
            (out / name).unlink(missing_ok=True)
    for split in ("train", "eval"):
        for path in out.glob(f"{split}-?????-of-?????.parquet"):
            path.unlink()
    (out / MISSING).unlink(missing_ok=True)
    manifest.unlink(missing_ok=True)


def _sha256(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _settings(dataset: DataSet, arguments: Arguments) -> str:
    out = arguments.out
    train = f"{out}:train" if arguments.format == "parquet" else os.fspath(out / "train.jsonl")
    media = f" data.media_root={arguments.media_root.resolve()}" if dataset.media is not None else ""
    return f"data.train={train}{media}"
