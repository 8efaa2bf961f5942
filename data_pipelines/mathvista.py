"""MathVista: mathematical questions about charts, diagrams and photos to checked records, for evaluation only.

    vlm-pg prepare mathvista MathVista/data --media-root MathVista/data --out data/mathvista

Published: lupantech/MathVista ``data/testmini.json`` (on the hub ``annot_testmini.json``), an object of questions by
their ``pid``, with ``images/<pid>.jpg``; AI4Math/MathVista ``data/testmini-*.parquet``, the same with the picture in
``decoded_image``. ``question_type`` multi_choice: ``choices``, ``answer`` is the text of one; some have equal choices.
free_form: ``answer_type`` integer, float (with its ``precision``, a number of decimals), list ("[2014, 2016]") or text;
``unit`` in some. The answers of the ``test`` split are not public: its rows are refused.

MathVista rounds an answer to the precision and compares texts. Here the question states the precision, as
MathVista's own prompts do, and numbers of up to two decimals are compared after rounding to two: an answer with more
decimals can be wrong here and right there. Other precisions are refused. A list must be equal as text; a choice is
identified by its letter or text, never by the nearest spelling.

``details`` have the question as published, ``question_type``, ``answer_type``, ``precision``, ``unit``, ``choices`` (of
at most 2,000 characters together), and of the metadata ``task``, ``context``, ``grade``, ``skills`` and ``category``.

Licence: CC BY-SA 4.0; the pictures come from 28 other data sets under their own terms, see the project.

Record: {"problem_id": "7", "problem": "What is the mean? (Unit: $)\\nRound the answer to 1 decimal place.",
"data_type": "image", "problem_type": "numerical", "options": [], "process": "", "solution": "<answer>1.2</answer>",
"path": "images/7.jpg", "data_source": "mathvista", "category": "figure question answering",
"details": {"question": "What is the mean?", "question_type": "free_form", "answer_type": "float", "precision": 1.0,
"unit": "$", "task": "figure question answering"}}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from data_pipelines.engine.answers import answered, letter_of_text, lettered
from data_pipelines.engine.command import pipeline
from data_pipelines.engine.dataset import DataSet, Form, Row, keyed_rows
from data_pipelines.engine.fields import answer_text, first_of, list_of, named, published, text_of, texts_of, unusable
from vlm_pg.data.tables import Embedded

# Rounding to two decimals, as numbers are compared, would take answers of more decimals for equal that are not.
_PRECISIONS = (1, 2)
_COLUMNS = ("pid", "question", "question_type", "answer_type", "answer", "choices", "image")
_METADATA = ("task", "context", "grade", "skills", "category")
# Of longer ones nothing is kept beside the options: a record's details are short.
_LONGEST_CHOICES = 2_000
_INTEGER, _FLOAT = re.compile(r"-?\d+"), re.compile(r"-?\d+(?:\.\d+)?")


def to_record(row: Row) -> dict[str, Any]:
    unit = first_of(row, "unit")
    question = text_of(row, "question").strip() + (f" (Unit: {text_of(row, 'unit')})" if unit is not None else "")
    kind = text_of(row, "question_type")
    if kind == "free_form":
        kind = text_of(row, "answer_type")
    if kind not in _KINDS:
        raise unusable("unknown_question_type", f"the answer's type is '{kind[:80]}'", f"One of {', '.join(_KINDS)}")
    form, fields = _KINDS[kind](row)
    picture, choices, metadata = row.get("decoded_image"), row.get("choices"), row.get("metadata")
    metadata = metadata if isinstance(metadata, Mapping) else {}
    short = isinstance(choices, list) and sum(len(str(choice)) for choice in choices) <= _LONGEST_CHOICES
    return {
        "problem": f"{question}\n{form}".strip(),
        "data_type": "image",
        **fields,
        "path": picture if isinstance(picture, Embedded) else text_of(row, "image"),
        "category": metadata.get("task"),
        "details": {
            **published(row, "question", "question_type", "answer_type", "precision", "unit"),
            **(published(row, "choices") if short else {}),
            **published(metadata, *_METADATA),
        },
    }


def _choice(row: Row) -> tuple[str, dict[str, Any]]:
    choices = texts_of(list_of(row, "choices"), "'choices'")
    letter = letter_of_text(answer_text(row, "answer"), choices)
    return "", answered("multiple choice", letter, lettered(choices))


def _float(row: Row) -> tuple[str, dict[str, Any]]:
    precision = answer_text(row, "precision") if row.get("precision") is not None else "none"
    if precision not in map(str, _PRECISIONS):
        raise unusable("unknown_precision", f"'precision' is {precision[:80]}", "1 or 2 decimals")
    gold = _matching(_FLOAT, row, "A number in digits")
    if len(gold.partition(".")[2]) > int(precision):
        raise unusable("unknown_precision", f"'answer' is {gold[:80]}", f"At most {precision} decimals, its precision,")
    decimals = f"{precision} decimal place{'s' if precision != '1' else ''}"
    return f"Round the answer to {decimals}.", answered("numerical", gold)


def _list(row: Row) -> tuple[str, dict[str, Any]]:
    gold = answer_text(row, "answer")
    if not (gold.startswith("[") and gold.endswith("]")):
        raise unusable("no_gold_answer", f"'answer' is '{gold[:80]}'", "A list in square brackets")
    return "Answer with a list in square brackets, for example [1, 2, 3].", answered("exact", gold)


def _matching(pattern: re.Pattern[str], row: Row, allowed: str) -> str:
    gold = answer_text(row, "answer")
    if not pattern.fullmatch(gold):
        raise unusable("no_gold_answer", f"'answer' is '{gold[:80]}'", allowed)
    return gold


_KINDS: dict[str, Callable[[Row], tuple[str, dict[str, Any]]]] = {
    "multi_choice": _choice,
    "integer": lambda row: ("", answered("numerical", _matching(_INTEGER, row, "A whole number"))),
    "float": _float,
    "list": _list,
    "text": lambda row: ("", answered("exact", answer_text(row, "answer"))),
}

_JSON = Form(
    "testmini.json, an object by pid",
    {"eval": ("testmini.json", "data/testmini.json", "annot_testmini.json")},
    _COLUMNS,
    to_record,
    rows=keyed_rows("pid"),
    questions=named("pid"),
    suffixes=(".json",),
)
_PARQUET = Form(
    "AI4Math's Parquet",
    {"eval": (".:testmini",)},
    _COLUMNS,
    to_record,
    questions=named("pid"),
    suffixes=(".parquet", ".jsonl"),
)
MATHVISTA = DataSet("mathvista", (_JSON, _PARQUET), media=("data",), by_name=False)
main = pipeline(MATHVISTA, __doc__, __name__)
