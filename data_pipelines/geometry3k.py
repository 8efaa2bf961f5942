r"""Geometry3K: geometry problems with a diagram to checked records of multiple choice or mathematics.

    vlm-pg prepare geometry3k InterGPS --media-root InterGPS --out data/geometry3k
    mkdir -p data/media && vlm-pg prepare geometry3k geometry3k --media-root data/media --out data/geometry3k

Published: lupantech/InterGPS ``data/geometry3k/{train,val,test}.zip``, which unpack to ``<split>/<id>/data.json`` (one
object a file) beside ``img_diagram.png``: ``problem_text``, ``choices`` in spaced LaTeX ("5 \sqrt { 2 }"), the letter
``answer``. hiyouga/geometry3k ``data/{train,validation,test}-*.parquet``: ``images`` inside the rows, ``problem`` that
begins with ``<image>``, ``answer`` in LaTeX, and in newer files ``choices`` and ``ground_truth``, the letter. A row
whose letter does not lead to its answer is refused. The validation split is read where ``--train`` or ``--eval`` name
it.

The first form becomes multiple choice, which Inter-GPS is scored by; the second mathematics without options, since
those who train on it (EasyR1, verl) compare an answer of one's own with ``answer``, which cannot be guessed from four.

Licence: MIT, as hiyouga/geometry3k states it. For the diagrams see the project: they come from textbooks.

Record: {"problem_id": "2401", "problem": "Find $x$.", "data_type": "image", "problem_type": "multiple choice",
"options": ["A. 5", "B. 5 \\sqrt { 2 }", "C. 5 \\sqrt { 3 }", "D. 10"], "process": "", "solution": "<answer>B</answer>",
"path": "test/2401/img_diagram.png", "data_source": "geometry3k", "category": "Length"}
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data_pipelines.engine.answers import answered, check_removed_marks, lettered, without_sentences
from data_pipelines.engine.command import pipeline
from data_pipelines.engine.dataset import DataSet, Form, Row, in_folders, one_object, read_rows
from data_pipelines.engine.fields import answer_text, list_of, named, text_of, texts_of, unusable
from vlm_pg.answers.latex import statement, unspaced
from vlm_pg.data.files import RecordLocation
from vlm_pg.errors import ConfigError, printable

_DIAGRAM = "img_diagram.png"
# 3,002 questions in all; InterGPS' own page counts 300 more.
_MOST = 3_302


def of_intergps(row: Row) -> dict[str, Any]:
    """The record of a folder of InterGPS."""
    choices = texts_of(list_of(row, "choices"), "'choices'")
    split, folder = Path(row["file"]).absolute().parts[-3:-1]
    goals = row.get("problem_type_goal")
    goals = [goals] if isinstance(goals, str) else goals
    is_told = isinstance(goals, list) and all(isinstance(goal, str) for goal in goals)
    return {
        "problem": text_of(row, "problem_text"),
        "data_type": "image",
        **answered("multiple choice", _letter(row, "answer", choices), lettered(choices)),
        "path": f"{split}/{folder}/{_DIAGRAM}",
        "category": ", ".join(goals) if is_told and goals else None,
    }


def of_parquet(row: Row) -> dict[str, Any]:
    """One row of hiyouga's Parquet as a record."""
    gold = answer_text(row, "answer")
    if row.get("ground_truth") and row.get("choices"):
        choices = texts_of(list_of(row, "choices"), "'choices'")
        chosen = choices[string.ascii_uppercase.index(_letter(row, "ground_truth", choices))]
        # equal for "5 \sqrt { 2 }", "$5\sqrt{2}$" and "5√2"
        if unspaced(statement(chosen)) != unspaced(statement(gold)):
            came = f"'ground_truth' is '{chosen[:80]}', 'answer' is '{gold[:80]}'"
            raise unusable("ambiguous_answer", came, "One right answer")
    images = row["images"] if isinstance(row["images"], list) else [row["images"]]
    text = text_of(row, "problem")
    problem = without_sentences(text, ("<image>",))
    if images:  # a row without any is refused for that
        check_removed_marks(text, problem, len(images))
    return {
        "problem": problem,
        "data_type": "image",
        **answered("mathematics", gold),
        "path": images[0] if len(images) == 1 else images,
    }


def _letter(row: Row, field: str, choices: Sequence[str]) -> str:
    letter = text_of(row, field).strip()
    known = list(string.ascii_uppercase[: len(choices)])
    if letter not in known:
        raise unusable("answer_not_in_options", f"'{field}' is '{letter[:80]}'", f"One of {known}")
    return letter


def _few_rows(path: Path) -> Iterator[tuple[RecordLocation, Any]]:
    """As ``read_rows``; more rows than the set has are another set's. Raises ConfigError: there are more."""
    for number, row in enumerate(read_rows(path), start=1):
        if number > _MOST:
            raise ConfigError(
                f"'{printable(str(path), 300)}' has more than {_MOST} rows. Geometry3K has 3,002 in all; other sets "
                "have the same fields. Give its own files, or use 'vlm-pg prepare generic' with a map of fields."
            )
        yield row


_FOLDERS = Form(
    "InterGPS' <split>/<id>/data.json, one object a file",
    in_folders(("", "data/geometry3k/"), "train/*/data.json", "test/*/data.json"),
    ("problem_text", "choices", "answer", "file"),
    of_intergps,
    rows=one_object,
    # A folder of InterGPS is called by the id, too.
    questions=lambda row, name: named("id")(row, Path(row["file"]).absolute().parent.name),
    suffixes=(".json",),
)
_PARQUET = Form(
    "hiyouga's Parquet",
    {"train": (".:train",), "eval": (".:test",)},
    ("images", "problem", "answer"),
    of_parquet,
    rows=_few_rows,
    questions=named("id"),
    suffixes=(".parquet",),
)
GEOMETRY3K = DataSet("geometry3k", (_FOLDERS, _PARQUET), media=("data/geometry3k", "geometry3k"), by_name=False)
main = pipeline(GEOMETRY3K, __doc__, __name__)
