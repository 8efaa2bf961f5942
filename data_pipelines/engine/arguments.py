"""The arguments of every pipeline's command."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipelines.engine.annotation_files import Recognized, find_files, refuse_inside
from data_pipelines.engine.archives import archives_below, unpack, unsupported_below, unsupported_message
from data_pipelines.engine.dataset import DataSet
from data_pipelines.engine.judging import DATA_TYPES
from data_pipelines.engine.splits import Format
from vlm_pg.errors import ConfigError
from vlm_pg.types import ANSWER_KINDS

DEFAULT_EVAL_SHARE = 0.01
DEFAULT_MISSING_SHARE = 0.5
PATCHES = (28, 32)
DEFAULT_PATCH = 28


@dataclass(frozen=True)
class Arguments:
    """The command's arguments, defaults filled in; files are found. ``unread``: annotation files that are not read."""

    train: list[Path]
    eval: list[Path]
    out: Path
    media_root: Path
    data_types: list[str]
    answer_kinds: list[str]
    sources: list[str]
    eval_share: float
    max_missing_share: float
    seed: int
    format: Format
    workers: int
    skip_media_check: bool
    decode: bool
    media: list[str]
    patch: int
    overwrite: bool
    unread: list[Recognized]


def parse(dataset: DataSet, description: str, argv: Sequence[str] | None) -> Arguments:
    """Read the arguments and find the files. Raises ConfigError: they do not go together, or name nothing."""
    given = _parser(dataset, description).parse_args(argv)
    given.unread = []
    given.media_root = getattr(given, "media_root", None) or given.folder or Path()
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
    if given.skip_media_check and (getattr(given, "decode", False) or getattr(given, "media", [])):
        raise ConfigError(
            "--skip-media-check is given with --decode or --media. Media are looked at or not. Leave one out."
        )
    for name, value in (("decode", False), ("media", []), ("patch", DEFAULT_PATCH)):
        setattr(given, name, getattr(given, name, value))  # of a set without media
    del given.folder, given.unpack
    return Arguments(**vars(given))


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
    if dataset.media is not None:
        text = "existing folder of the media (default: the folder); those inside rows are written there"
        add("--media-root", type=Path, help=text)
        add("--decode", action="store_true", help="decode all frames a run would show; else of each video one")
        text = "look at media under these settings, as a run would (media.KEY); else no limit of a run's refuses any"
        add("--media", nargs="+", default=[], metavar="KEY=VALUE", help=text)
        text = "side of a merged patch, for counting visual tokens: 28 (default; Qwen2-VL, Qwen2.5-VL) or 32 (Qwen3-VL)"
        add("--patch", type=int, choices=PATCHES, default=DEFAULT_PATCH, help=text)
    add(
        "--max-missing-share",
        type=float,
        default=DEFAULT_MISSING_SHARE,
        help=f"refuse the set when media of a larger share are not there (default {DEFAULT_MISSING_SHARE})",
    )
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
