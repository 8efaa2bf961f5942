r"""MATH, MATH-500, AIME, AMC: mathematics problems and their answers to checked records of mathematics.

    vlm-pg prepare math MATH --out data/math
    vlm-pg prepare math --train algebra:train geometry:train --eval test.jsonl --out data/math

Published: hendrycks/math ``MATH/{train,test}/<subject>/<n>.json``, one object a file: ``problem``, ``level``, ``type``
(the subject), ``solution`` with the answer in its last ``\boxed``; EleutherAI/hendrycks_math, the same fields as
Parquet, a folder a subject; MATH-500 ``test.jsonl``, with ``answer``, ``subject`` and ``unique_id``
("test/algebra/2584.json", which rows of MATH's own files are called by too). JSON lines and Parquet of AIME and AMC
also write ``question``, and begin their names with a capital. The gold answer is ``answer``, in LaTeX, or what the last
box of the solution holds. In a folder that holds MATH and MATH-500 (``test.jsonl``, or ``MATH-500/test.jsonl``) MATH's
training files are trained and MATH-500 is evaluated on. Problems of the evaluation files are left out of training, so
that all of MATH may be given to train on beside MATH-500. Drawings stand in the text, as Asymptote code; there are no
media. Rows of other sets that say their ``source`` (NuminaMath) keep it as ``data_source``; those with media or options
are refused, and GSM8K's. ``details`` have ``subject`` (which MATH calls ``type``), ``level`` and ``unique_id``.

Licence: MIT (MATH, and MATH-500, which is part of it). For AIME and AMC see the files' own project.

Record: {"problem_id": "train/algebra/1.json", "problem": "Half of one?", "data_type": "text",
"problem_type": "mathematics", "options": [], "process": "So $\\boxed{\\frac{1}{2}}$.",
"solution": "<answer>\\frac{1}{2}</answer>", "path": "", "data_source": "math", "category": "Algebra",
"details": {"subject": "Algebra", "level": "Level 1"}}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data_pipelines.engine.answers import answered
from data_pipelines.engine.command import pipeline
from data_pipelines.engine.dataset import WITH_MEDIA, WITH_OPTIONS, DataSet, Form, Row, in_folders, one_object
from data_pipelines.engine.fields import answer_text, first_of, named, published, unusable

_PROBLEM = ("problem", "Problem", "question")
_SOLUTION, _ANSWER = ("solution", "Solution"), ("answer", "Answer")
_BEFORE_GOLD = "####"
_SPLITS = ("train", "test")
_BOXES = ("\\boxed", "\\fbox")


def _called_by_path(row: Row, name: str) -> list[tuple[str, Row]]:
    """The row of a file of MATH, called as MATH-500 calls it: "train/algebra/1.json"."""
    parts = Path(row["file"]).absolute().parts[-3:]
    return [("/".join(parts) if parts[0] in _SPLITS else name, row)]


def to_record(row: Row) -> dict[str, Any]:
    """One row as a record. MATH calls the subject ``type``, MATH-500 ``subject``."""
    solution, subject = first_of(row, *_SOLUTION), row.get("subject") or row.get("type")
    if first_of(row, *_ANSWER) is not None:
        gold = answer_text(row, *_ANSWER)
    elif boxed := last_boxed(answer_text(row, *_SOLUTION)):
        gold = boxed
    else:
        came = f"the row has no 'answer' and no \\boxed{{...}} in '{str(solution)[-80:]}'"
        raise unusable("no_gold_answer", came, "One of them")
    if _BEFORE_GOLD in gold:
        came = f"the answer ends in '{gold[-80:]}', as GSM8K's do ('vlm-pg prepare gsm8k')"
        raise unusable("other_data_set", came, "The answer alone")
    return {
        "problem": first_of(row, *_PROBLEM),
        "data_type": "text",
        **answered("mathematics", gold),
        "process": solution if isinstance(solution, str) else "",
        "data_source": first_of(row, "data_source", "source") or "math",
        "category": subject,
        "details": published({**row, "subject": subject}, "subject", "level", "unique_id"),
    }


def last_boxed(solution: str) -> str | None:
    """What the last ``\\boxed{...}`` holds, braces balanced, or the one sign after ``\\boxed ``; None without one.

    last_boxed("so \\\\boxed{\\\\frac{1}{2}}.") -> "\\\\frac{1}{2}"
    """
    start, box = max((solution.rfind(box), box) for box in _BOXES)
    if start < 0:
        return None
    rest = solution[start + len(box) :].lstrip()
    if not rest.startswith("{"):
        return rest[:1].strip("$") or None
    depth = 0
    for index, sign in enumerate(rest):
        # A brace behind a backslash is a sign of the text, not one of LaTeX's own.
        if sign in "{}" and rest[index - 1] != "\\":
            depth += 1 if sign == "{" else -1
            if depth == 0:
                return rest[1:index].strip() or None
    return None


_MATH_500 = Form(
    "MATH-500's test.jsonl",
    {"eval": ("test.jsonl", "MATH-500/test.jsonl")},
    ("problem", "answer", "unique_id"),
    to_record,
    questions=named("unique_id"),
    suffixes=(".json", ".jsonl", ".parquet"),
    foreign=WITH_MEDIA | WITH_OPTIONS,
)
_FILES = Form(
    "MATH/{train,test}/<subject>/<n>.json, one object a file",
    in_folders(("", "MATH/"), "train/*/*.json", "test/*/*.json"),
    ("problem", "solution", "type", "file"),
    to_record,
    rows=one_object,
    questions=_called_by_path,
    suffixes=(".json",),
)
_ROWS = Form(
    "Parquet of a subject, or rows of problem and answer",
    {"train": ("train.jsonl", ".:train", "[a-z]*:train"), "eval": ("test.jsonl", ".:test", "[a-z]*:test")},
    (_PROBLEM, _SOLUTION + _ANSWER),
    to_record,
    questions=named("unique_id"),
    foreign=WITH_MEDIA | WITH_OPTIONS,
)
MATH = DataSet("math", (_MATH_500, _FILES, _ROWS))
main = pipeline(MATH, __doc__, __name__)
