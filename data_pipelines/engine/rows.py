"""Rows of annotation files to samples: each question is one, or is refused with its reason."""

from __future__ import annotations

import hashlib
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from data_pipelines.engine.dataset import DataSet, Form, Row
from data_pipelines.engine.fields import unusable
from data_pipelines.engine.media_finder import MediaFinder
from vlm_pg.data.fields import Unreadable
from vlm_pg.data.files import RecordPlace, data_folder, root_of
from vlm_pg.data.records import parse_record, with_paths
from vlm_pg.data.tables import Embedded
from vlm_pg.errors import ConfigError, SampleError, printable
from vlm_pg.files import write_bytes_atomic
from vlm_pg.media.content import HEAD_BYTES, shown_head, stored_as
from vlm_pg.types import BadSample, Cue, Sample

_LOOKED_AT = 20


@dataclass(frozen=True)
class LeftOut:
    """A row that is none of the set's questions, and ``why``."""

    sample_id: str
    why: str


@dataclass(frozen=True)
class RowReader:
    """Makes samples of the rows of one form.

    Args:
        form: says how.
        finder: finds media; None for a set without.
        store: writes media that stand inside rows; None as before.
        annotations: the folder of the rows' file.
    """

    form: Form
    finder: MediaFinder | None = None
    store: MediaStore | None = None
    annotations: Path = Path()

    def samples(self, row: Any, name: str, where: str) -> Iterator[Sample | BadSample | LeftOut]:
        """What becomes of each question of a row.

        Args:
            row: as ``Form.rows`` reads it.
            name: the row's own, for questions that have none.
            where: its place, for messages.
        """
        try:
            check_columns(row, self.form)
            questions = list(self.form.questions(row, name))
            if not questions and self.form.empty:
                yield LeftOut(name, self.form.empty)
            elif not questions:
                raise unusable("no_questions", "the row's list of questions is empty", "At least one question")
        except SampleError as fault:
            yield _refused(name, fault, where)
            return
        except Exception as error:  # a row that nobody expected: an error in the data until it is known to be ours
            yield _refused(name, _unexpected(error), where)
            return
        for question_name, question in questions:
            try:
                yield self._sample(question, question_name, where)
            except SampleError as fault:
                yield _refused(question_name, fault, where)

    def _sample(self, question: Row, name: str, where: str) -> Sample:
        try:
            record = self.form.to_record(question, name)
            folder = None if self.form.folder is None else self.form.folder(question, self.annotations)
        except SampleError:
            raise
        except Exception as error:
            raise _unexpected(error) from error
        if self.finder is not None:
            record = self._located(record, folder, self.finder)
        if self.store is not None:
            record = with_paths(record, self.store.unpack)
            if isinstance(told := record.get("subtitles"), Subtitles):
                record |= {"subtitles": self.store.write_subtitles(told)}
        return parse_record(record, where)

    def _located(self, record: dict[str, Any], folder: str | None, finder: MediaFinder) -> dict[str, Any]:
        """The record with its media's and subtitles' paths as they lie below the media root."""

        def path(value: Any) -> Any:
            if isinstance(value, list):
                return [path(one) for one in value]
            return finder.path_of(value, folder, self.annotations) if isinstance(value, str) and value else value

        found = {name: path(record[name]) for name in ("path", "subtitles") if record.get(name)}
        subtitles = found.get("subtitles")
        if self.form.subtitled and isinstance(subtitles, str) and not finder.is_there(subtitles):
            found["subtitles"] = None
        return record | found


def check_columns(row: Any, form: Form) -> None:
    """Refuse what is no row of this form.

    Raises:
        SampleError: ``unreadable_value`` or what else is wrong with one that cannot be read, ``not_a_record``,
            ``missing_field`` or ``other_data_set``.
    """
    if isinstance(row, Unreadable):
        raise SampleError(row.reason, f"the row is {row.what}. One that can be read is expected. Correct it.")
    if not isinstance(row, Mapping):
        raise SampleError("not_a_record", f"the row is a {type(row).__name__}. Named fields are expected. Correct it.")
    missing = _missing(row, form)
    if missing:
        raise SampleError(
            "missing_field",
            f"the row has no {_listed(missing)}. Rows with {_listed(_choices(form))} are expected ({form.name}). Give "
            "the files as their project publishes them.",
        )
    if other := _foreign(row, form):
        raise SampleError("other_data_set", other)


