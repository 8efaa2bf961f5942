"""From scored answers to the figures of one evaluation set."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vlm_pg.eval.estimates import clustered_standard_error, mean
from vlm_pg.eval.measures import pass_at_k
from vlm_pg.types import RolloutGroup, Sample


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
    def of(cls, group: RolloutGroup) -> Scored:
        sample: Sample = group.sample
        return cls(
            sample_id=sample.sample_id,
            category=sample.category,
            media="|".join(ref.path for ref in sample.media) or sample.sample_id,
            num_options=len(sample.options) if sample.answer_kind == "multiple_choice" else 0,
            accuracies=tuple(reward.parts.get("accuracy") for reward in group.rewards),
            formats=tuple(reward.parts.get("format") for reward in group.rewards),
        )

    @property
    def accuracy(self) -> float | None:
        """Mean over the rollouts that have a value."""
        return mean(value for value in self.accuracies if value is not None)


def summarize(scored: Sequence[Scored], kind: str = "eval") -> dict[str, Any]:
    """The figures of one set: see the keys.

    ``accuracy`` is mean@n; ``standard_error`` is clustered by video, since several questions may share one, without the
    factor for few clusters (``estimates.py``), None with one video; ``pass_at_k``: see ``measures.pass_at_k``;
    ``chance`` the accuracy of guessing among the options (None if a question has none).
    """
    valued = [(item, accuracy) for item in scored if (accuracy := item.accuracy) is not None]
    by_category: dict[str, list[float]] = defaultdict(list)
    for item, accuracy in valued:
        by_category[item.category].append(accuracy)
    options = [item.num_options for item, _ in valued]
    return {
        "accuracy": mean(accuracy for _, accuracy in valued),
        "standard_error": clustered_standard_error(
            [(item.media, accuracy) for item, accuracy in valued], small_sample=False
        ),
        "n": len(valued),
        "n_total": len(scored),
        "n_no_value": len(scored) - len(valued),
        "format_rate": mean(value for item in scored for value in item.formats if value is not None),
        # A control's answers are to different frames, so passing one of them says nothing.
        "pass_at_k": {} if kind == "control" else _pass_at_k([item for item, _ in valued]),
        "by_category": {name: {"accuracy": mean(each), "n": len(each)} for name, each in sorted(by_category.items())},
        "chance": mean(1 / n for n in options) if all(options) else None,
        "kind": kind,
    }


def _pass_at_k(valued: Sequence[Scored]) -> dict[str, float | None]:
    """For k = 1, 2, 4, ... up to the number of rollouts."""
    most = min((len(item.accuracies) for item in valued), default=0)
    result: dict[str, float | None] = {}
    k = 1
    while k <= most:
        passes = (pass_at_k([value for value in item.accuracies if value is not None], k) for item in valued)
        result[str(k)] = mean(value for value in passes if value is not None)
        k *= 2
    return result
