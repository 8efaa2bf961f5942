"""How a data set is published: the description that its pipeline gives of it, and readers of annotation files."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from vlm_pg.data.fields import Unreadable
from vlm_pg.data.files import RecordLocation, read_json_object, read_raw, root_of
from vlm_pg.data.tables import refuse_repeated
from vlm_pg.errors import ConfigError, printable

Row = Mapping[str, Any]
Split = Literal["train", "eval"]
Reader = Callable[[Path], Iterator[tuple[RecordLocation, Any]]]
TABLES = (".json", ".jsonl", ".parquet", ".csv")
# Characters. Behind an unclosed quote the rest of the file is one cell.
_MAX_CELL = 1 << 24
# ``Form.foreign`` of sets whose questions have neither.
WITH_MEDIA = dict.fromkeys(("image", "images", "decoded_image", "video", "videos"), "sets with media")
WITH_OPTIONS = dict.fromkeys(("options", "choices"), "multiple choice sets")


def read_rows(path: Path) -> Iterator[tuple[RecordLocation, Any]]:
    """Rows of a table: JSON array, JSON lines, CSV with a header, Parquet, a folder of Parquet or Arrow.

    Raises ConfigError: the file does not parse as its suffix says.
    """
    return read_csv(path) if path.suffix.lower() == ".csv" else read_raw(path)


def read_csv(path: Path, delimiter: str = ",") -> Iterator[tuple[RecordLocation, Any]]:
    """Rows of a CSV file (RFC 4180), numbered by the line they end on.

    A row with more or fewer cells than the header has shifted or lost values: it is ``Unreadable``.

    Raises ConfigError: it cannot be read (with the line), or has two columns of one name.
    """
    csv.field_size_limit(_MAX_CELL)  # the module's own is 131,072
    start_line = 1
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            names: list[str] = []
            for cells in reader:
                start_line = reader.line_num + 1
                if not cells:  # an empty line
                    continue
                if not names:
                    names = cells
                    # Columns without a name may repeat: they are not read.
                    refuse_repeated(path, [name for name in names if name])
                    continue
                row: Any = {name: cell for name, cell in zip(names, cells, strict=False) if name}
                if len(cells) != len(names):
                    row = Unreadable(f"a line of {len(cells)} cells below {len(names)} column names", "bad_csv_row")
                yield RecordLocation(reader.line_num), row
    except csv.Error as error:
        raise ConfigError(
            f"Data file '{printable(str(path), 300)}:{start_line}' cannot be read as CSV: {error}, in the row that "
            "begins there. A cell that begins with a quote must end with one; those inside it are doubled. Correct "
            "that row."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"Data file '{printable(str(path), 300)}' cannot be read as CSV: {error}. A UTF-8 file with a line of "
            "column names is expected. Correct the path, or write the file again."
        ) from error


def keyed_rows(key: str) -> Reader:
    """A reader of JSON objects that hold a row under each name: the name becomes the row's field ``key``.

    ``{"video_1": {"mc_question": []}}`` read by ``keyed_rows("video")`` is one row, ``{"video": "video_1",
    "mc_question": []}``. A row whose own field of that name differs is ``Unreadable``. A row that is no object is
    passed on unchanged and refused later.
    """

    def read(path: Path) -> Iterator[tuple[RecordLocation, Any]]:
        for location, name, row in read_json_object(path):
            if not isinstance(row, Mapping):
                yield location, row
            elif str(own := row.get(key, name)) != name:
                came = (
                    f"called '{printable(name, 80)}' in its file and '{printable(str(own), 80)}' in its field '{key}'"
                )
                yield location, Unreadable(came, "two_names")
            else:
                yield location, {key: name, **row}

    return read


def one_object(path: Path) -> Iterator[tuple[RecordLocation, Any]]:
    """The reader of files that hold one row each, a JSON object. Its fields gain ``file``, the path of the file.

    An object with different values under one name, or with a field ``file`` of its own, is ``Unreadable``.
    """
    row: dict[str, Any] = {}
    fault = None
    for _, name, value in read_json_object(path):
        if row.setdefault(name, value) != value:
            fault = Unreadable(f"an object that gives '{printable(name, 80)}' different values")
    if "file" in row:
        fault = fault or Unreadable("an object with a field 'file', which is where its file's path goes", "two_names")
    yield RecordLocation(1), fault or {**row, "file": str(path)}


def text_lines(path: Path) -> Iterator[tuple[RecordLocation, Any]]:
    """The reader of text files with one row a line: ``{"line": "..."}``; empty lines are skipped."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield RecordLocation(number), {"line": line.rstrip("\r\n")}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"Data file '{printable(str(path), 300)}' cannot be read as text: {error}. A UTF-8 file of one row a line "
            "is expected. Correct the path, or write the file again."
        ) from error


