"""The rubric: the checker of each answer kind, and the sum of reward parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vlm_pg.rewards.box import check_box
from vlm_pg.rewards.exact import check_exact
from vlm_pg.rewards.format import extract_answer
from vlm_pg.rewards.free_form import check_free_form
from vlm_pg.rewards.mean_relative_accuracy import check_mean_relative_accuracy
from vlm_pg.rewards.multiple_choice import check_multiple_choice
from vlm_pg.rewards.multiple_select import check_multiple_select
from vlm_pg.rewards.numerical import check_numerical
from vlm_pg.rewards.ocr import check_ocr
from vlm_pg.rewards.regression import check_regression
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.rewards.time_span import check_time_span
from vlm_pg.rewards.verdict import Verdict
from vlm_pg.rewards.yes_no import check_yes_no
from vlm_pg.types import AnswerKind, Sample

Checker = Callable[[str, Sample, RewardSettings], Verdict]

# Run in this process. "mathematics" may hang, and runs in the pool.
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


@dataclass(frozen=True)
class ReadAnswer:
    """The answer of one response, for a checker.

    ``text`` is empty where there is no answer; ``fault`` is the reason, and makes the answer wrong. The checker runs
    nevertheless: whether a reward has a value must depend on the sample only, or the valued rollouts of a group would
    be a biased selection.
    """

    text: str
    fault: str = ""

    def judged(self, verdict: Verdict) -> Verdict:
        """The checker's verdict, or 0 with the fault."""
        return Verdict(0.0, self.fault) if self.fault and verdict.value is not None else verdict


def read_answer(text: str, settings: RewardSettings) -> ReadAnswer:
    """The answer block of a response, of at most ``max_answer_characters``."""
    answer = extract_answer(text)
    if answer is None:
        return ReadAnswer("", "no <answer> block")
    if len(answer) > settings.max_answer_characters:
        return ReadAnswer(
            "",
            f"answer has {len(answer)} characters, more than the {settings.max_answer_characters} that are read "
            "(reward.max_answer_characters)",
        )
    return ReadAnswer(answer, "" if answer else "empty answer")


def total_reward(parts: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    """Sum of weight times part over the parts whose weight is not 0; None if one of these has no value."""
    total = 0.0
    for name, weight in weights.items():
        if weight == 0.0:
            continue
        value = parts[name]
        if value is None:
            return None
        total += weight * value
    return total
