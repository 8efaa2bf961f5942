"""The figures of a set with what a judge decided, to stand beside those of the rules alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vlm_pg.eval.aggregation import aggregate
from vlm_pg.eval.contracts import Answered, Judged, Output, Reading

_MOST_REASONS = 10


def with_judge(question: Answered) -> Answered:
    """The question as if the judge's decisions were the readings of its outputs."""
    return replace(question, outputs=tuple(_judged(output) for output in question.outputs))


def _judged(output: Output) -> Output:
    judged = output.judged
    if judged is None or not judged.decided:
        return output
    return replace(output, reading=Reading(judged.answer, judged.score, f"judge ({judged.form})"))


def judged_row(aggregation: str, answered: Sequence[Answered], model: str | None, unreached: int) -> dict[str, Any]:
    """The part "judged" of a set's figures.

    ``accuracy``, ``standard_error`` and ``n`` by the set's own aggregation; without a value where the server could
    not be reached for some output or was at fault (``n_unreached``): asked again, it would be another figure. Of
    outputs: ``n_asked`` = ``n_decided`` + ``n_undecided``; of those decided ``n_raised`` score more than by the rules,
    ``n_lowered`` less, ``n_valued`` have a value that rules do not give, ``n_unchanged`` as much; ``n_none``: those
    that give no answer for the judge either. ``undecided``: the reasons, by how often they came.

    Args:
        unreached: of how many of the undecided outputs.
    """
    asked = [(one, one.judged) for question in answered for one in question.outputs if one.judged is not None]
    decided = [(one, judged) for one, judged in asked if judged.decided]
    changes = Counter(_change(one, judged) for one, judged in decided)
    reasons = Counter(judged.note for _, judged in asked if not judged.decided)
    figures = aggregate(aggregation, [with_judge(question) for question in answered]).to_row()
    if unreached:
        figures |= {"accuracy": None, "standard_error": None}
    return {
        **{key: figures[key] for key in ("accuracy", "standard_error", "n")},
        "model": model,
        "n_asked": len(asked),
        "n_decided": len(decided),
        "n_undecided": len(asked) - len(decided),
        "n_unreached": unreached,
        **{f"n_{change}": changes[change] for change in ("raised", "lowered", "valued", "unchanged")},
        "n_none": sum(judged.answer is None for _, judged in decided),
        "undecided": dict(reasons.most_common(_MOST_REASONS)),
    }


def _change(output: Output, judged: Judged) -> str:
    before, now = output.reading.score, judged.score
    if before is None or now is None:
        return "unchanged" if before == now else "valued"
    return "raised" if now > before else "lowered" if now < before else "unchanged"
