"""How a data set is published: the description that its pipeline gives of it, and readers of annotation files."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from vlm_pg.data.fields import Unreadable
from vlm_pg.data.files import RecordPlace, read_json_object, read_raw, root_of
from vlm_pg.errors import ConfigError, printable

Reader = Callable[[Path], Iterator[tuple[RecordPlace, Any]]]
# Characters. Behind a quote that nobody closed the rest of the file is one cell.
_LONGEST_CELL = 1 << 24


def read_rows(path: Path) -> Iterator[tuple[RecordPlace, Any]]:
    """Rows of a table: JSON array, JSON lines, CSV with a line of column names, Parquet, a folder of Parquet or Arrow.

    Raises:
        ConfigError: it cannot be read as what it is called.
    """
    return read_csv(path) if path.suffix.lower() == ".csv" else read_raw(path)


def read_csv(path: Path, delimiter: str = ",") -> Iterator[tuple[RecordPlace, Any]]:
    """Rows of a CSV file as RFC 4180 writes them, numbered by the line they end on.

    A row of more or fewer cells than there are columns has moved values, or lost some: it is ``Unreadable``.

    Raises:
        ConfigError: it cannot be read (with the line), or has two columns of one name.
    """
    csv.field_size_limit(_LONGEST_CELL)  # the module's own is 131,072
    begins = 1
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            names: list[str] = []
            for cells in reader:
                begins = reader.line_num + 1
                if not cells:  # an empty line
                    continue
                if not names:
                    names = _column_names(path, cells)
                    continue
                row = {name: cell for name, cell in zip(names, cells, strict=False) if name}
                fault = f"a line of {len(cells)} cells below {len(names)} column names"
                yield (
                    RecordPlace(reader.line_num),
                    row if len(cells) == len(names) else Unreadable(fault, "bad_csv_row"),
                )
    except csv.Error as error:
        raise ConfigError(
            f"Data file '{printable(str(path), 300)}:{begins}' cannot be read as CSV: {error}, in the row that begins "
            "there. A cell that begins with a quote must end with one; those inside it are doubled. Correct that row."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"Data file '{printable(str(path), 300)}' cannot be read as CSV: {error}. A UTF-8 file with a line of "
            "column names is expected. Correct the path, or write the file again."
        ) from error


def keyed_rows(key: str, reader: Callable[[Path], Iterator[tuple[RecordPlace, str, Any]]] = read_json_object) -> Reader:
    """A reader of JSON objects that hold a row under each name: the name becomes the row's field ``key``.

    ``{"video_1": {"mc_question": []}}`` read by ``keyed_rows("video")`` is one row, ``{"video": "video_1",
    "mc_question": []}``. A row whose own field of that name says something else is ``Unreadable``. A row that is no
    object stays what it is, and is refused later.
    """

    def read(path: Path) -> Iterator[tuple[RecordPlace, Any]]:
        for place, name, row in reader(path):
            own = row.get(key, name) if isinstance(row, Mapping) else name
            if own != name and str(own) != name:
                came = (
                    f"called '{printable(name, 80)}' in its file and '{printable(str(own), 80)}' in its field '{key}'"
                )
                yield place, Unreadable(came, "two_names")
            else:
                yield place, {key: name, **row} if isinstance(row, Mapping) else row

    return read


def one_object(path: Path) -> Iterator[tuple[RecordPlace, Any]]:
    """The reader of files that hold one row each: a JSON object. Its fields gain ``file``, the path of the file.

    One that gives a name several values, or has a field ``file`` of its own, is ``Unreadable``.
    """
    row: dict[str, Any] = {}
    fault = None
    for _, name, value in read_json_object(path):
        if row.setdefault(name, value) != value:
            fault = Unreadable(f"an object that gives '{printable(name, 80)}' different values")
    if "file" in row:
        fault = fault or Unreadable("an object with a field 'file', which is where its file's path goes", "two_names")
    yield RecordPlace(1), fault or {**row, "file": str(path)}


def text_lines(path: Path) -> Iterator[tuple[RecordPlace, Any]]:
    """The reader of text files of one row a line: ``{"line": "..."}``; empty lines are none."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield RecordPlace(number), {"line": line.rstrip("\r\n")}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"Data file '{printable(str(path), 300)}' cannot be read as text: {error}. A UTF-8 file of one row a line "
            "is expected. Correct the path, or write the file again."
        ) from error


def files_beside(path: Path, patterns: Sequence[str]) -> list[Path]:
    """Files that these glob patterns name in the folder of an annotation file, or in a folder of Parquet shards."""
    root = root_of(path)
    return [file for pattern in patterns for file in sorted(root.glob(pattern)) if file.is_file()]


