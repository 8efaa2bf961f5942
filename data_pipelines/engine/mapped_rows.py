"""Rows to records by a map of fields."""

from __future__ import annotations

import json
import math
import string
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from data_pipelines.engine.dataset import Row, one_question
from data_pipelines.engine.field_map import VIDEO_PARTS, Answer, FieldMap, Fields, Options, Source, Value, name_of
from data_pipelines.engine.fields import (
    answer_text,
    called,
    listed,
    plain_number,
    unusable,
)
from data_pipelines.engine.options import letter_of_text, split_options
from data_pipelines.engine.questions import answered, check_removed_marks, untagged, without_sentences
from vlm_pg.data.fields import Unreadable
from vlm_pg.data.gold import Closed, answer_kind_of, close_gap, option_texts, options_of
from vlm_pg.data.tables import Label
from vlm_pg.errors import SampleError

_NUMBERS = ("start", "end", "folder_fps")
_PER_MEDIUM = ("path", "data_type", *VIDEO_PARTS)
_NAMES = ("problem_id", "data_source", "category")


def mapped_record(field_map: FieldMap, row: Row, name: str) -> dict[str, Any]:
    """One question as a record.

    Raises:
        SampleError: it lacks a field that the map names, or a conversion does not fit its value.
    """
    if not isinstance(row, Mapping):
        raise unusable("not_a_record", f"the question is a {type(row).__name__}", "An object with named fields")
    fields = field_map.fields
    record: dict[str, Any] = {"problem_id": name, "data_source": field_map.name}
    record |= _media(fields, row)
    for field, source in fields.sources().items():
        if not _may_lack(fields, row, field, record.get("data_type")):
            record[field] = _converted(source, row, field)
    record |= {field: _as_name(record[field]) for field in _NAMES if field in record}
    record["data_source"] = record["data_source"] or field_map.name
    if isinstance(record["problem"], str):
        check_removed_marks(str(_raw(fields.problem, row)), record["problem"], _count_media(record.get("path")))
    options = _options(fields, row, record)
    if closed := _closed(fields.answer, row, record, options):
        return record | answered(record["problem_type"], closed.letter, closed.options)
    gold = _gold(fields.answer, row, record, options)
    if fields.answer.given_as in ("letter", "index", "index from 1", "text"):
        options = list(options_of({"options": options}))  # a letter is one of theirs then, and no option's text
    return record | answered(record["problem_type"], gold, options)


def mapped_questions(field_map: FieldMap, row: Row, name: str) -> Iterable[tuple[str, Row]]:
    """The questions of a row, each under the id that the map finds in it; without one under its row's name.

    Raises:
        SampleError: as ``nested_questions``.
    """
    listed = nested_questions(field_map.questions, row, name) if field_map.questions else one_question(row, name)
    return [(_own_id(field_map.fields, question) or given, question) for given, question in listed]


def nested_questions(field: str, row: Row, name: str) -> Iterable[tuple[str, Row]]:
    """The questions in a list of the row, each with the row's other fields; the question's own come first.

    Raises:
        SampleError: there is no such list.
    """
    questions = listed(_opened(_found(row, field)), f"'{field}'")
    if not isinstance(questions, list):
        raise unusable("wrong_type", f"'{field}' is a {type(questions).__name__}", "A list of questions")
    rest = {key: value for key, value in row.items() if key != field}
    return [
        (f"{name}-{number}", {**rest, **question} if isinstance(question, Mapping) else question)
        for number, question in enumerate(questions, start=1)
    ]


def _own_id(fields: Fields, question: Any) -> str:
    if fields.problem_id is None or not isinstance(question, Mapping):
        return ""
    try:
        return called({"id": _converted(fields.problem_id, question, "problem_id")}, "id")
    except SampleError:  # the question is refused for it later
        return ""


def _found(row: Row, field: str) -> Any:
    """The value of a field, or of one inside others: "metadata.task".

    Raises:
        SampleError: ``missing_field``, ``unreadable_value`` or ``uneven_lists``.
    """
    value: Any = row
    for part in (field,) if field in row else field.split("."):
        value = _opened(value)
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


def _opened(value: Any) -> Any:
    """The list or object that a cell of a table without such types holds as JSON; other values stay as they are."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _has(row: Row, source: Value) -> bool:
    """Whether the row has the field, empty or not."""
    try:
        _raw(source, row)
    except SampleError as fault:
        return fault.reason != "missing_field"
    return True


def _may_lack(fields: Fields, row: Row, field: str, data_type: Any) -> bool:
    """Whether the row lacks this field of its media, and they are of a kind that has no such thing."""
    kinds = data_type if isinstance(data_type, list) else [data_type]
    needless = [*(VIDEO_PARTS if "video" not in kinds else ()), *(("path",) if kinds in (["text"], []) else ())]
    return field in needless and field in fields.optional() and not _has(row, fields.sources()[field])


def _media(fields: Fields, row: Row) -> dict[str, Any]:
    """Path and data type of a row that has its images and videos in fields of their own.

    Raises:
        SampleError: ``missing_field``: it has neither.
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


def _raw(source: Source, row: Row) -> Any:
    return source.constant if source.field is None else _found(row, source.field)


def _converted(source: Value, row: Row, name: str) -> Any:
    value = _raw(source, row)
    if name in _PER_MEDIUM:
        value = _opened(value)
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


def _count_media(path: Any) -> int:
    return len(path) if isinstance(path, list) else int(path not in (None, ""))


def _as_name(value: Any) -> Any:
    """A whole number as text: what is called 3 in one file is 3.0 in a table that holds fractions."""
    is_whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
    return plain_number(value) if is_whole else value


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
    return _list_of_options(source, _raw(source, row))


def _list_of_options(source: Options, value: Any) -> list[str]:
    if isinstance(value, str):
        value = _opened(value) if source.separator is None else value.split(source.separator)
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


def _closed(source: Answer, row: Row, record: dict[str, Any], options: list[str]) -> Closed | None:
    """Options of which some were lost, where the answer is given as the right one's text; see ``close_gap``."""
    if answer_kind_of(record) != "multiple_choice" or source.given_as not in ("text", "written"):
        return None
    return close_gap(options, answer_text({"answer": _raw(source, row)}, "answer"))


def _gold(source: Answer, row: Row, record: dict[str, Any], options: list[str]) -> str:
    """What stands between the answer tags of the record."""
    value = _raw(source, row)
    kind = answer_kind_of(record)
    name = source.field or "answer"
    if source.given_as == "tagged":
        value = untagged(answer_text({name: value}, name))
    if kind != "multiple_select":
        return _one_gold(source, value, options, names_option=kind == "multiple_choice")
    value = _opened(value)
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
        place = string.ascii_uppercase.index(letter_of_text(written, list(texts.values())))
        return list(texts)[place]
    number = str(value.number) if isinstance(value, Label) else written
    return _by_number(number, list(texts), first=1 if source.given_as == "index from 1" else 0)


def _by_number(number: str, letters: list[str], first: int) -> str:
    numbered = {str(place): letter for place, letter in enumerate(letters, start=first)}
    if number not in numbered:
        allowed = f"The number of an option, {first} to {len(letters) - 1 + first},"
        raise unusable("answer_not_in_options", f"the answer is '{number[:80]}'", allowed)
    return numbered[number]
