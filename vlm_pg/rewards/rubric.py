"""The rubric: the answer block of a response, and how the parts of a reward add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vlm_pg.answers.verdict import Verdict
from vlm_pg.rewards.format import extract_answer
from vlm_pg.rewards.settings import RewardSettings


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
