"""From scored answers to the figures of one evaluation set."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlm_pg.eval.contracts import Answered


@dataclass(frozen=True)
class Scored:
    """One question's outcome. ``accuracies`` and ``formats``: of its n rollouts, None where there was no value."""

    sample_id: str
    category: str
    media: str
    num_options: int
    accuracies: tuple[float | None, ...]
    formats: tuple[float | None, ...]

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Scored:
        """Of a line of answers."""
        answered = Answered.from_row(row)
        return cls(
            sample_id=answered.sample_id,
            category=answered.category,
            media=answered.cluster,
            num_options=answered.num_options,
            accuracies=tuple(output.reading.score for output in answered.outputs),
            formats=tuple(row["formats"]),
        )

    @property
    def accuracy(self) -> float | None:
        """Mean over the rollouts that have a value."""
        return _mean(value for value in self.accuracies if value is not None)


def summarize(scored: Sequence[Scored], kind: str = "eval") -> dict[str, Any]:
    """The figures of one set: see the keys.

    ``accuracy`` is mean@n; ``standard_error`` is clustered by video, since several questions may share one;
    ``pass_at_k`` the unbiased estimate 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374) with c rollouts of
    accuracy 1; ``chance`` the accuracy of guessing among the options (None if a question has none).
    """
    valued = [item for item in scored if item.accuracy is not None]
    by_category: dict[str, list[Scored]] = defaultdict(list)
    for item in valued:
        by_category[item.category].append(item)
    options = [item.num_options for item in valued]
    formats = [value for item in scored for value in item.formats if value is not None]
    return {
        "accuracy": _mean(item.accuracy for item in valued),
        "standard_error": _clustered_standard_error(valued),
        "n": len(valued),
        "n_total": len(scored),
        "n_no_value": len(scored) - len(valued),
        "format_rate": _mean(formats),
        # A control's answers are to different frames, so passing one of them says nothing.
        "pass_at_k": {} if kind == "control" else _pass_at_k(valued),
        "by_category": {
            name: {"accuracy": _mean(item.accuracy for item in items), "n": len(items)}
            for name, items in sorted(by_category.items())
        },
        "chance": _mean(1 / n for n in options) if options and all(options) else None,
        "kind": kind,
    }


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return math.fsum(numbers) / len(numbers) if numbers else None


def _clustered_standard_error(valued: Sequence[Scored]) -> float | None:
    mean = _mean(item.accuracy for item in valued)
    if mean is None:
        return None
    deviations: dict[str, float] = defaultdict(float)
    for item in valued:
        assert item.accuracy is not None
        deviations[item.media] += item.accuracy - mean
    return math.sqrt(math.fsum(total**2 for total in deviations.values())) / len(valued)


def _pass_at_k(valued: Sequence[Scored]) -> dict[str, float | None]:
    """For k = 1, 2, 4, ... up to the number of rollouts."""
    most = min((len(item.accuracies) for item in valued), default=0)
    result: dict[str, float | None] = {}
    k = 1
    while k <= most:
        result[str(k)] = _mean(_pass_chance(item.accuracies, k) for item in valued)
        k *= 2
    return result


def _pass_chance(accuracies: Sequence[float | None], k: int) -> float | None:
    values = [value for value in accuracies if value is not None]
    if len(values) < k:
        return None
    right = sum(value >= 1.0 for value in values)
    return 1.0 - math.comb(len(values) - right, k) / math.comb(len(values), k)