def form_of(dataset: DataSet, path: Path) -> Form:
    """The form that a file's first rows are of.

    Raises:
        ConfigError: none of them, with what is nearest; or all are of another data set, which looks alike.
    """
    suffix = ".parquet" if data_folder(path) is not None else path.suffix.lower()
    tried: list[tuple[int, Form, str]] = []
    unread: Form | None = None
    for form in dataset.forms:
        if suffix not in form.suffixes:
            continue
        try:
            rows = list(islice(form.rows(path), _LOOKED_AT))
        except ConfigError as error:
            tried.append((10_000, form, str(error)))
            continue
        if not rows:
            raise ConfigError(f"Data file '{printable(str(path), 300)}' has no rows. At least one is expected.")
        matching = [(place, row) for place, row in rows if isinstance(row, Mapping) and not _missing(row, form)]
        if matching:
            others = [(place, other) for place, row in matching if (other := _foreign(row, form))]
            if len(others) == len(matching):
                raise ConfigError(f"{shown(path, others[0][0])}: {others[0][1]}")
            return form
        place, row = rows[0]
        lacking = _missing(row, form) if isinstance(row, Mapping) else _choices(form)
        tried.append((len(lacking), form, f"{shown(path, place)}: the row has no {_listed(lacking)}"))
        if all(isinstance(row, Unreadable) for _, row in rows):
            unread = unread or form
    if unread is not None:  # each of its rows is refused with its reason
        return unread
    expected = "; ".join(f"{form.name} ({_listed(_choices(form))})" for form in dataset.forms)
    if not tried:
        suffixes = dict.fromkeys(suffix for form in dataset.forms for suffix in form.suffixes)
        raise ConfigError(
            f"Data file '{printable(str(path), 300)}' ends in '{printable(suffix, 20)}'. {dataset.name} is published "
            f"as {', '.join(suffixes)}: {expected}. Give its annotation files."
        )
    _, nearest, why = min(tried, key=lambda one: one[0])
    raise ConfigError(
        f"{why.removesuffix('.')}. Nearest is the form {nearest.name}; {dataset.name} is read in the forms {expected}. "
        "Give the files as their project publishes them, or use 'vlm-pg prepare generic' with a map of fields."
    )


def row_names(paths: Sequence[Path]) -> dict[Path, str]:
    """What rows are named after: the file's stem, with its folder's name or a number before it where others have it.

    A folder of a data set is named after itself and the split: "gsm8k-train".

    Those of algebra/train.json and geometry/train.json: "algebra-train" and "geometry-train".
    """
    files = {path: path.resolve() for path in paths}
    # A link is named as it is written: what it points to may be called by a hash.
    written = {file: path.absolute() for path, file in reversed(files.items())}
    names = {file: printable(_stem(written[file])) for file in files.values()}
    counts = _counts(names)
    names = {file: f"{written[file].parent.name}-{name}" if counts[name] > 1 else name for file, name in names.items()}
    counts = _counts(names)
    names = {
        file: f"{number}-{name}" if counts[name] > 1 else name
        for number, (file, name) in enumerate(names.items(), start=1)
    }
    return {path: names[file] for path, file in files.items()}


def shown(path: Path, place: RecordPlace) -> str:
    """A row's place with the whole path, for messages that stop a run."""
    file = root_of(path) / place.file if place.file else path
    return f"{printable(str(file), 300)}:{place}"


def _counts(names: Mapping[Path, str]) -> Mapping[str, int]:
    from collections import Counter

    return Counter(names.values())


def _stem(path: Path) -> str:
    folder = data_folder(path)
    return path.stem if folder is None else folder.name


def _choices(form: Form) -> list[tuple[str, ...]]:
    return [(names,) if isinstance(names, str) else names for names in form.columns]


def _missing(row: Mapping[str, Any], form: Form) -> list[tuple[str, ...]]:
    return [names for names in _choices(form) if not any(name in row for name in names)]


def _foreign(row: Mapping[str, Any], form: Form) -> str:
    """Why a row is none of this form, though it has its columns; "" where nothing says so."""
    found = [name for name in form.foreign if row.get(name) not in (None, "", [], {})]
    if not found:
        return ""
    return (
        f"the row has '{found[0]}', as rows of {form.foreign[found[0]]} have and those of {form.name} have not. "
        "Prepare it as what it is, or use 'vlm-pg prepare generic' with a map of fields."
    )


