"""Rows of annotation files to samples: each question is one, or is refused with its reason; media of rows stored."""

from __future__ import annotations

import hashlib
import re
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from data_pipelines.engine.dataset import DataSet, Form
from data_pipelines.engine.fields import unusable
from data_pipelines.engine.media_finder import MediaFinder
from vlm_pg.data.fields import Unreadable
from vlm_pg.data.files import RecordLocation, data_folder, root_of
from vlm_pg.data.records import parse_record, with_paths
from vlm_pg.data.tables import Embedded
from vlm_pg.errors import ConfigError, SampleError, printable
from vlm_pg.files import write_bytes_atomic
from vlm_pg.media.container import HEAD_BYTES, shown_head, stored_as
from vlm_pg.types import BadSample, Cue, Sample

_PEEKED_ROWS = 20
_UNPACKED = "unpacked"
_NAME_CHARACTERS = 40
# A reader of subtitle files takes "10:30 -> 11:00" for a time range.
_CLOCK_COLON = re.compile(r":(?=\s{0,9}\d)")


@dataclass(frozen=True)
class SkippedRow:
    """A row that is not one of the set's questions, with the reason."""

    sample_id: str
    reason: str


@dataclass(frozen=True)
class RowReader:
    """Makes samples of the rows of one form of a data set.

    Args:
        finder: locates media; None for a set without.
        store: writes media that stand inside rows; None as before.
        annotations: the folder of the rows' file.
    """

    dataset: DataSet
    form: Form
    finder: MediaFinder | None = None
    store: MediaStore | None = None
    annotations: Path = Path()

    def samples(self, row: Any, name: str, where: str) -> Iterator[Sample | BadSample | SkippedRow]:
        """The outcome of each question of a row.

        Args:
            row: as ``Form.rows`` reads it.
            name: unique name of the row, for questions that have none.
            where: location of the row, for messages.
        """
        try:
            check_columns(row, self.form)
            questions = list(self.form.questions(row, name))
            if not questions and not self.form.empty:
                raise unusable("no_questions", "the row's list of questions is empty", "At least one question")
        except Exception as error:  # an unexpected row is an error in the data until it is known to be ours
            yield _refused(name, error, where)
            return
        if not questions:
            yield SkippedRow(name, self.form.empty)
        for question_name, question in questions:
            try:
                defaults = {"problem_id": question_name, "data_type": "video", "data_source": self.dataset.name}
                record = defaults | self.form.to_record(question)
                folder = None if self.form.folder is None else self.form.folder(question, self.annotations)
            except Exception as error:
                yield _refused(question_name, error, where)
                continue
            try:
                yield self._sample(record, folder, where)
            except SampleError as fault:
                yield _refused(question_name, fault, where)

    def _sample(self, record: dict[str, Any], folder: str | None, where: str) -> Sample:
        if self.finder is not None:
            record = self._located(record, folder, self.finder)
        if self.store is not None:
            record = with_paths(record, self.store.unpack)
            if isinstance(subtitles := record.get("subtitles"), Subtitles):
                record |= {"subtitles": self.store.write_subtitles(subtitles)}
        return parse_record(record, where)

    def _located(self, record: dict[str, Any], folder: str | None, finder: MediaFinder) -> dict[str, Any]:
        """The record with paths of media and subtitles below the media root."""

        def path(value: Any) -> Any:
            if isinstance(value, list):
                return [path(one) for one in value]
            return finder.path_of(value, folder, self.annotations) if isinstance(value, str) and value else value

        found = {name: path(record[name]) for name in ("path", "subtitles") if record.get(name)}
        subtitles = found.get("subtitles")
        if self.form.subtitled and isinstance(subtitles, str) and not finder.is_file(subtitles):
            found["subtitles"] = None
        return record | found


def check_columns(row: Any, form: Form) -> None:
    """Refuse a value that is no row of this form.

    Raises SampleError: the reason of an ``Unreadable``, ``not_a_record``, ``missing_field`` or ``other_data_set``.
    """
    if isinstance(row, Unreadable):
        raise SampleError(row.reason, f"the row is {row.what}. One that can be read is expected. Correct it.")
    if not isinstance(row, Mapping):
        raise SampleError("not_a_record", f"the row is a {type(row).__name__}. Named fields are expected. Correct it.")
    if missing := _missing(row, form):
        raise SampleError(
            "missing_field",
            f"the row has no {_listed(missing)}. Rows with {_listed(_choices(form))} are expected ({form.name}). Give "
            "the files as their project publishes them.",
        )
    if foreign := _foreign(row, form):
        raise SampleError("other_data_set", foreign)


