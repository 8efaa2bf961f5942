"""Readers of row fields: each returns a value of the expected type or refuses the row with a reason."""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any

from vlm_pg.data.fields import Unreadable
from vlm_pg.errors import SampleError, printable
from vlm_pg.media.paths import EXTENSIONS

_WHOLE = re.compile(r"[-+]?[0-9]{1,15}(?:\.0{0,9})?")


def unusable(reason: str, came: str, allowed: str) -> SampleError:
    """The refusal of a row: "CAME. ALLOWED is expected. Correct the row, or remove it."."""
    return SampleError(reason, f"{printable(came, 400)}. {allowed} is expected. Correct the row, or remove it.")


def first_of(row: Mapping[str, Any], *names: str) -> Any:
    """The first of these fields that is present and not empty; None without one."""
    return next((row[name] for name in names if row.get(name) not in (None, "")), None)


def plain_number(value: Any) -> str:
    """A value as text; a whole number that a table stores as a float (142.0) without its point."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def published(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Those of these fields that are not empty, for a record's ``details``.

    A table has every field in every row, JSON only those that are set: dropping empty ones gives both forms of a set
    equal details. published({"unit": None, "grade": "4"}, "unit", "grade") == {"grade": "4"}
    """
    empty: tuple[Any, ...] = (None, "", [], {})
    return {name: row[name] for name in names if name in row and row[name] not in empty}


def answer_text(row: Mapping[str, Any], *names: str) -> str:
    """The first of these fields that is present, a text or a number, as stripped text.

    Raises SampleError: ``no_gold_answer``, ``wrong_type`` or ``unreadable_value``.
    """
    value = first_of(row, *names)
    wanted = " or ".join(f"'{name}'" for name in names)
    if value is None:
        raise unusable("no_gold_answer", f"the row has no {wanted}", "The right answer under that name")
    if (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and math.isfinite(value)):
        return plain_number(value)
    text = text_of(row, *names).strip()
    if not text:
        raise unusable("no_gold_answer", f"{wanted} is empty", "The right answer")
    return text


def whole_number(row: Mapping[str, Any], *names: str) -> str:
    """The first of these fields as the digits of a whole number: "027", 27.0 and "27.0" are "27", "-1.0" is "-1".

    Raises SampleError: ``no_gold_answer``: it is no such number; or as ``answer_text``.
    """
    text = answer_text(row, *names)
    if not _WHOLE.fullmatch(text):
        raise unusable("no_gold_answer", f"the answer is '{text[:80]}'", "A whole number in digits")
    return str(int(text.partition(".")[0]))


def text_of(row: Mapping[str, Any], *names: str) -> str:
    """The text of the first of these fields that is present.

    Raises SampleError: ``missing_field``, ``wrong_type`` or ``unreadable_value``.
    """
    value = first_of(row, *names)
    wanted = " or ".join(f"'{name}'" for name in names)
    if value is None:
        raise unusable("missing_field", f"the row has no {wanted}", "Text under that name")
    if isinstance(value, Unreadable):
        raise unusable("unreadable_value", f"{wanted} is {value.what}", "Text that can be read")
    if not isinstance(value, str):
        raise unusable("wrong_type", f"{wanted} is a {type(value).__name__}", "Text")
    return value


def called(row: Mapping[str, Any], *names: str) -> str:
    """The first of these fields as a name: stripped text, or a whole number as text. Raises as ``text_of``."""
    value = first_of(row, *names)
    if isinstance(value, numbers.Real) and plain_number(value).lstrip("-").isdigit():
        return plain_number(value)
    text = text_of(row, *names).strip()
    if not text:
        raise unusable("missing_field", f"'{names[0]}' is empty", "A name or a number under that name")
    return text


def number_of(row: Mapping[str, Any], name: str) -> float:
    """A finite number. Raises SampleError: ``missing_field`` or ``wrong_type``."""
    value = row.get(name)
    if value is None:
        raise unusable("missing_field", f"the row has no '{name}'", "A number under that name")
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with suppress(OverflowError):  # whole numbers have no largest one
            if math.isfinite(value):
                return float(value)
    raise unusable("wrong_type", f"'{name}' is {str(value)[:80]!r}", "A number")


