"""The rubric: which checker reads an answer, and how the parts add up."""

from __future__ import annotations

from collections.abc import Callable

from vlm_pg.rewards.format import extract_answer, format_reward
from vlm_pg.rewards.free_form import check_free_form
from vlm_pg.rewards.multiple_choice import check_multiple_choice
from vlm_pg.rewards.numerical import check_numerical
from vlm_pg.rewards.ocr import check_ocr
from vlm_pg.rewards.regression import check_regression
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.rewards.verdict import Verdict
from vlm_pg.types import AnswerKind, RewardBreakdown, Sample

Checker = Callable[[str, Sample, RewardSettings], Verdict]

CHECKERS: dict[AnswerKind, Checker] = {
    "multiple_choice": check_multiple_choice,
    "numerical": check_numerical,
    "ocr": check_ocr,
    "free_form": check_free_form,
    "regression": check_regression,
}


def score(sample: Sample, text: str, settings: RewardSettings) -> RewardBreakdown:
    """Reward of one response.

    The kind of the answer is the sample's own, so a batch may mix kinds. ``parts`` holds ``accuracy`` and ``format``,
    unweighted, in [0, 1]. A response without an answer block, or with one that cannot be read, is wrong (0.0). A gold
    answer that cannot be used makes accuracy None ("no value"), and then the total is None too unless
    ``accuracy_weight`` is 0. ``notes`` says why, by part.

    Args:
        sample: the question with its gold answer.
        text: the response as the model wrote it, without special tokens.
        settings: weights and tolerances.
    """
    accuracy = _accuracy(sample, text, settings)
    parts = {"accuracy": accuracy.value, "format": format_reward(text)}
    weights = {"accuracy": settings.accuracy_weight, "format": settings.format_weight}
    counting = {name: value for name, value in parts.items() if weights[name] != 0.0}
    total: float | None = 0.0
    for name, value in counting.items():
        total = None if total is None or value is None else total + weights[name] * value
    return RewardBreakdown(total, parts, {"accuracy": accuracy.note} if accuracy.note else {})


def _accuracy(sample: Sample, text: str, settings: RewardSettings) -> Verdict:
    # The gold answer is looked at even when the response holds nothing to compare with it: whether a reward has a
    # value must depend on the sample only, or the valued rollouts of a group would be a biased choice.
    answer = extract_answer(text)
    too_long = answer is not None and len(answer) > settings.max_answer_characters
    verdict = CHECKERS[sample.answer_kind]("" if answer is None or too_long else answer, sample, settings)
    if verdict.value is None:
        return verdict
    if answer is None:
        return Verdict(0.0, "no <answer> block")
    if too_long:
        return Verdict(
            0.0,
            f"answer has {len(answer)} characters, more than the {settings.max_answer_characters} that are read "
            "(reward.max_answer_characters)",
        )
    return Verdict(0.0, "empty answer") if not answer else verdict
