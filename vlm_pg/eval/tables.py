"""The figures of one evaluation set by its own rule, and grouping of questions by what the set publishes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlm_pg.errors import VlmPgError
from vlm_pg.eval.contracts import Answered
from vlm_pg.eval.measures import SCORES, Estimate, Figure, figure_of, mean_of, mean_of_estimates, values_of

# The group of questions that lack what others of the set have.
NOT_GIVEN = "(not given)"
Groups = Mapping[str, Sequence[Answered]]


@dataclass
class Table:
    """The figures of a rule.

    ``figures``: of the whole set, by name; ``main`` is the name of the one that is cited. ``groups``: by what the set
    groups by, then by group. ``notes``: remarks on them, such as a task without questions. ``left_out``: questions that
    belong to another figure than the set's own.
    """

    main: str
    figures: dict[str, Figure] = field(default_factory=dict)
    groups: dict[str, dict[str, Figure]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    left_out: tuple[Answered, ...] = ()

    def group_by(self, answered: Sequence[Answered], *keys: str) -> None:
        """Add the means by each of these details that some question has."""
        for key in keys:
            if groups := grouped(answered, key):
                self.add_groups(key, groups)

    def add_groups(self, key: str, groups: Groups) -> None:
        """Add the mean of each of these groups."""
        self.groups[key] = {name: figure_of(items) for name, items in groups.items()}


def detail(question: Answered, key: str) -> Any:
    """What the set publishes of a question under that name. Raises VlmPgError: it is missing."""
    value = question.details.get(key)
    if value is None or value == "":
        raise VlmPgError(
            f"Question {question.sample_id!r} has no {key!r} in its details ({', '.join(question.details) or 'none'}), "
            "by which its set's figures are made. Prepare the set with its own pipeline (vlm-pg prepare), or choose "
            "the aggregation 'mean'."
        )
    return value


def grouped(answered: Sequence[Answered], key: str) -> dict[str, list[Answered]]:
    """Questions by a detail, in the order of its values; one with a list of values is in the group of each.

    Those that lack it are ``NOT_GIVEN``; {} if all do.
    """
    result: dict[str, list[Answered]] = {}
    for question in answered:
        value = question.details.get(key)
        several = value if isinstance(value, list | tuple) else [value]
        names = dict.fromkeys(str(one) for one in several if one is not None and one != "")
        for name in names or [NOT_GIVEN]:
            result.setdefault(name, []).append(question)
    return {} if set(result) <= {NOT_GIVEN} else in_order(result)


def grouped_by(answered: Sequence[Answered], name_of: Callable[[Answered], str]) -> dict[str, list[Answered]]:
    """Questions by a name that is made of them."""
    result: dict[str, list[Answered]] = {}
    for question in answered:
        result.setdefault(name_of(question), []).append(question)
    return in_order(result)


def in_order(groups: Mapping[str, list[Answered]]) -> dict[str, list[Answered]]:
    """By name; by size where all names are whole numbers ("60" before "600")."""
    names = sorted(groups)
    if all(name.isdecimal() for name in names):
        names.sort(key=int)
    return {name: groups[name] for name in names}


def estimates_of(groups: Groups) -> dict[str, Estimate]:
    """The mean of each group in which a question could be scored."""
    means = {name: mean_of(values_of(items), SCORES) for name, items in groups.items()}
    return {name: one for name, one in means.items() if one is not None}


def shown(estimate: Estimate | None) -> Figure:
    """As a fraction; without a value where there is none."""
    return Figure(None, 0) if estimate is None else estimate.figure()


def mean_of_groups(groups: Groups, what: str, expected: int, notes: list[str]) -> Estimate | None:
    """Every group counts alike; in ``notes`` what is missing: groups without a score, or of the ``expected`` number."""
    found = estimates_of(groups)
    unscored = [name for name in groups if name not in found]
    if unscored:
        notes.append(f"No question of {', '.join(unscored)} could be scored; the mean is over the other {what}.")
    if len(groups) != expected:
        notes.append(f"The set has {expected} {what}, and questions of {len(groups)} are here.")
    return mean_of_estimates(list(found.values()))
