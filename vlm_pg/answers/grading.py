"""The grader of each answer kind."""

from __future__ import annotations

from collections.abc import Callable

from vlm_pg.answers.choices import check_multiple_choice, check_multiple_select, check_yes_no
from vlm_pg.answers.numbers import check_mean_relative_accuracy, check_numerical, check_regression
from vlm_pg.answers.overlap import check_box, check_time_span
from vlm_pg.answers.pool import Call, Outcome
from vlm_pg.answers.texts import check_exact, check_free_form, check_ocr
from vlm_pg.answers.verdict import GraderSettings, Verdict
from vlm_pg.types import AnswerKind, Sample

Checker = Callable[[str, Sample, GraderSettings], Verdict]

# Run in this process. "mathematics" is not among them: it may hang, and runs in the pool.
CHECKERS: dict[AnswerKind, Checker] = {
    "multiple_choice": check_multiple_choice,
    "multiple_select": check_multiple_select,
    "numerical": check_numerical,
    "ocr": check_ocr,
    "free_form": check_free_form,
    "regression": check_regression,
    "mean_relative_accuracy": check_mean_relative_accuracy,
    "box": check_box,
    "time_span": check_time_span,
    "exact": check_exact,
    "yes_no": check_yes_no,
}

# Imports in a checking process what ``mathematics_call`` needs there: sympy and math-verify, in no other process.
PREPARE = Call("vlm_pg.answers.mathematics:prepare")


def mathematics_call(gold: str, answer: str) -> Call:
    """The task that grades a mathematical answer, for the checking processes."""
    return Call("vlm_pg.answers.mathematics:compare", (gold, answer))


def mathematics_verdict(outcome: Outcome) -> Verdict:
    """The verdict of a finished task: no value if it was stopped or failed."""
    return Verdict(None, f"not checked: {outcome.problem}") if outcome.problem else Verdict(*outcome.value)
