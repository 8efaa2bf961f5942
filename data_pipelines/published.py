"""Data sets published as files of rows, for training and for evaluation: raw rows to checked records.

What such a set's own pipeline adds is how one of its rows becomes a record in Video-R1's format.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from data_pipelines.common import MANIFEST, is_prepared, locked, state_of, write_manifest
from data_pipelines.media_store import MediaStore
from data_pipelines.outcome import Outcome, split_keys
from vlm_pg.data.files import RecordPlace, read_raw
from vlm_pg.data.folders import data_folder, root_of
from vlm_pg.data.records import parse_record, with_paths
from vlm_pg.errors import ConfigError, SampleError, printable
from vlm_pg.types import BadSample, Sample

Row = Mapping[str, Any]
DEFAULT_EVAL_SHARE = 0.01


class Layout(Protocol):
    """Where a set's media lie."""

    @property
    def files(self) -> Sequence[Path]:
        """What that was read from, beside the media themselves."""

    def path_of(self, name: str) -> str:
        """Path below the media root of the file that a row calls ``name``."""


@dataclass(frozen=True)
class PublishedSet:
    """One such data set.

    ``to_record`` makes a record of a row and of a name that is the row's own ("gsm8k_train-17"), for sets whose rows
    have none; it raises ``SampleError`` for a row it cannot use. ``columns``: fields every row has, of those in a tuple
    one. ``has_media``: whether its questions are about files below a media root. ``layout``: made of the annotation
    files and the media root where a record's path depends on what lies there.

        PublishedSet("gsm8k", (("question", "problem"), "answer"), to_record, has_media=False)
    """

    name: str
    columns: tuple[str | tuple[str, ...], ...]
    to_record: Callable[[Row, str], dict[str, Any]]
    has_media: bool
    layout: Callable[[Sequence[Path], Path], Layout] | None = None


def prepare(published: PublishedSet, description: str, argv: Sequence[str] | None) -> int:
    """Prepare a set from its files, or do nothing if it is there already. Returns the exit code.

    Args:
        published: the set.
        description: what ``--help`` says of it.
        argv: the command's arguments.
    """
    arguments = _parse(published, description, argv)
    identity = _identity(published, arguments)
    out: Path = arguments.out
    with locked(out):
        if not arguments.overwrite and is_prepared(out, identity):
            print(f"{out} is already prepared.")
            return 0
        outcome = _sort(published, arguments)
        names = ["train", "eval"] if arguments.train else ["eval"]
        if not (outcome.train if arguments.train else outcome.evaluation):
            raise ConfigError(
                f"No record is left for {names[0]}.jsonl. At least one is needed.\n{outcome.summary()}\nCorrect the "
                "files or the options."
            )
        inputs: dict[str, Any] = {
            "train_files": list(map(str, arguments.train)),
            "eval_files": list(map(str, arguments.eval)),
        }
        if published.has_media:
            inputs["media_root"] = str(arguments.media_root)
        if arguments.overwrite:
            _remove_prepared(out)
        files = outcome.write(out, names, inputs)
        write_manifest(out, identity, files)
    print(outcome.summary())
    hint = f" Train with data.media_root={arguments.media_root.resolve()}." if published.has_media else ""
    print(f"Wrote {', '.join(files)} to {out}.{hint}")
    return 0