def _listed(choices: Sequence[Sequence[str]]) -> str:
    return ", ".join(" or ".join(names) for names in choices)


def _refused(name: str, fault: SampleError, where: str) -> BadSample:
    return BadSample(printable(name, 200), fault.reason, str(fault), where, fault.trace)


def _unexpected(error: Exception) -> SampleError:
    return SampleError(
        "unexpected_row",
        f"the row cannot be read as this data set's: {type(error).__name__} {printable(str(error), 200)}. Fields as "
        "its project publishes them are expected. Correct the row, or report this if it is as published.",
        "".join(traceback.format_exception(error)),
    )


FOLDER = "unpacked"
_NAME_CHARACTERS = 40


class MediaStore:
    """Files below ``root / "unpacked"``. Equal media are one file, whichever rows, data sets or runs they come from.

    Args:
        root: the media root; paths are relative to it.
    """

    def __init__(self, root: Path):
        self._root = root

    def unpack(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row with paths in the place of its media, lists of them included.

        Raises:
            SampleError: ``unreadable_media``: a medium is not what its column holds, or nothing that can be read.
            ConfigError: it cannot be written.
        """
        return {name: self._path(name, value) for name, value in row.items()}

    def write_subtitles(self, told: Subtitles) -> str | None:
        """The path of a file with these subtitles; None where nothing is said.

        Raises:
            ConfigError: it cannot be written.
        """
        if not any(cue.text.split() for cue in told.cues):
            return None
        # Half of a sign that a text was cut in is none that can be written.
        return self._stored(as_vtt(told.cues).encode(errors="replace"), ".vtt")

    def _path(self, name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [self._path(name, one) for one in value]
        return self._write(name, value) if isinstance(value, Embedded) else value

    def _write(self, name: str, medium: Embedded) -> str:
        head = medium.data[:HEAD_BYTES]
        kind, suffix = stored_as(head) or (None, "")
        if kind is None or medium.kind not in (None, kind):
            raise SampleError(
                "unreadable_media",
                f"'{printable(name, 100)}' should hold {medium.kind or 'an image or video'} and {shown_head(head)}. "
                "JPEG, PNG, WebP and the usual video containers are read. Convert it, or remove the row.",
            )
        return self._stored(medium.data, suffix)

    def _stored(self, data: bytes, suffix: str) -> str:
        digest = hashlib.sha256(data).hexdigest()[:_NAME_CHARACTERS]
        relative = Path(FOLDER, digest[:2], f"{digest}{suffix}")
        try:
            _write_once(self._root / relative, data)
        except OSError as error:
            raise ConfigError(
                f"'{self._root / relative}' cannot be written: {error.strerror}. Media that stand inside rows are "
                "written below --media-root. Make room, or choose another."
            ) from error
        return relative.as_posix()


def _write_once(path: Path, data: bytes) -> None:
    """One that is there whole, whatever its name says, is left as it is."""
    if path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomic(path, data, durable=False)


# A reader of subtitle files takes "10:30 -> 11:00" for times that somebody typed.
_OF_CLOCK = re.compile(r":(?=\s{0,9}\d)")


@dataclass(frozen=True)
class Subtitles:
    """Subtitles in the place of their file's path, in seconds since the video's first frame."""

    cues: tuple[Cue, ...]


def as_vtt(cues: Sequence[Cue]) -> str:
    """Subtitles as a WebVTT file: texts on one line each, times in milliseconds.

    Signs that mean something in such files are escaped (W3C WebVTT, 4.2.2), so that every text is read as it is:
    as_vtt([Cue(1.5, 2.0, "a <b>")]) == "WEBVTT\\n\\n00:00:01.500 --> 00:00:02.000\\na &lt;b&gt;\\n".
    """
    return "\n".join(_blocks(cues))


def _blocks(cues: Sequence[Cue]) -> Iterator[str]:
    yield "WEBVTT\n"
    for cue in cues:
        words = " ".join(cue.text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        yield f"{_clock(cue.start)} --> {_clock(cue.end)}\n{_OF_CLOCK.sub('&#58;', words)}\n"


def _clock(seconds: float) -> str:
    """00:01:02.345"""
    minutes, milliseconds = divmod(round(seconds * 1000), 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{milliseconds // 1000:02}.{milliseconds % 1000:03}"
