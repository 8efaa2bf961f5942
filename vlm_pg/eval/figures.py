"""The figures of an evaluation set as results have them: by its protocol's aggregation, or the mean over questions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vlm_pg.eval.aggregation import aggregate
from vlm_pg.eval.contracts import Answered, Output, Reading
from vlm_pg.eval.eval_set import EvalSet


def figures_of(
    item: EvalSet, answered: Sequence[Answered], reader: str, formats: Iterable[float | None] = ()
) -> dict[str, Any]:
    """All figures of a set; ``accuracy`` is the one that is cited.

    Args:
        answered: all of its questions.
        reader: the name of who read them (``readers.py``).
        formats: of each output, whether it has the format that training rewards.

    Raises:
        VlmPgError: as ``aggregate``.
    """
    about = {"kind": item.kind, "n_not_asked": item.not_asked, "reader": reader}
    categories = () if item.protocol is None else item.protocol.categories
    figures = aggregate(aggregation_of(item), answered, formats, categories).to_row() | about
    # A control's answers are to different frames: passing one of them says nothing, and they have no majority.
    return figures | ({"pass_at_k": {}, "majority_at_k": {}} if item.kind == "control" else {})


def aggregation_of(item: EvalSet) -> str:
    """The name of its aggregation."""
    return "mean" if item.protocol is None else item.protocol.aggregation


def check_details(item: EvalSet) -> None:
    """Refuse a set, before any of it is asked, whose questions lack what its figures are made by.

    Raises:
        VlmPgError: as ``aggregate``.
    """
    made_up = (Output("", Reading(None, 0.0)),)
    aggregate(aggregation_of(item), [Answered.of(sample, made_up) for sample in item.samples])
