"""Field maps: which fields of a data set's rows make the fields of a record. Read from YAML."""

from __future__ import annotations

import math
import string
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from data_pipelines.engine.answers import (
    answered,
    check_removed_marks,
    letter_of_text,
    split_options,
    untagged,
    without_sentences,
)
from data_pipelines.engine.conversations import alternating, response_of, turns_of
from data_pipelines.engine.dataset import TABLES, Row, Split, one_question
from data_pipelines.engine.fields import answer_text, called, listed, opened, plain_number, unusable
from vlm_pg.config_files import nearest_keys, read_tree
from vlm_pg.data.fields import Unreadable, answer_kind_of, close_gap, option_texts, options_of
from vlm_pg.data.tables import Label
from vlm_pg.errors import ConfigError, SampleError, printable
from vlm_pg.settings import Settings
from vlm_pg.types import MediaKind

# What only videos have.
VIDEO_PARTS = ("start", "end", "times", "subtitles", "folder_fps")
_NUMBERS = ("start", "end", "folder_fps")
_PER_MEDIUM = ("path", "data_type", *VIDEO_PARTS)
_NAMES = ("problem_id", "data_source", "category")
_USUAL_FILES: dict[Split, list[str]] = {
    "train": [".:train", *(f"train{ending}" for ending in TABLES)],
    "eval": [".:test", *(f"test{ending}" for ending in TABLES)],
}
GivenAs = Literal["written", "tagged", "letter", "index", "index from 1", "text"]


class Source(Settings):
    """Where a value comes from: a field of the row, or one constant for all rows. A text alone names the field.

    Fields inside others are named with points: "metadata.task", "conversations.0.value".
    """

    ways: ClassVar[tuple[str, ...]] = ("field", "constant")
    field: str | None = Field(None, min_length=1, description="Field of the row.")
    constant: Any = Field(None, description="The value for all rows.")

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, value: Any) -> Any:
        return {"field": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in self.ways if getattr(self, name) is not None and getattr(self, name) is not False]
        if len(given) != 1:
            raise ValueError(f"has {given or 'no source'}; give one of {', '.join(self.ways)}")
        return self

    def fields(self) -> tuple[str, ...]:
        """The row's fields that it reads."""
        return () if self.field is None else (self.field,)


class Value(Source):
    """A value, after these conversions in this order."""

    names: dict[str, str] | None = Field(
        None, description="What each value of the field is called in a record; rows with another value are refused."
    )
    remove: list[str] = Field(
        default_factory=list, description="Exact sentences that are taken away at the start and the end of the text."
    )
    prefix: str = Field("", description="Put before the text, or before each of a list.")
    suffix: str = Field("", description="Put behind it.")

    @field_validator("names", mode="before")
    @classmethod
    def _keys_as_text(cls, value: Any) -> Any:
        """YAML reads some keys as true, false and numbers."""
        return {name_of(key): name for key, name in value.items()} if isinstance(value, dict) else value


class Options(Source):
    """The options of a question."""

    ways: ClassVar[tuple[str, ...]] = ("field", "constant", "columns", "in_question")
    columns: list[str] | None = Field(None, min_length=2, description="Fields of the row that hold one option each.")
    in_question: bool = Field(False, description="They are the last lines of the question: 'A. red'.")
    separator: str | None = Field(None, min_length=1, description="What stands between them where they are one text.")

    def fields(self) -> tuple[str, ...]:
        return (*super().fields(), *(self.columns or ()))


class Answer(Source):
    """The right answer."""

    given_as: GivenAs = Field(
        "written",
        description="How it names an option, in questions with options: letter, index (from 0), index from 1, text, or "
        "written: any spelling that only one option fits. tagged: between <answer> and </answer>.",
    )
    separator: str = Field(",", min_length=1, description="What stands between several right options in one text.")


