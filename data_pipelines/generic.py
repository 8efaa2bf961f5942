"""Any data set of questions, by a map of its fields in YAML, to checked records.

    vlm-pg prepare generic --map my_set.yaml my_set --media-root my_set --out data/my_set
    vlm-pg prepare generic --map my_set.yaml --train rows.jsonl --eval held_out.csv --out data/my_set
    mkdir -p data/media
    vlm-pg prepare generic --map my_set.yaml --hub OWNER/NAME --hub-splits train test --hub-folder data/raw/my_set
        --allow-hub --media-root data/media --out data/my_set     # --hub-config, --hub-revision

Published: JSON (an array, lines, an object of rows by name, one object a file), Parquet, CSV, a folder that
``datasets`` saved, or a data set on the hub, whose splits are copied into a folder first. The map says, for each field
of a record, which field of a row it is, or the same value for all rows:

    name: my_set
    fields:
      problem: {field: question, remove: ["<image>", "Answer with the letter."]}
      data_type: {constant: video}
      problem_type: {field: kind, names: {mc: multiple choice, open: free-form}}
      options: {columns: [a0, a1, a2, a3]}
      answer: {field: label, given_as: index}
      path: {field: video_id, prefix: videos/, suffix: .mp4}
      start: clip.start
      category: metadata.task

``problem``, ``data_type``, ``problem_type`` and ``answer`` are needed, except in conversations (below);
``problem_id``, ``options``, ``process``, ``path``, ``data_source``, ``category``, ``start``, ``end``, ``times``,
``subtitles`` and ``folder_fps`` may be given. A text alone is the name of a field; points lead into others
("conversations.0.value"). A row without a field the map names is refused, unless it is one of videos and the row's
media are images, or ``path`` and the row's type is text. A cell of a CSV file may hold a list or an object as JSON.
Where images and videos stand in fields of their own, ``video`` and ``image`` name these, instead of ``path`` and
``data_type``; a row has either, or both:

    fields: {video: clip, image: {field: photo, prefix: photos/}, problem: question, ...}

Conversions: ``names`` (what a field's values are called in a record; others are refused), ``remove`` (exact sentences
at the start or end; "<image>" and "<video>" only where there is one for each medium), ``prefix``, ``suffix``.
``options`` come from a list, a text with a ``separator``, ``columns``, or the question's last lines (``in_question:
true``); the last columns may be empty. ``answer`` is ``given_as`` letter, index, index from 1, text, tagged
("<answer>B</answer>") or written, the default: any spelling that fits one option. That holds for questions with
options; others take the answer as it is written. A class of a table is its name, or its number if an index
is expected. Several right options (``multiple select``) are a list, or a text with a ``separator``.

Conversations are lists of turns in LLaVA's form or OpenAI's (``from`` or ``role``; ``value`` or ``content``, a text or
a list of parts), and preference pairs two responses, a text or a list of turns each:

    name: llava
    fields: {conversation: conversations, image: {field: image, prefix: coco/}}

    name: my_pairs
    fields: {problem: question, chosen: chosen, rejected: rejected, image: image}

``conversation`` gives the question, the user's first turn, to which conversions apply, and the turns after it, instead
of ``problem``, ``problem_type``, ``options`` and ``answer``. The user and the assistant alternate, the assistant last;
a system turn is refused, as ``prompt.system`` sets it. LLaVA-Video marks its videos as "<image>", which ``remove``
takes away. ``chosen`` answers ``problem``, or a ``conversation`` that ends with the user's turn. Without it the better
response is the one turn of the assistant in ``conversation``, or ``process`` and ``answer``.

Beside ``fields``: ``files`` (train, eval: glob patterns below the folder), ``media_folders`` (glob patterns below the
media root of folders that paths start from, "clips/**" for those inside others too; without them, the root itself),
``keyed_by`` (the file is an object of rows: the field that their names become), ``file_is_row``, ``questions`` (the
row's list of questions, each read as a row).

Licence: see the data set's project.

Record: {"problem_id": "rows-1", "problem": "What moves?", "data_type": "video", "problem_type": "multiple choice",
"options": ["A. a car", "B. a dog"], "process": "", "solution": "<answer>B</answer>", "path": "videos/7.mp4",
"data_source": "my_set"}
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from data_pipelines import run
from data_pipelines.engine.annotation_files import read_alone, refuse_inside
from data_pipelines.engine.command import prepare
from data_pipelines.engine.dataset import TABLES, DataSet, Form, keyed_rows, one_object, read_rows
from data_pipelines.engine.field_map import FieldMap, mapped_questions, mapped_record, read_map
from data_pipelines.engine.hub import fetch, shard_of
from vlm_pg.errors import ConfigError, printable

GENERIC = DataSet("generic", ())


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the set, or do nothing if it is there already. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="vlm-pg prepare generic", add_help=False, allow_abbrev=False)
    parser.add_argument("--map", type=Path)
    parser.add_argument("--hub")
    parser.add_argument("--hub-config")
    parser.add_argument("--hub-revision")
    parser.add_argument("--hub-splits", nargs="+", default=["train"])
    parser.add_argument("--hub-folder", type=Path)
    parser.add_argument("--allow-hub", action="store_true")
    own, rest = parser.parse_known_args(argv)
    if "-h" in rest or "--help" in rest:
        return prepare(GENERIC, __doc__ or "", rest)
    if own.map is None:
        raise ConfigError(
            "--map is missing. A YAML file that says which fields of a row make those of a record is needed. See "
            "vlm-pg prepare generic --help for one."
        )
    dataset = dataset_of(own.map)
    recipe = ("data_pipelines.generic:dataset_of", (own.map,))
    return prepare(dataset, __doc__ or "", [*_fetched(dataset, own, rest), *rest], recipe)


def dataset_of(map_file: Path) -> DataSet:
    """The data set that a map of fields describes. Raises ConfigError: see ``read_map``."""
    field_map = read_map(map_file)
    if field_map.file_is_row and field_map.keyed_by is not None:
        raise ConfigError(
            f"The map of fields {map_file} gives file_is_row and keyed_by. A file is one row or an object of rows. "
            "Leave one out."
        )
    table = keyed_rows(field_map.keyed_by) if field_map.keyed_by else read_rows
    form = Form(
        map_file.name,
        {split: tuple(patterns) for split, patterns in field_map.files.items()},
        (field_map.questions,) if field_map.questions else _columns(field_map),
        partial(mapped_record, field_map),
        rows=one_object if field_map.file_is_row else table,
        questions=partial(mapped_questions, field_map),
        suffixes=(*TABLES, ".ndjson"),
    )
    has_media = field_map.fields.path is not None or bool(field_map.fields.media())
    media = tuple(field_map.media_folders) if has_media else None
    columns = len(field_map.fields.options.columns or ()) if field_map.fields.options else 0
    return DataSet(field_map.name, (form,), media, by_name=False, described_in=(map_file,), option_columns=columns)


def _columns(field_map: FieldMap) -> tuple[tuple[str, ...], ...]:
    """The fields that every row has, the outermost of those inside others; of those with media one of them."""
    fields = field_map.fields
    always = [source for field, source in fields.sources().items() if field not in fields.optional()]
    further = (fields.conversation, fields.chosen, fields.rejected, fields.answer, fields.options)
    sources = [*always, *(source for source in further if source is not None)]
    names = dict.fromkeys(name for source in sources for name in source.fields())
    media = [name for source in fields.media().values() for name in source.fields()]
    return (*map(_outer, names), *([tuple(one for name in media for one in _outer(name))] if media else []))


def _outer(name: str) -> tuple[str, ...]:
    return (name, name.partition(".")[0]) if "." in name else (name,)


def _fetched(dataset: DataSet, own: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    """The folder that a data set of the hub was copied to."""
    if own.hub is None:
        given = [name for name in ("config", "revision", "folder") if getattr(own, f"hub_{name}") is not None]
        if given:
            raise ConfigError(f"--hub-{given[0]} is given without --hub. It says what to fetch. Give both, or neither.")
        return []
    if not own.allow_hub or own.hub_folder is None:
        raise ConfigError(
            f"--hub {own.hub} downloads a data set. --allow-hub, and --hub-folder for a folder to keep it in, are "
            "needed. Add them, or download its files yourself and give their folder."
        )
    if own.hub_revision is not None and Path(own.hub).is_dir():
        raise ConfigError(
            f"--hub-revision {own.hub_revision} is given, and --hub names a folder, which has no revisions. One of a "
            "data set of the hub is expected. Leave it out."
        )
    refuse_inside(_out(rest), [own.hub_folder, *filter(Path.is_dir, [Path(own.hub)])])
    read = read_alone(dataset, map(shard_of, own.hub_splits))
    unread = [split for split in own.hub_splits if shard_of(split) not in read]
    if unread:
        files = "; ".join(f"{split}: {', '.join(patterns)}" for split, patterns in dataset.forms[0].files.items())
        raise ConfigError(
            f"--hub-splits has {printable(', '.join(unread), 200)}, which would not be read: the map's 'files' are "
            f"{files}, and of each the first that is there is read. Name a split there, as in "
            "files: {eval: ['.:validation']}, or leave it out."
        )
    for split in own.hub_splits:
        print(f"{fetch(own.hub, own.hub_config, split, own.hub_folder, own.hub_revision)} is there.")
    return [str(own.hub_folder)]


def _out(arguments: Sequence[str]) -> Path:
    """The output folder, needed before anything is fetched."""
    parser = argparse.ArgumentParser(prog="vlm-pg prepare generic", add_help=False, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_known_args(arguments)[0].out
    return out


if __name__ == "__main__":
    raise SystemExit(run(main))