def list_of(row: Mapping[str, Any], name: str) -> list[Any]:
    """A list, also one stored field by field (``listed``).

    Raises SampleError: ``missing_field``, ``wrong_type`` or ``uneven_lists``.
    """
    value = listed(row.get(name), f"'{name}'")
    if value is None:
        raise unusable("missing_field", f"the row has no '{name}'", "A list under that name")
    if not isinstance(value, list):
        raise unusable("wrong_type", f"'{name}' is a {type(value).__name__}", "A list")
    return value


def listed(value: Any, what: str) -> Any:
    """A list of objects that a table stores field by field (``datasets``' Sequence of objects); others unchanged.

    listed({"from": ["human", "gpt"], "value": ["Who?", "I."]}, "it")[1] == {"from": "gpt", "value": "I."}

    Args:
        what: name of the value in messages.

    Raises SampleError: ``uneven_lists``: its lists differ in length.
    """
    if not isinstance(value, Mapping) or not value or not all(isinstance(one, list) for one in value.values()):
        return value
    lengths = {name: len(one) for name, one in value.items()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{length} of '{name}'" for name, length in lengths.items())
        raise unusable("uneven_lists", f"{what} holds lists of {shown}", "As many of each field")
    return [dict(zip(value, one, strict=True)) for one in zip(*value.values(), strict=True)]


def opened(value: Any) -> Any:
    """The list or object that a cell of a table without such types holds as JSON; other values stay as they are."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def object_of(value: Any, what: str) -> Mapping[str, Any]:
    """A value that is an object with named fields, called ``what`` in messages. Raises SampleError: ``wrong_type``."""
    if not isinstance(value, Mapping):
        raise unusable("wrong_type", f"{what} is a {type(value).__name__}", "An object with named fields")
    return value


def texts_of(values: Sequence[Any], what: str) -> list[str]:
    """Values that are texts, stripped; called ``what`` in messages. Raises SampleError: ``wrong_type``."""
    wrong = [type(value).__name__ for value in values if not isinstance(value, str)]
    if wrong:
        raise unusable("wrong_type", f"{what} hold a {wrong[0]}", "Texts")
    return [value.strip() for value in values]


def named(*fields: str | tuple[str, ...]) -> Callable[[Mapping[str, Any], str], list[tuple[str, Mapping[str, Any]]]]:
    """``Form.questions`` of rows that are one question with an id: named("video", "qid") calls one "4010069381_6".

    Of the fields in a tuple the first that is present counts. A row without the id keeps its default name.
    """

    def questions(row: Mapping[str, Any], name: str) -> list[tuple[str, Mapping[str, Any]]]:
        with suppress(SampleError):
            name = "_".join(called(row, *([field] if isinstance(field, str) else field)) for field in fields)
        return [(name, row)]

    return questions


def listed_questions(
    row: Mapping[str, Any], name: str, listed: str, own_id: str, prefix: str, **shared: Any
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The questions in a list of the row, each with a name: {"question": the question} and the ``shared`` fields.

    Args:
        listed: field of the row with the list.
        own_id: id field of a question, which restarts in each row; without one questions are numbered.
        prefix: makes the ids of one row unique: its video.

    Raises SampleError: the row has no such list.
    """
    for number, question in enumerate(list_of(row, listed), start=1):
        try:
            question_name = f"{prefix}_{called(object_of(question, 'the question'), own_id)}"
        except SampleError:
            question_name = f"{name}-{number}"  # rows of one line are called "1", "1.2", ...
        yield question_name, {**shared, "question": question}


def video_file(name: str) -> str:
    """The file name of a video that rows may call by its stem: video_file("3MSZA") == "3MSZA.mp4"."""
    return name if PurePosixPath(name).suffix.lower() in EXTENSIONS["video"] else f"{name}.mp4"
