"""One run against others on the questions that both answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlm_pg.eval.estimates import mean_of
from vlm_pg.eval.report.results import Mark, Marks, label


def comparison_rows(own: Marks, others: Sequence[tuple[str, Marks]]) -> list[dict[str, Any]]:
    """A row for each set and other run that share questions with a value in both."""
    rows = []
    for name, marks in own.items():
        for other_name, other in others:
            shared = sorted(marks.keys() & other.get(name, {}).keys())
            pairs = [(marks[key], other[name][key]) for key in shared]
            row = paired_difference(pairs)
            if row is not None:
                rows.append({"set": label(name), "other": label(other_name), **row})
    return rows


def paired_difference(pairs: Sequence[tuple[Mark, Mark]]) -> dict[str, Any] | None:
    """Mean difference of scores (the first less the second) and its standard error, clustered as the first has it.

    See ``estimates.py``. Pairs of which one has no score are passed over; None without any pair, an error of None with
    a single cluster.
    """
    valued = [(a.cluster, a.score - b.score) for a, b in pairs if a.score is not None and b.score is not None]
    estimate = mean_of(valued)
    if estimate is None:
        return None
    return {
        "n": estimate.n,
        "difference": estimate.value,
        "error": estimate.standard_error,
        "higher": sum(difference > 1e-9 for _, difference in valued),
        "lower": sum(difference < -1e-9 for _, difference in valued),
    }