class Fields(Settings):
    """The fields of a record, as the docstring of ``vlm_pg.data.records`` describes them."""

    problem_id: Value | None = Field(None, description="Without it rows are called by their file and line.")
    problem: Value | None = None
    data_type: Value | None = None
    problem_type: Value | None = Field(None, description="How the answer is checked.")
    options: Options | None = None
    answer: Answer | None = None
    process: Value | None = None
    conversation: Value | None = Field(
        None, description="List of turns, instead of problem, problem_type, options and answer."
    )
    chosen: Value | None = Field(None, description="The better response of a pair: a text, or a list of turns.")
    rejected: Value | None = Field(None, description="The worse response.")
    path: Value | None = None
    video: Value | None = Field(None, description="Paths of videos, instead of path and data_type; image alike.")
    image: Value | None = None
    data_source: Value | None = None
    category: Value | None = None
    start: Value | None = None
    end: Value | None = None
    times: Value | None = None
    subtitles: Value | None = None
    folder_fps: Value | None = None

    @field_validator("problem_type")
    @classmethod
    def _known_kinds(cls, value: Value | None) -> Value | None:
        for kind in [] if value is None else [value.constant] if value.field is None else (value.names or {}).values():
            try:
                answer_kind_of({"problem_type": kind})
            except SampleError as fault:
                raise ValueError(str(fault)) from None
        return value

    @model_validator(mode="after")
    def _one_way_to_answers(self) -> Self:
        given = [name for name in ("problem", "problem_type", "options", "answer") if getattr(self, name) is not None]
        if self.conversation is not None:
            if given:
                raise ValueError(f"has {given[0]} beside conversation, which holds question and answers; leave it out")
            return self
        needed = ["problem", *(["problem_type", "answer"] if self.chosen is None or self.answer else [])]
        if missing := ", ".join(name for name in needed if name not in given):
            ways = "problem, problem_type and answer, problem and chosen, or conversation"
            raise ValueError(f"has no {missing}; give {ways}")
        return self

    @model_validator(mode="after")
    def _one_way_to_media(self) -> Self:
        if self.media() and (self.path or self.data_type):
            raise ValueError("has video or image beside path or data_type; give video and image, or path and data_type")
        if not self.media() and self.data_type is None:
            raise ValueError("has no data_type; give it, or video and image for the paths of each")
        return self

    def media(self) -> dict[MediaKind, Value]:
        """Where paths come from, by kind, if each kind has fields of its own."""
        given: dict[MediaKind, Value | None] = {"video": self.video, "image": self.image}
        return {kind: source for kind, source in given.items() if source is not None}

    def sources(self) -> dict[str, Value]:
        """Those that are one value of the record each, by name."""
        apart = {*self.media(), "conversation", "chosen", "rejected"}
        given = {name: getattr(self, name) for name in type(self).model_fields if name not in apart}
        return {name: source for name, source in given.items() if isinstance(source, Value)}

    def optional(self) -> set[str]:
        """The sources that some rows may lack: an image has no start, a text no path."""
        if self.data_type is not None and self.data_type.field is None:
            return set()
        return set(VIDEO_PARTS) if self.media() else {"path", *VIDEO_PARTS}


class FieldMap(Settings):
    """One data set."""

    name: str = Field(pattern=r"^[\w.-]{1,80}$", description="Of the data set, and of records without data_source.")
    fields: Fields
    files: dict[Split, list[str]] = Field(
        default_factory=_USUAL_FILES.copy,
        description="Glob patterns below the folder of the data set; FOLDER:split for shards of Parquet.",
    )
    media_folders: list[str] = Field(
        default_factory=list, description="Glob patterns below the media root that paths of rows start from."
    )
    keyed_by: str | None = Field(None, description="The file is one object of rows: the field their names become.")
    file_is_row: bool = Field(False, description="Each file is one object, which is one row.")
    questions: str | None = Field(
        None, description="The row's list of questions. Each is read as a row of its own with the row's other fields."
    )


def read_map(path: Path) -> FieldMap:
    """The map in a YAML file.

    Raises ConfigError: it cannot be read, has unknown keys (with the nearest known), or names an unknown answer kind.
    """
    try:
        return FieldMap.model_validate(read_tree(path).values)
    except ValidationError as error:
        lines = "\n  ".join(_described(dict(details)) for details in error.errors())
        raise ConfigError(f"The map of fields {printable(str(path), 300)} cannot be used:\n  {lines}") from None