def form_of(dataset: DataSet, path: Path) -> Form:
    """The form of a file by its first rows.

    Raises ConfigError: none matches, with the nearest one; or all rows are of another, similar data set.
    """
    suffix = ".parquet" if data_folder(path) is not None else path.suffix.lower()
    rejected: list[tuple[int, Form, str]] = []
    unreadable: Form | None = None
    for form in dataset.forms:
        if suffix not in form.suffixes:
            continue
        try:
            rows = list(islice(form.rows(path), _PEEKED_ROWS))
        except ConfigError as error:
            rejected.append((10_000, form, str(error)))
            continue
        if not rows:
            raise ConfigError(f"Data file '{printable(str(path), 300)}' has no rows. At least one is expected.")
        matching = [(location, row) for location, row in rows if isinstance(row, Mapping) and not _missing(row, form)]
        if matching:
            others = [(location, other) for location, row in matching if (other := _foreign(row, form))]
            if len(others) == len(matching):
                raise ConfigError(f"{_location(path, others[0][0])}: {others[0][1]}")
            return form
        location, row = rows[0]
        lacking = _missing(row, form) if isinstance(row, Mapping) else _choices(form)
        rejected.append((len(lacking), form, f"{_location(path, location)}: the row has no {_listed(lacking)}"))
        if all(isinstance(row, Unreadable) for _, row in rows):
            unreadable = unreadable or form
    if unreadable is not None:  # each of its rows is refused with its reason
        return unreadable
    expected = "; ".join(f"{form.name} ({_listed(_choices(form))})" for form in dataset.forms)
    if not rejected:
        suffixes = dict.fromkeys(suffix for form in dataset.forms for suffix in form.suffixes)
        raise ConfigError(
            f"Data file '{printable(str(path), 300)}' ends in '{printable(suffix, 20)}'. {dataset.name} is published "
            f"as {', '.join(suffixes)}: {expected}. Give its annotation files."
        )
    _, nearest, why = min(rejected, key=lambda one: one[0])
    raise ConfigError(
        f"{why.removesuffix('.')}. Nearest is the form {nearest.name}; {dataset.name} is read in the forms {expected}. "
        "Give the files as their project publishes them, or use 'vlm-pg prepare generic' with a map of fields."
    )


def row_names(paths: Sequence[Path]) -> dict[Path, str]:
    """Prefix of the names of each file's rows: its stem, after its folder's name or a number where others have it.

    A folder of a data set has the name of folder and split: "gsm8k-train". Those of algebra/train.json and
    geometry/train.json: "algebra-train" and "geometry-train".
    """
    files = {path: path.resolve() for path in paths}
    # A link has the name it is given: its target may be named by a hash.
    written = {file: path.absolute() for path, file in reversed(files.items())}
    names = {}
    for file in files.values():
        folder = data_folder(written[file])
        names[file] = printable(written[file].stem if folder is None else folder.name)
    counts = Counter(names.values())
    names = {file: f"{written[file].parent.name}-{name}" if counts[name] > 1 else name for file, name in names.items()}
    counts = Counter(names.values())
    names = {
        file: f"{number}-{name}" if counts[name] > 1 else name
        for number, (file, name) in enumerate(names.items(), start=1)
    }
    return {path: names[file] for path, file in files.items()}


def _location(path: Path, location: RecordLocation) -> str:
    """A row's location with the whole path, for messages that stop a run."""
    return f"{printable(str(root_of(path) / location.file if location.file else path), 300)}:{location}"


def _choices(form: Form) -> list[tuple[str, ...]]:
    return [(names,) if isinstance(names, str) else names for names in form.columns]


def _missing(row: Mapping[str, Any], form: Form) -> list[tuple[str, ...]]:
    return [names for names in _choices(form) if not any(name in row for name in names)]


