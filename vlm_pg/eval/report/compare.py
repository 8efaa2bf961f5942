"""One run against others on the questions that both answered."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

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

    With d_i = a_i - b_i of n questions and their mean D, the error is sqrt(sum over clusters of (sum of d_i - D)^2) / n
    (Miller, "Adding Error Bars to Evals", arXiv 2411.00640, paired differences and clustered errors). Pairs of which
    one has no score are passed over; None without any pair, an error of None with a single cluster.
    """
    valued = [(a.score - b.score, a.cluster) for a, b in pairs if a.score is not None and b.score is not None]
    if not valued:
        return None
    count = len(valued)
    mean = math.fsum(difference for difference, _ in valued) / count
    clusters: dict[str, float] = defaultdict(float)
    for difference, cluster in valued:
        clusters[cluster] += difference - mean
    return {
        "n": count,
        "difference": mean,
        "error": math.sqrt(math.fsum(total**2 for total in clusters.values())) / count if len(clusters) > 1 else None,
        "higher": sum(difference > 1e-9 for difference, _ in valued),
        "lower": sum(difference < -1e-9 for difference, _ in valued),
    }