def _described(details: dict[str, Any]) -> str:
    key = ".".join(map(str, details["loc"]))
    if details["type"] == "extra_forbidden":
        near = nearest_keys(key, FieldMap)
        return f"{key} is not a known key. {f'Did you mean {near[0]}?' if near else 'Remove it.'}"
    if details["type"] == "missing":
        return f"{key} is missing. Add it."
    message = details["msg"].removeprefix("Value error, ")
    return f"{key} is {printable(repr(details['input']), 80)}: {message[:1].lower() + message[1:]}. Correct it."


def name_of(value: Any) -> str:
    """A value as a key of ``Value.names``: name_of(True) == "true", name_of(2.0) == "2"."""
    return str(value).lower() if isinstance(value, bool) or value in ("True", "False") else plain_number(value)


def mapped_record(field_map: FieldMap, row: Row) -> dict[str, Any]:
    """One question as a record.

    Raises SampleError: it lacks a field that the map names, or a conversion does not fit its value.
    """
    if not isinstance(row, Mapping):
        raise unusable("not_a_record", f"the question is a {type(row).__name__}", "An object with named fields")
    fields = field_map.fields
    record = _media(fields, row) | _responses(fields, row)
    question = record.get("problem") if fields.problem is None else _raw(fields.problem, row)
    if fields.conversation is not None:
        record["problem"] = _convert(fields.conversation, question, "problem")
    for field, source in fields.sources().items():
        # A row may lack fields of media that its kind of media has not.
        kinds = record.get("data_type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        needless = [*(VIDEO_PARTS if "video" not in kinds else ()), *(("path",) if kinds in (["text"], []) else ())]
        if field not in needless or field not in fields.optional() or _has(row, source):
            record[field] = _converted(source, row, field)
    for field in _NAMES:
        # A whole number is a name: what is called 3 in one file is 3.0 in a table that holds fractions.
        value = record.get(field)
        if isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1:
            record[field] = plain_number(value)
    record["data_source"] = record.get("data_source") or field_map.name
    if isinstance(record["problem"], str):
        path = record.get("path")
        media = len(path) if isinstance(path, list) else int(path not in (None, ""))
        check_removed_marks(str(question), record["problem"], media)
    answer, options = fields.answer, _options(fields, row, record)
    if answer is None:
        return record | {"options": options}
    is_choice = answer_kind_of(record) == "multiple_choice" and answer.given_as in ("text", "written")
    # Some options were lost, and the answer gives the right one's text.
    if is_choice and (closed := close_gap(options, answer_text({"answer": _raw(answer, row)}, "answer"))):
        return record | answered(record["problem_type"], closed.letter, closed.options)
    gold = _gold(answer, row, record, options)
    if answer.given_as in ("letter", "index", "index from 1", "text"):
        options = list(options_of({"options": options}))  # the letter is one of theirs, not an option's text
    return record | answered(record["problem_type"], gold, options)


def mapped_questions(field_map: FieldMap, row: Row, name: str) -> Iterable[tuple[str, Row]]:
    """The questions of a row, each under the id that the map finds in it; without one under its row's name.

    Raises SampleError: the row has no such list of questions.
    """
    own_id = field_map.fields.problem_id
    found = _nested_questions(field_map.questions, row, name) if field_map.questions else one_question(row, name)
    for given, question in found:
        if own_id is not None and isinstance(question, Mapping):
            with suppress(SampleError):  # the question is refused for it later
                given = called({"id": _converted(own_id, question, "problem_id")}, "id")
        yield given, question


def _nested_questions(field: str, row: Row, name: str) -> Iterable[tuple[str, Row]]:
    """The questions in a list of the row, each with the row's other fields; the question's own take precedence."""
    questions = listed(opened(_found(row, field)), f"'{field}'")
    if not isinstance(questions, list):
        raise unusable("wrong_type", f"'{field}' is a {type(questions).__name__}", "A list of questions")
    rest = {key: value for key, value in row.items() if key != field}
    return [
        (f"{name}-{number}", {**rest, **question} if isinstance(question, Mapping) else question)
        for number, question in enumerate(questions, start=1)
    ]


def _found(row: Row, field: str) -> Any:
    """The value of a field, or of one inside others: "metadata.task".

    Raises SampleError: ``missing_field``, ``unreadable_value`` or ``uneven_lists``.
    """
    value: Any = row
    for part in (field,) if field in row else field.split("."):
        value = opened(value)
        if isinstance(value, Mapping) and part in value:
            value = value[part]
            continue
        if part.isdecimal():
            value = listed(value, f"what holds '{field}'")
        if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise unusable("missing_field", f"the row has no '{field}', which the map names", "A row with it")
    if isinstance(value, Unreadable):
        raise unusable("unreadable_value", f"'{field}' is {value.what}", "A value that can be read")
    return value


def _has(row: Row, source: Value) -> bool:
    """Whether the row has the field, empty or not."""
    try:
        _raw(source, row)
    except SampleError as fault:
        return fault.reason != "missing_field"
    return True


def _media(fields: Fields, row: Row) -> dict[str, Any]:
    """Path and data type of a row that has its images and videos in fields of their own.

    Raises SampleError: ``missing_field``: it has neither.
    """
    if not (sources := fields.media()):
        return {}
    found: list[tuple[str, Any]] = []
    for kind, source in sources.items():
        value = _converted(source, row, "path") if _has(row, source) else None
        found += [(kind, one) for one in (value if isinstance(value, list) else [value]) if not _is_missing(one)]
    if not found:
        came = (
            f"the row has nothing under {' or '.join(repr(name) for one in sources.values() for name in one.fields())}"
        )
        raise unusable("missing_field", came, "The path of an image or a video")
    kinds, paths = [kind for kind, _ in found], [path for _, path in found]
    return {"data_type": kinds if len(set(kinds)) > 1 else kinds[0], "path": paths if len(paths) > 1 else paths[0]}


def _responses(fields: Fields, row: Row) -> dict[str, Any]:
    """Question, turns and rejected response of a row with a conversation or a preference pair."""
    found: dict[str, Any] = {}
    turns = [("user", "")]  # the map's problem
    if (source := fields.conversation) is not None:
        turns = turns_of(_raw(source, row), source.field or "conversation")
        found["problem"] = turns[0][1] if turns else ""
    if (source := fields.chosen) is not None:
        turns.append(("assistant", _response(source, row)))
    if fields.conversation or fields.chosen:
        found["turns"] = alternating(turns)[1:]
    if (source := fields.rejected) is not None:
        found["rejected"] = _response(source, row)
    return found


def _response(source: Value, row: Row) -> Any:
    return _convert(source, response_of(_raw(source, row), source.field or "response"), "response")


def _raw(source: Source, row: Row) -> Any:
    return source.constant if source.field is None else _found(row, source.field)


def _converted(source: Value, row: Row, name: str) -> Any:
    return _convert(source, _raw(source, row), name)


def _convert(source: Value, value: Any, name: str) -> Any:
    if name in _PER_MEDIUM:
        value = opened(value)
    if source.names is not None:
        if value is None or name_of(value) not in source.names:
            raise unusable("unknown_value", f"'{source.field}' is '{str(value)[:80]}'", f"One of {list(source.names)}")
        value = source.names[name_of(value)]
    if isinstance(value, str) and source.remove:
        value = without_sentences(value, source.remove)
    if source.prefix or source.suffix:
        value = _around(source, value)
    return _number(value, name) if name in _NUMBERS else value


def _around(source: Value, value: Any) -> Any:
    if isinstance(value, list):
        return [_around(source, one) for one in value]
    if value is None or value == "":
        return value
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise unusable("wrong_type", f"'{source.field}' is a {type(value).__name__}", "Text, or a list of texts,")
    return f"{source.prefix}{value}{source.suffix}"


def _number(value: Any, name: str) -> Any:
    """A number, or one as text, of seconds or pictures a second; what is neither is judged with the record."""
    is_written = isinstance(value, str) and bool(value.strip())
    if not is_written and (isinstance(value, bool) or not isinstance(value, int)):
        return value
    try:
        return float(value)
    except (ValueError, OverflowError):  # whole numbers have no largest one
        allowed = "A number of pictures a second" if name == "folder_fps" else "A number of seconds"
        raise unusable("bad_clip", f"'{name}' is '{str(value)[:80]}'", allowed) from None


def _options(fields: Fields, row: Row, record: dict[str, Any]) -> list[str]:
    """The options as they are written; those that stand in the question leave it."""
    source = fields.options
    if source is None:
        return []
    if source.in_question:
        if not isinstance(record["problem"], str):
            raise unusable("wrong_type", f"the question is a {type(record['problem']).__name__}", "Text")
        record["problem"], options = split_options(record["problem"], gap=True)
        return options
    if source.columns is not None:
        values = [_found(row, column) for column in source.columns]
        while values and _is_missing(values[-1]):  # questions with fewer options leave the last columns empty
            values.pop()
        return [_option(value) for value in values]
    value = _raw(source, row)
    if isinstance(value, str):
        value = opened(value) if source.separator is None else value.split(source.separator)
    if value in (None, ""):
        return []
    if not isinstance(value, list):
        raise unusable("wrong_type", f"'{source.field}' is a {type(value).__name__}", "A list of options")
    return [_option(one) for one in value]


def _is_missing(value: Any) -> bool:
    """An empty cell; NaN is one where JSON was written of a table."""
    is_empty = isinstance(value, str) and not value.strip()
    return value is None or is_empty or (isinstance(value, float) and not math.isfinite(value))


def _option(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(value, float) and not math.isfinite(value):
            raise unusable("wrong_type", f"an option is {value}", "Text or a finite number")
        return plain_number(value)
    if not isinstance(value, str):
        raise unusable("wrong_type", f"an option is a {type(value).__name__}", "Text or a number")
    return value.strip()


def _gold(source: Answer, row: Row, record: dict[str, Any], options: list[str]) -> str:
    """What stands between the answer tags of the record."""
    value = _raw(source, row)
    kind = answer_kind_of(record)
    name = source.field or "answer"
    if source.given_as == "tagged":
        value = untagged(answer_text({name: value}, name))
    if kind != "multiple_select":
        return _one_gold(source, value, options, names_option=kind == "multiple_choice")
    value = opened(value)
    values = value if isinstance(value, list) else answer_text({name: value}, name).split(source.separator)
    if not values:
        raise unusable("no_gold_answer", f"'{source.field}' is empty", "The right options")
    return ", ".join(_one_gold(source, one, options, names_option=True) for one in values)


def _one_gold(source: Answer, value: Any, options: list[str], names_option: bool) -> str:
    written = answer_text({source.field or "answer": value}, source.field or "answer")
    if source.given_as == "tagged" or not names_option:
        return written
    texts = option_texts(options_of({"options": options}))
    if source.given_as == "written":
        if written.isdecimal() and int(written) <= len(texts) and written in texts.values():
            raise unusable(
                "ambiguous_answer",
                f"the answer '{written}' may be an option's text or its number",
                "A map that says which (given_as: text, or index)",
            )
        return written
    if source.given_as == "letter":
        letter = written.strip("().: ").upper()
        if letter not in texts:
            raise unusable("answer_not_in_options", f"the answer is '{written[:80]}'", f"One of {list(texts)}")
        return letter
    if source.given_as == "text":
        return list(texts)[string.ascii_uppercase.index(letter_of_text(written, list(texts.values())))]
    number, first = str(value.number) if isinstance(value, Label) else written, int(source.given_as == "index from 1")
    letters = {str(index): letter for index, letter in enumerate(texts, start=first)}
    if number not in letters:
        allowed = f"The number of an option, {first} to {len(letters) - 1 + first},"
        raise unusable("answer_not_in_options", f"the answer is '{number[:80]}'", allowed)
    return letters[number]