def _remove_prepared(out: Path) -> None:
    """Remove the files that the folder's manifest lists, some of which may not be written again, and then itself."""
    manifest = out / MANIFEST
    try:
        listed = list(json.loads(manifest.read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        listed = []  # there is none, or not one of ours: nothing is known to be old
    for name in listed:
        if isinstance(name, str) and Path(name).name == name:  # in this folder
            (out / name).unlink(missing_ok=True)
    manifest.unlink(missing_ok=True)


def _sort(published: PublishedSet, arguments: argparse.Namespace) -> Outcome:
    outcome = Outcome()
    names = _file_names([*arguments.train, *arguments.eval])
    media_root = None if not published.has_media or arguments.skip_media_check else arguments.media_root
    layout = _layout(published, arguments)
    store = MediaStore(arguments.media_root) if published.has_media else None
    evaluation = _read(published, arguments.eval, names, layout, store, outcome)
    train = _read(published, arguments.train, names, layout, store, outcome)
    for_evaluation = {key for sample in evaluation for key in split_keys(sample)}
    unseen = [sample for sample in train if not for_evaluation.intersection(split_keys(sample))]
    if len(unseen) < len(train):
        outcome.left_out["also in the evaluation file"] = len(train) - len(unseen)
    usable = outcome.usable([*unseen, *evaluation], published.name, media_root)
    outcome.evaluation = [sample for sample in usable if for_evaluation.intersection(split_keys(sample))]
    outcome.split(usable[: len(usable) - len(outcome.evaluation)], arguments.eval_share, arguments.seed)
    return outcome


def _file_names(paths: Sequence[Path]) -> dict[Path, str]:
    """What rows are named after: the file's stem, with its folder's name or a number before it where others have it.

    A folder of a data set is named after itself and the split: "gsm8k-train".

    Those of algebra/train.json and geometry/train.json: "algebra-train" and "geometry-train".
    """
    files = {path: path.resolve() for path in paths}
    # A link is named as it is written: what it points to may be called by a hash.
    written = {file: path.absolute() for path, file in reversed(files.items())}
    names = {file: _stem(written[file]) for file in files.values()}
    names = {
        file: f"{written[file].parent.name}-{name}" if _repeats(names, name) else name for file, name in names.items()
    }
    names = {
        file: f"{number}-{name}" if _repeats(names, name) else name
        for number, (file, name) in enumerate(names.items(), start=1)
    }
    return {path: names[file] for path, file in files.items()}


def _stem(path: Path) -> str:
    folder = data_folder(path)
    return path.stem if folder is None else folder.name


def _repeats(names: Mapping[Path, str], name: str) -> bool:
    return list(names.values()).count(name) > 1


def _layout(published: PublishedSet, arguments: argparse.Namespace) -> Layout | None:
    if published.layout is None:
        return None
    return published.layout([*arguments.train, *arguments.eval], arguments.media_root)


def _read(
    published: PublishedSet,
    paths: Sequence[Path],
    names: Mapping[Path, str],
    layout: Layout | None,
    store: MediaStore | None,
    outcome: Outcome,
) -> list[Sample]:
    """The samples of all files in order; rows that are none, or repeat another's id, are refused."""
    samples: dict[str, Sample] = {}
    for path in paths:
        for place, row in _read_rows(path, published.columns):
            where, name = place.within(path), f"{names[path]}-{place.key}"
            try:
                record = published.to_record(row, name)
                if store is not None:
                    record = with_paths(record, store.unpack)
                if layout is not None:
                    record["path"] = layout.path_of(record["path"])
                sample = parse_record(record, where)
                if sample.sample_id in samples:
                    raise SampleError(
                        "duplicate_id",
                        f"the id '{sample.sample_id}' was used before. Each row needs its own. Give each file once.",
                    )
            except SampleError as fault:
                outcome.refused.append(BadSample(name, fault.reason, str(fault), where))
                continue
            samples[sample.sample_id] = sample
    return list(samples.values())


def _read_rows(path: Path, columns: Sequence[str | tuple[str, ...]]) -> Iterator[tuple[RecordPlace, Row]]:
    rows = _read_csv(path) if path.suffix.lower() == ".csv" else read_raw(path)
    choices = [(names,) if isinstance(names, str) else names for names in columns]
    for place, row in rows:
        missing = [names for names in choices if not isinstance(row, Mapping) or not any(n in row for n in names)]
        if missing:
            raise ConfigError(
                f"{_shown(path, place)}: the row has no {_listed(missing)}. Rows with {_listed(choices)} are expected. "
                "Give the files as their project publishes them."
            )
        yield place, row


def _shown(path: Path, place: RecordPlace) -> str:
    file = root_of(path) / place.file if place.file else path
    return f"{printable(str(file), 300)}:{place}"


def _listed(choices: Sequence[Sequence[str]]) -> str:
    return ", ".join(" or ".join(names) for names in choices)


def first_of(row: Row, *names: str) -> Any:
    """The value of the first of these fields that the row has, and that is not empty; None without one."""
    return next((row[name] for name in names if row.get(name) not in (None, "")), None)


def plain_number(value: Any) -> str:
    """A value as text; a whole number that a table holds as a fraction (142.0) without its point."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _read_csv(path: Path) -> Iterator[tuple[RecordPlace, Row]]:
    """Rows of a comma-separated file with a line of column names, numbered by the line they end on."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            for row in reader:
                yield RecordPlace(reader.line_num), row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            f"Data file '{path}' cannot be read as CSV: {error}. A UTF-8 file with a line of column names is expected. "
            "Correct the path, or write the file again."
        ) from error


def _identity(published: PublishedSet, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the result depends on, as JSON values; files by their size and time of change."""
    identity: dict[str, Any] = {
        "pipeline": published.name,
        "train_files": [state_of(path, "--train or --eval") for path in arguments.train],
        "eval_files": [state_of(path, "--train or --eval") for path in arguments.eval],
        "eval_share": arguments.eval_share,
        "seed": arguments.seed,
    }
    if published.has_media:
        if not arguments.media_root.is_dir():
            raise ConfigError(
                f"Media root '{arguments.media_root}' is not a folder. The folder that holds the videos is expected, "
                "or one for media that stand inside the rows. Correct --media-root."
            )
        layout = _layout(published, arguments)
        if layout is not None:
            identity["layout_files"] = [state_of(path, "--media-root") for path in layout.files]
        identity["media_root"] = str(arguments.media_root.resolve())
        identity["skip_media_check"] = arguments.skip_media_check
    return identity


def _parse(published: PublishedSet, description: str, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"vlm-pg prepare {published.name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--train",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="files, or FOLDER:split, to train on",
    )
    add("--eval", type=Path, nargs="+", default=[], metavar="FILE", help="the same, to evaluate on")
    add("--out", type=Path, required=True, help="folder to write; it holds this one set")
    if published.has_media:
        add(
            "--media-root",
            type=Path,
            required=True,
            help="folder of the media; those inside rows go there",
        )
        add("--skip-media-check", action="store_true", help="do not look whether the videos are there")
    share = f"share of --train set apart for evaluation where there is no --eval (default {DEFAULT_EVAL_SHARE})"
    add("--eval-share", type=float, help=share)
    add("--seed", type=int, default=0, help="decides which are set apart (default 0)")
    add("--overwrite", action="store_true", help="replace what was prepared with other arguments")
    arguments = parser.parse_args(argv)
    if not arguments.train and not arguments.eval:
        raise ConfigError(
            "Neither --train nor --eval is given. Files of one or of both are needed. Name the files of the data set."
        )
    if arguments.eval and arguments.eval_share is not None:
        raise ConfigError(
            "--eval and --eval-share are given. One of them is allowed: files to evaluate on, or a share of --train. "
            "Leave one out."
        )
    if arguments.eval_share is None:
        arguments.eval_share = 0.0 if arguments.eval else DEFAULT_EVAL_SHARE
    if not 0.0 <= arguments.eval_share < 1.0:
        raise ConfigError(
            f"--eval-share is {arguments.eval_share}. At least 0 and less than 1 is allowed. Choose for example 0.01."
        )
    return arguments
