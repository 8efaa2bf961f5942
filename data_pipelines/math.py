"""MATH, MATH-500, AIME, AMC: their JSON lines (or Parquet) of problems and answers to checked records of mathematics.

    python -m data_pipelines.math --train math_train.jsonl --eval math500_test.jsonl --out data/math

The gold answer is the row's ``answer``, in LaTeX, or without one what the last ``\\boxed`` of its ``solution`` holds;
the problem stands under ``problem`` or ``question``. All three may begin with a capital, as in files of AIME.
Problems have no media. Writes ``train.jsonl`` and ``eval.jsonl``; refused rows go to ``refused.jsonl`` with their
reason, and ``report.json`` counts everything. Problems of the evaluation files are left out of training, so that all of
MATH may be given to train on beside MATH-500. Evaluation reports by subject.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from data_pipelines.common import run
from data_pipelines.published import PublishedSet, Row, first_of, plain_number, prepare
from vlm_pg.errors import SampleError

_BOXES = ("\\boxed", "\\fbox")


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the set, or do nothing if it is there already. Returns the exit code."""
    return prepare(MATH, __doc__ or "", argv)


def to_record(row: Row, name: str) -> dict[str, Any]:
    """One row as a record. MATH calls the subject ``type``, MATH-500 ``subject``.

    Raises:
        SampleError: ``no_gold_answer``.
    """
    solution = str(first_of(row, "solution", "Solution") or "")
    answer = first_of(row, "answer", "Answer")
    gold = last_boxed(solution) if answer is None else plain_number(answer)
    if not gold:
        raise SampleError(
            "no_gold_answer",
            f"the row has no 'answer' and no complete \\boxed{{...}} in its 'solution' '{solution[-80:]}'. "
            "One of them is expected. Correct the row, or remove it.",
        )
    return {
        "problem_id": row.get("unique_id") or name,
        "problem": first_of(row, "problem", "Problem", "question"),
        "data_type": "text",
        "problem_type": "mathematics",
        "solution": f"<answer>{gold}</answer>",
        "data_source": "math",
        "category": row.get("subject") or row.get("type"),
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
    for place, sign in enumerate(rest):
        # A brace behind a backslash is a sign of the text, not one of LaTeX's own.
        if sign in "{}" and rest[place - 1] != "\\":
            depth += 1 if sign == "{" else -1
            if depth == 0:
                return rest[1:place].strip() or None
    return None


MATH = PublishedSet(
    "math",
    (("problem", "Problem", "question"), ("solution", "answer", "Solution", "Answer")),
    to_record,
    has_media=False,
)

if __name__ == "__main__":
    raise SystemExit(run(main))
