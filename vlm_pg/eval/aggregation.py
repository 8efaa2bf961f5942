"""How each evaluation set makes its figures, by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vlm_pg.errors import ConfigError, VlmPgError
from vlm_pg.eval import set_figures as sets
from vlm_pg.eval.contracts import Answered
from vlm_pg.eval.estimates import Figure
from vlm_pg.eval.measures import Measures, measure
from vlm_pg.eval.own import is_own, own_aggregation
from vlm_pg.eval.tables import Table


@dataclass(frozen=True)
class Aggregation:
    """``rule``: in words, what the main figure is. ``tabulate``: makes the figures."""

    rule: str
    tabulate: Callable[[Sequence[Answered]], Table]


AGGREGATIONS: Mapping[str, Aggregation] = {
    "mean": Aggregation("mean over questions", sets.plain),
    "video_mme": Aggregation("mean over questions", sets.video_mme),
    "mvbench": Aggregation("mean of the means of the 20 tasks", sets.mvbench),
    "tempcompass": Aggregation("mean of the means of the tasks", sets.tempcompass),
    "vsi_bench/official": Aggregation(
        "mean of the means of 8 tasks, one of them the mean of the three levels of relative direction",
        sets.vsi_bench_official,
    ),
    "vsi_bench/video_r1": Aggregation(
        "(mean over choice questions + mean relative accuracy over numerical ones) / 2", sets.vsi_bench_video_r1
    ),
    "video_mmmu": Aggregation("mean of the means of the tracks", sets.video_mmmu),
    "mmvu": Aggregation("mean over questions", sets.mmvu),
    "longvideobench": Aggregation("mean over questions", sets.longvideobench),
    "nextqa": Aggregation("mean over questions", sets.nextqa),
    "mathvista": Aggregation("mean over questions", sets.mathvista),
    "charades_sta": Aggregation("mean over queries of the intersection over union, in percent", sets.charades_sta),
    "math": Aggregation("mean over problems of the mean over their n outputs (mean@n)", sets.mathematics),
}


@dataclass(frozen=True)
class Figures:
    """All figures of one evaluation set.

    ``main``: the name of the one in ``figures`` that is cited, made by ``rule``. ``groups``: by what the set groups by
    ("duration"), then by group ("short"). ``notes``: what is to be known of them, in sentences.
    """

    aggregation: str
    rule: str
    main: str
    figures: Mapping[str, Figure]
    groups: Mapping[str, Mapping[str, Figure]]
    measures: Measures
    notes: tuple[str, ...] = ()

    @property
    def headline(self) -> Figure:
        """The figure that is cited."""
        return self.figures[self.main]

    def with_notes(self, notes: Iterable[str]) -> Figures:
        """The same with further notes."""
        return replace(self, notes=(*self.notes, *notes))

    def to_row(self) -> dict[str, Any]:
        """As JSON has it: the measures, with the main figure as ``accuracy``, a fraction whatever its own unit is."""
        main, share = self.headline, 0.01 if self.headline.unit == "percent" else 1.0
        return {
            **self.measures.to_row(),
            "accuracy": None if main.value is None else main.value * share,
            "standard_error": None if main.standard_error is None else main.standard_error * share,
            "n": main.n,
            "clusters": main.clusters,
            "aggregation": self.aggregation,
            "rule": self.rule,
            "main": self.main,
            "figures": {name: one.to_row() for name, one in self.figures.items()},
            "groups": {key: {name: one.to_row() for name, one in each.items()} for key, each in self.groups.items()},
            "notes": list(self.notes),
        }


def aggregate(
    name: str, answered: Sequence[Answered], formats: Iterable[float | None] = (), categories: Sequence[str] = ()
) -> Figures:
    """The figures of a whole set by the aggregation of that name.

    Args:
        formats: see ``measures.measure``.
        categories: details that figures are also given by, beside those that the aggregation groups by itself.

    Raises:
        ConfigError: there is no such aggregation.
        VlmPgError: a question lacks a detail that the figures are made by, has one that the rule does not know, or is
            there twice.
    """
    aggregation = find_aggregation(name)
    _check_once(answered)
    table = aggregation.tabulate(answered)
    apart = set(map(id, table.left_out))
    measured = [question for question in answered if id(question) not in apart]
    table.group_by(measured, *(key for key in categories if key not in table.groups))
    if without := [key for key in categories if key not in table.groups]:
        table.notes.append(f"There are no figures by {', '.join(without)}, which no question has in its details.")
    return Figures(
        aggregation=name,
        rule=aggregation.rule,
        main=table.main,
        figures=table.figures,
        groups=table.groups,
        measures=measure(measured, formats),
        notes=tuple(table.notes),
    )


def find_aggregation(name: str) -> Aggregation:
    """The aggregation of that name, or the user's own by path (``own.py``).

    Raises:
        ConfigError: there is none; with the nearest.
    """
    if is_own(name):
        return Aggregation(*own_aggregation(name))
    if name in AGGREGATIONS:
        return AGGREGATIONS[name]
    near = difflib.get_close_matches(name, AGGREGATIONS, n=1, cutoff=0.4)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"There is no aggregation {name!r}.{meant} There are: {', '.join(AGGREGATIONS)}; and functions of your own, as "
        "path/to/file.py:function."
    )


def _check_once(answered: Sequence[Answered]) -> None:
    seen: set[tuple[str, bool]] = set()
    for question in answered:
        key = question.sample_id, sets.is_question_only(question)
        if key in seen:
            raise VlmPgError(
                f"Question {question.sample_id!r} is there twice, and would count twice. Each question of a set may "
                "come once, with all of its outputs; remove the others."
            )
        seen.add(key)