def files_beside(path: Path, patterns: Sequence[str]) -> list[Path]:
    """Files matching these glob patterns in the folder of an annotation file, or in a folder of Parquet shards."""
    root = root_of(path)
    return [file for pattern in patterns for file in sorted(root.glob(pattern)) if file.is_file()]


def one_question(row: Row, name: str) -> Iterable[tuple[str, Row]]:
    """A row that is one question."""
    return [(name, row)]


def in_folders(folders: Sequence[str], train: str, evaluation: str) -> dict[Split, tuple[str, ...]]:
    """``Form.files`` with one file name or pattern per split, in any of these folders.

    in_folders(["", "*/"], "train.json", "val.json")["train"] == ("train.json", "*/train.json")
    """
    names: dict[Split, str] = {"train": train, "eval": evaluation}
    return {split: tuple(f"{folder}{name}" for folder in folders) for split, name in names.items()}


@dataclass(frozen=True)
class Form:
    """One of the forms in which a data set is published.

    Args:
        name: for messages: "STAR_{train,val,test}.json".
        files: annotation files of each split, as glob patterns below the unpacked folder, of which the first that
            matches counts; "data:train" is that split of a folder of Parquet shards. A split's files are those of the
            first form that has any for it.
        columns: fields that every row has, of those in a tuple one. A file is of the first form whose columns its first
            row has.
        to_record: makes a record (``vlm_pg.data.records``) of a question. By default its ``problem_id`` is the
            question's name, its ``data_type`` video, and its ``data_source`` the set's name. Raises SampleError where
            the question cannot be used.
        rows: reads an annotation file, or a folder of Parquet shards: each row and its location.
        questions: the questions of a row with a name for each, derived from the row's.
        suffixes: of the annotation files; a folder of shards counts as ".parquet".
        beside: files beside an annotation file, as glob patterns, that ``rows`` reads too.
        foreign: field -> kind of data set, for fields that rows of similar sets have and rows of this form have not.
        folder: for forms whose media paths repeat in other forms or files: the one folder with all media of a question,
            from the question and the folder of its annotation file.
        empty: reason to skip a row whose list of questions is empty; "": such a row is refused.
        subtitled: whether records name subtitles, which only some videos have: a record whose file is missing has none,
            and the set's report counts these.
    """

    name: str
    files: Mapping[Split, tuple[str, ...]]
    columns: tuple[str | tuple[str, ...], ...]
    to_record: Callable[[Row], dict[str, Any]]
    rows: Reader = read_rows
    questions: Callable[[Row, str], Iterable[tuple[str, Row]]] = one_question
    suffixes: tuple[str, ...] = TABLES
    beside: tuple[str, ...] = ()
    foreign: Mapping[str, str] = field(default_factory=dict)
    folder: Callable[[Row, Path], str] | None = None
    empty: str = ""
    subtitled: bool = False


@dataclass(frozen=True)
class DataSet:
    """One data set.

    Args:
        name: of the pipeline, and default of the records' ``data_source``.
        forms: those it is published in, the most specific first.
        media: None for a set without media; else folders, as glob patterns below the unpacked folder, that its archives
            unpack to, the preferred first. Media are searched there and in the media root only, because other sets use
            the same file names (see ``MediaFinder``).
        shared: of sets whose media are found by name: folder patterns that mirrors use and other sets have as well,
            each with the pattern of its subfolders that count too ("": none).
        own_in: which files in such a folder, or one of ``media``, are certainly the set's: called once per folder with
            its path, which begins with the root's name, and the stems of the media in it; returns a predicate on a
            stem. None: all are.
        called: pattern of all possible names of ``Form.folder``; where all rows are of one of these folders, the media
            root may be that folder under any name that does not match. None: it may not.
        spelt: other spellings of a folder of ``Form.folder``, by its name.
        by_name: whether files in these folders are found by name at any depth. Not in sets whose media share names
            ("split_2.mp4", "1.png"): where some are missing, another's would be taken.
        described_in: files that this description was read from: they are inputs of the preparation.
        option_columns: how many fields of a row hold an option each, to report rows that leave some empty; 0: none.

    The docstring of its module has paragraphs that begin with "Published:", "Licence:" and an example "Record:".
    """

    name: str
    forms: tuple[Form, ...]
    media: tuple[str, ...] | None = field(default=None)
    shared: Mapping[str, str] = field(default_factory=dict)
    own_in: Callable[[PurePosixPath, Collection[str]], Callable[[str], bool]] | None = None
    called: re.Pattern[str] | None = None
    spelt: Mapping[str, re.Pattern[str]] = field(default_factory=dict)
    by_name: bool = True
    described_in: tuple[Path, ...] = ()
    option_columns: int = 0