def _foreign(row: Mapping[str, Any], form: Form) -> str:
    """Why a row with the columns of this form is of another data set; "" where nothing shows it."""
    found = [name for name in form.foreign if row.get(name) not in (None, "", [], {})]
    if not found:
        return ""
    return (
        f"the row has '{found[0]}', as rows of {form.foreign[found[0]]} have and those of {form.name} have not. "
        "Prepare it as what it is, or use 'vlm-pg prepare generic' with a map of fields."
    )


def _listed(choices: Sequence[Sequence[str]]) -> str:
    return ", ".join(" or ".join(names) for names in choices)


def _refused(name: str, error: Exception, where: str) -> BadSample:
    """A question or row refused for an error. One that is no SampleError is taken for an error in the data."""
    fault = error
    if not isinstance(fault, SampleError):
        fault = SampleError(
            "unexpected_row",
            f"the row cannot be read as this data set's: {type(error).__name__} {printable(str(error), 200)}. Fields "
            "as its project publishes them are expected. Correct the row, or report this if it is as published.",
            "".join(traceback.format_exception(error)),
        )
    return BadSample(printable(name, 200), fault.reason, str(fault), where, fault.trace)


@dataclass(frozen=True)
class Subtitles:
    """Subtitles published in a form of the set's own, instead of their file's path: times in seconds."""

    cues: tuple[Cue, ...]


class MediaStore:
    """Media inside rows as files below ``root / "unpacked"``, named by content: equal media are one file.

    Args:
        root: the media root; paths are relative to it.
    """

    def __init__(self, root: Path):
        self._root = root

    def unpack(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row with paths instead of its media, lists of them included.

        Raises:
            SampleError: ``unreadable_media``: a medium is of another type than its column, or unreadable.
            ConfigError: it cannot be written.
        """
        return {name: self._path(name, value) for name, value in row.items()}

    def write_subtitles(self, subtitles: Subtitles) -> str | None:
        """The path of a WebVTT file with these subtitles; None where all are empty.

        Raises ConfigError: it cannot be written.
        """
        if not any(cue.text.split() for cue in subtitles.cues):
            return None
        # A lone surrogate, of a text that was cut, cannot be encoded.
        return self._stored(as_vtt(subtitles.cues).encode(errors="replace"), ".vtt")

    def _path(self, name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [self._path(name, one) for one in value]
        if not isinstance(value, Embedded):
            return value
        head = value.data[:HEAD_BYTES]
        kind, suffix = stored_as(head) or (None, "")
        if kind is None or value.kind not in (None, kind):
            raise SampleError(
                "unreadable_media",
                f"'{printable(name, 100)}' should hold {value.kind or 'an image or video'} and {shown_head(head)}. "
                "JPEG, PNG, WebP and the usual video containers are read. Convert it, or remove the row.",
            )
        return self._stored(value.data, suffix)

    def _stored(self, data: bytes, suffix: str) -> str:
        digest = hashlib.sha256(data).hexdigest()[:_NAME_CHARACTERS]
        relative = Path(_UNPACKED, digest[:2], f"{digest}{suffix}")
        path = self._root / relative
        try:
            # A file with the right name may be damaged.
            if not (path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_bytes_atomic(path, data, durable=False)
        except OSError as error:
            raise ConfigError(
                f"'{path}' cannot be written: {error.strerror}. Media that stand inside rows are "
                "written below --media-root. Make room, or choose another."
            ) from error
        return relative.as_posix()


def as_vtt(cues: Sequence[Cue]) -> str:
    """Subtitles as a WebVTT file: one line a text, times in milliseconds, markup escaped (W3C WebVTT, 4.2.2).

    as_vtt([Cue(1.5, 2.0, "a <b>")]) == "WEBVTT\\n\\n00:00:01.500 --> 00:00:02.000\\na &lt;b&gt;\\n".
    """
    blocks = ["WEBVTT\n"]
    for cue in cues:
        words = " ".join(cue.text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        blocks.append(f"{_clock(cue.start)} --> {_clock(cue.end)}\n{_CLOCK_COLON.sub('&#58;', words)}\n")
    return "\n".join(blocks)


def _clock(seconds: float) -> str:
    """00:01:02.345"""
    minutes, milliseconds = divmod(round(seconds * 1000), 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{milliseconds // 1000:02}.{milliseconds % 1000:03}"