def _column_names(path: Path, names: list[str]) -> list[str]:
    """Those without a name may be several: no row is asked for them."""
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"Data file '{printable(str(path), 300)}' has several columns named {printable(', '.join(twice), 300)}. "
            "Columns with different names are expected. Rename or remove one of them."
        )
    return names


Row = Mapping[str, Any]
Split = Literal["train", "eval"]
Rows = Callable[[Path], Iterator[tuple[RecordPlace, Any]]]
TABLES = (".json", ".jsonl", ".parquet", ".csv")
# ``Form.foreign`` of sets whose questions have neither.
WITH_MEDIA = dict.fromkeys(("image", "images", "decoded_image", "video", "videos"), "sets with media")
WITH_OPTIONS = dict.fromkeys(("options", "choices"), "multiple choice sets")


def one_question(row: Row, name: str) -> Iterable[tuple[str, Row]]:
    """A row that is one question."""
    return [(name, row)]


def in_folders(folders: Sequence[str], train: str, evaluation: str) -> dict[Split, tuple[str, ...]]:
    """``Form.files`` of a file, or pattern, for each split, which lies in one of these folders.

    in_folders(["", "*/"], "train.json", "val.json")["train"] == ("train.json", "*/train.json")
    """
    return {
        "train": tuple(f"{folder}{train}" for folder in folders),
        "eval": tuple(f"{folder}{evaluation}" for folder in folders),
    }


@dataclass(frozen=True)
class Form:
    """One of the forms in which a data set is published.

    Args:
        name: what messages call it: "STAR_{train,val,test}.json".
        files: the annotation files of each split, as glob patterns below the folder as it unpacks, of which the first
            that names any counts; "data:train" is that split of a folder of Parquet shards. A split's files are those
            of the first form that has any for it.
        columns: fields that every row has, of those in a tuple one. A file is of the first form whose columns its first
            row has.
        to_record: makes a record, as ``vlm_pg.data.records`` describes it, of a question and of a name that is its own
            ("STAR_train-17"), for sets whose questions have none.

            Raises:
                SampleError: the question cannot be used.
        rows: reads an annotation file, or a folder of Parquet shards: each row and its place.
        questions: the questions of a row with a name for each, made of the row's.
        suffixes: endings of the annotation files; a folder of shards counts as ".parquet".
        beside: files beside an annotation file, as glob patterns, that ``rows`` looks into.
        foreign: fields that no row of this form has, though rows of similar sets do, with what those are: such rows
            would be read, and not as what they are.
        folder: the one folder that all media of a question are in, made of the question and of the folder of its
            annotation file, for forms whose paths other forms, or other files of this one, have too.
        empty: what a row with an empty list of questions is counted as, where the set has such rows: it is left out;
            "": it is refused.
        subtitled: whether its records name subtitles, which only some videos have: a record whose file is not there has
            none, and the set's report counts these.
    """

    name: str
    files: Mapping[Split, tuple[str, ...]]
    columns: tuple[str | tuple[str, ...], ...]
    to_record: Callable[[Row, str], dict[str, Any]]
    rows: Rows = read_rows
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
        name: of the pipeline, and of the records' ``data_source`` unless they say more.
        forms: those it is published in, the most particular first.
        media: None for a set without media; else folders, as glob patterns below the folder as it unpacks, that its
            archives unpack to, the preferred first. Media are looked for there and in the media root; nowhere else,
            because other sets call other files the same (see ``MediaFinder``).
        shared: of sets whose media are found by name: folders, as patterns too, that mirrors put them in and that other
            sets have as well. Files in them count, and those in folders in them whose names fit the pattern that each
            is given ("": none), but none further below.
        own_in: which files in such a folder, or one of ``media``, are surely the set's: made, once for each, of the
            folder's path, which begins with the root's name, and the names, without endings, of the media in it; says
            it of such a name. None: all are.
        called: what the folders of ``Form.folder`` are called, whichever row they are of; where all rows are of one
            of them, the root may be it under any name that is none of these. None: it may not.
        spelt: what else a folder of ``Form.folder`` may be called, by its name.
        by_name: whether files in these folders are found by name, however deep. Not in sets whose media share names
            ("split_2.mp4", "1.png"): where some are missing, another's would be taken.
        described_in: files that this description was read from: what is prepared depends on them, too.
        option_columns: how many fields of a row hold an option each, to tell of rows that leave some empty; 0: they
            come otherwise, or all are needed.

    The docstring of its module says, in paragraphs that begin so, how it is "Published:", its "Licence:", and shows an
    example "Record:".
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
