"""The figures of each evaluation set by the set's own rule, one function per rule, and these by name.

Details are read under the names the sets publish them by. A figure by groups that a set publishes is there if the
questions have that detail; a rule whose main figure needs one raises without it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vlm_pg.errors import ConfigError, VlmPgError
from vlm_pg.eval.contracts import Answered
from vlm_pg.eval.measures import (
    SCORES,
    Estimate,
    Figure,
    combination,
    counted,
    figure_of,
    ks_of,
    mean,
    mean_of,
    mean_of_estimates,
    measure,
    question_majority_at_k,
    question_pass_at_k,
    values_of,
)
from vlm_pg.eval.readers import is_own, own_aggregation
from vlm_pg.eval.tables import NOT_GIVEN, Table, detail, estimates_of, grouped, grouped_by, mean_of_groups, shown

OVERALL, MEAN_OF_TASKS = "mean over questions", "mean of tasks"

# VSI-Bench's question types: those that ask for a number are scored by mean relative accuracy.
VSI_NUMERICAL = ("object_counting", "object_abs_distance", "object_size_estimation", "room_size_estimation")
VSI_DIRECTIONS = ("object_rel_direction_easy", "object_rel_direction_medium", "object_rel_direction_hard")
VSI_CHOICE = (*VSI_DIRECTIONS, "object_rel_distance", "route_planning", "obj_appearance_order")

# MMVU's four groups of its 27 subjects (the table in lmms-eval's tasks/mmvu/utils.py).
MMVU_GROUPS = {
    "Science": (
        "Astronomy, Biology, Chemistry, Electromagnetism, Geography, Materials Science, Mechanics, Modern Physics, "
        "Neurobiology, Thermodynamics"
    ),
    "Healthcare": "Basic Medicine, Clinical Medicine, Dentistry, Pharmacy, Preventive Medicine",
    "Humanities & Social Science": "Art, Economics, History, Law, Literature, Management",
    "Engineering": (
        "Biomedical Engineering, Civil Engineering, Computer Science, Electrical Engineering, "
        "Electronics and Communication, Mechanical Engineering"
    ),
}
_MMVU_GROUP_OF = {subject: group for group, subjects in MMVU_GROUPS.items() for subject in subjects.split(", ")}


def mean_by(answered: Sequence[Answered], *keys: str) -> Table:
    """The mean over questions, and by each of these details."""
    table = Table(OVERALL, {OVERALL: figure_of(answered)})
    table.group_by(answered, *keys)
    return table


def _mean_of_means(answered: Sequence[Answered], key: str, expected: int) -> tuple[Table, dict[str, list[Answered]]]:
    """The mean of the means of ``expected`` tasks or tracks, and beside it the mean over questions; and the groups."""
    main = f"mean of {key}s"
    table = Table(main)
    groups = grouped_by(answered, lambda question: str(detail(question, key)))
    table.figures[main] = shown(mean_of_groups(groups, f"{key}s", expected, table.notes))
    table.figures[OVERALL] = figure_of(answered)
    table.group_by(answered, key)
    return table, groups


def mvbench(answered: Sequence[Answered]) -> Table:
    """The paper's mean of 20 tasks, and the mean over questions: equal where every task has as many."""
    return _mean_of_means(answered, "task", 20)[0]


def tempcompass(answered: Sequence[Answered]) -> Table:
    """Papers average the tasks, VLMEvalKit pools the questions; the set itself publishes no total.

    It does publish each task by dimension and by fine dimension (``print_result`` of its ``utils/eval_utils.py``).
    """
    table, tasks = _mean_of_means(answered, "task", 4)
    table.group_by(answered, "dim")
    has_fine = any(question.details.get("fine_dim") for question in answered)
    if has_fine:
        table.add_groups("fine_dim", grouped_by(answered, _tempcompass_fine_dim))
    for task, questions in tasks.items():
        table.add_groups(f"dim of {task}", grouped(questions, "dim"))
        if has_fine:
            table.add_groups(f"fine_dim of {task}", grouped_by(questions, _tempcompass_fine_dim))
    return table


def _tempcompass_fine_dim(question: Answered) -> str:
    """As its videos are annotated; order is not divided further, and has its own name there."""
    return "order" if question.details.get("dim") == "order" else str(question.details.get("fine_dim") or NOT_GIVEN)


def vsi_bench_official(answered: Sequence[Answered]) -> Table:
    """Eight tasks count alike; relative direction is one, the mean of its three levels."""
    table = Table(MEAN_OF_TASKS)
    types = estimates_of(_vsi_types(answered, table))
    levels = [types[name] for name in VSI_DIRECTIONS if name in types]
    direction = mean_of_estimates(levels)
    tasks = {name: one for name, one in types.items() if name not in VSI_DIRECTIONS}
    if direction is not None:
        tasks["object_rel_direction"] = direction
    table.figures[MEAN_OF_TASKS] = shown(mean_of_estimates(list(tasks.values())))
    table.figures[OVERALL] = figure_of(answered)
    table.groups["task"] = {name: one.figure() for name, one in sorted(tasks.items())}
    if len(tasks) < 8:
        table.notes.append(f"The mean is over {len(tasks)} of the 8 tasks.")
    if levels and len(levels) < len(VSI_DIRECTIONS):
        table.notes.append(f"Relative direction is the mean of {len(levels)} of its 3 levels.")
    return table


def vsi_bench_video_r1(answered: Sequence[Answered]) -> Table:
    """Half choice, half numbers, as Video-R1 publishes it (its issue 121)."""
    main = "(choice + numerical) / 2"
    table = Table(main)
    types = _vsi_types(answered, table)
    choice, numerical = (
        mean_of(values_of([question for name in names for question in types.get(name, ())]), SCORES)
        for names in (VSI_CHOICE, VSI_NUMERICAL)
    )
    both = [one for one in (choice, numerical) if one is not None]
    table.figures[main] = shown(mean_of_estimates(both) if len(both) == 2 else None)
    table.figures["choice"], table.figures["numerical"] = shown(choice), shown(numerical)
    if len(both) < 2:
        table.notes.append(f"{main} has no value: it takes scored questions of both kinds.")
    return table


def _vsi_types(answered: Sequence[Answered], table: Table) -> dict[str, list[Answered]]:
    """Questions by type, which are tabulated, too; types without a scored question are noted."""
    types = grouped_by(answered, lambda question: str(detail(question, "question_type")))
    known = (*VSI_NUMERICAL, *VSI_CHOICE)
    for name, questions in types.items():
        if name not in known:
            raise _unknown_detail("VSI-Bench", "question type", name, questions[0], known)
    table.group_by(answered, "question_type")
    scored = estimates_of(types)
    if missing := [name for name in known if name not in scored]:
        table.notes.append(f"No question of {', '.join(missing)} could be scored.")
    return types


def _unknown_detail(of_set: str, what: str, value: str, question: Answered, known: Iterable[str]) -> VlmPgError:
    return VlmPgError(
        f"{of_set} has no {what} {value!r} (question {question.sample_id!r}). Its {what}s are {', '.join(known)}. "
        "Correct the details, or choose the aggregation 'mean'."
    )


def is_question_only(question: Answered) -> bool:
    """Whether a question of Video-MMMU was asked without its lecture: details["question_only"] is true."""
    return question.details.get("question_only") is True


def video_mmmu(answered: Sequence[Answered]) -> Table:
    """The mean of three tracks, and what a model learns from the lecture, from the questions without it."""
    before = tuple(question for question in answered if is_question_only(question))
    after = [question for question in answered if not is_question_only(question)]
    table, tracks = _mean_of_means(after, "track", 3)
    table.left_out = before
    table.group_by(after, "subject")
    if before:
        adaptation = [question for name, each in tracks.items() if name.casefold() == "adaptation" for question in each]
        table.figures["adaptation without the lecture"] = figure_of(before)
        table.figures["knowledge gain"] = _knowledge_gain(mean_of(values_of(adaptation)), mean_of(values_of(before)))
        if table.figures["knowledge gain"].value is None:
            table.notes.append(
                "The knowledge gain has no value: it takes adaptation questions that were scored with the lecture, and "
                "some that are wrong without."
            )
    return table


def _knowledge_gain(after: Estimate | None, before: Estimate | None) -> Figure:
    """(after - before) / (1 - before) in percent (README of Video-MMMU); its error by the delta method."""
    if after is None or before is None or before.value >= 1.0:
        return Figure(None, 0, unit="percent")
    room = 1.0 - before.value
    slopes = (1.0 / room, after), ((after.value - 1.0) / room**2, before)
    return combination((after.value - before.value) / room, slopes, (-math.inf, 1.0)).figure("percent", 100.0)


def mmvu(answered: Sequence[Answered]) -> Table:
    """All questions, those with choices (what Video-R1 reports), open ones, and the four groups of subjects."""
    table = mean_by(answered, "question_type", "subject")
    kinds = grouped_by(answered, lambda question: str(detail(question, "question_type")))
    for name, kind in (("multiple choice", "multiple-choice"), ("open-ended", "open-ended")):
        table.figures[name] = figure_of(kinds.get(kind, ()))
    table.add_groups("group", grouped_by(answered, _mmvu_group))
    return table


def _mmvu_group(question: Answered) -> str:
    subject = str(detail(question, "subject"))
    group = _MMVU_GROUP_OF.get(subject.replace("_", " "))
    if group is None:
        raise _unknown_detail("MMVU", "subject", subject, question, sorted(_MMVU_GROUP_OF))
    return group


def nextqa(answered: Sequence[Answered]) -> Table:
    """By type and by its first letter: causal, temporal, descriptive. TP counts as TN, as in ``eval_mc.py``."""

    def type_of(question: Answered) -> str:
        name = str(detail(question, "type"))
        return "TN" if name == "TP" else name

    table = mean_by(answered)
    table.add_groups("type", grouped_by(answered, type_of))
    table.add_groups("kind", grouped_by(answered, lambda question: type_of(question)[0]))
    return table


def charades_sta(answered: Sequence[Answered]) -> Table:
    """In percent: mIoU, and R@1 at three thresholds. The score of an output is its intersection over union."""

    def recall(question: Answered, threshold: float) -> float | None:
        return mean(float(score >= threshold) for _, score in counted(question))

    table = Table("mIoU", {"mIoU": figure_of(answered, unit="percent")})
    for threshold in (0.3, 0.5, 0.7):
        figure = figure_of(answered, partial(recall, threshold=threshold), "percent", SCORES)
        table.figures[f"R@1 IoU>={threshold}"] = figure
    return table


def mathematics(answered: Sequence[Answered]) -> Table:
    """Mean@n, majority@n and pass@n of n outputs to each problem; by subject and level where they are published."""
    scored = [question for question in answered if question.score is not None]
    n = max(ks_of(scored), default=1)
    table = Table(f"mean@{n}", {f"mean@{n}": figure_of(answered)})
    table.figures[f"majority@{n}"] = figure_of(scored, partial(question_majority_at_k, k=n), limits=SCORES)
    table.figures[f"pass@{n}"] = figure_of(scored, partial(question_pass_at_k, k=n), limits=SCORES)
    most = max((len(question.outputs) for question in scored), default=n)
    if most > n:
        table.notes.append(f"Problems have {n} to {most} outputs; the mean takes all of them, votes take {n}.")
    table.group_by(answered, "subject", "level")
    return table


Tabulate = Callable[[Sequence[Answered]], Table]


def _means_by(*keys: str) -> tuple[str, Tabulate]:
    return OVERALL, lambda answered: mean_by(answered, *keys)


# By name: what the main figure is, in words, and the function that makes the figures.
AGGREGATIONS: Mapping[str, tuple[str, Tabulate]] = {
    "mean": _means_by(),
    "video_mme": _means_by("duration", "domain", "sub_category", "task_type"),
    "mvbench": ("mean of the means of the 20 tasks", mvbench),
    "tempcompass": ("mean of the means of the tasks", tempcompass),
    "vsi_bench/official": (
        "mean of the means of 8 tasks, one of them the mean of the three levels of relative direction",
        vsi_bench_official,
    ),
    "vsi_bench/video_r1": (
        "(mean over choice questions + mean relative accuracy over numerical ones) / 2",
        vsi_bench_video_r1,
    ),
    "video_mmmu": ("mean of the means of the tracks", video_mmmu),
    "mmvu": (OVERALL, mmvu),
    # By length of the video in seconds and kind of question.
    "longvideobench": _means_by("duration_group", "question_category", "topic_category", "level"),
    "nextqa": (OVERALL, nextqa),
    # A question counts for each of its skills.
    "mathvista": _means_by("task", "context", "grade", "skills", "question_type", "answer_type"),
    "charades_sta": ("mean over queries of the intersection over union, in percent", charades_sta),
    "math": ("mean over problems of the mean over their n outputs (mean@n)", mathematics),
}


@dataclass(frozen=True)
class Figures:
    """All figures of one evaluation set.

    ``main``: the name of the one in ``figures`` that is cited, made by ``rule``. ``groups``: by what the set groups by
    ("duration"), then by group ("short"). ``measures``: see ``measure``. ``notes``: remarks, in sentences.
    """

    aggregation: str
    rule: str
    main: str
    figures: Mapping[str, Figure]
    groups: Mapping[str, Mapping[str, Figure]]
    measures: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def headline(self) -> Figure:
        """The figure that is cited."""
        return self.figures[self.main]

    def to_row(self) -> dict[str, Any]:
        """As JSON has it: the measures, and the main figure as ``accuracy``, a fraction whatever its own unit is."""
        main, share = self.headline, 0.01 if self.headline.unit == "percent" else 1.0
        return {
            **self.measures,
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
    """The figures of a whole set by the aggregation of that name, a bundled one or the user's own by path.

    Args:
        formats: see ``measures.measure``.
        categories: details that figures are also given by, beside those that the aggregation groups by itself.

    Raises:
        ConfigError: there is no such aggregation; with the nearest.
        VlmPgError: a question lacks a detail that the figures are made by, has one that the rule does not know, or
            occurs twice.
    """
    rule, tabulate = _find(name)
    seen: set[tuple[str, bool]] = set()
    for question in answered:
        key = question.sample_id, is_question_only(question)
        if key in seen:
            raise VlmPgError(
                f"Question {question.sample_id!r} is there twice, and would count twice. Each question of a set may "
                "come once, with all of its outputs; remove the others."
            )
        seen.add(key)
    table = tabulate(answered)
    excluded = set(map(id, table.left_out))
    measured = [question for question in answered if id(question) not in excluded]
    table.group_by(measured, *(key for key in categories if key not in table.groups))
    if without := [key for key in categories if key not in table.groups]:
        table.notes.append(f"There are no figures by {', '.join(without)}, which no question has in its details.")
    measures, notes = measure(measured, formats), tuple(table.notes)
    return Figures(name, rule, table.main, table.figures, table.groups, measures, notes)


def _find(name: str) -> tuple[str, Tabulate]:
    if is_own(name):
        return own_aggregation(name)
    if name in AGGREGATIONS:
        return AGGREGATIONS[name]
    near = difflib.get_close_matches(name, AGGREGATIONS, n=1, cutoff=0.4)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"There is no aggregation {name!r}.{meant} There are: {', '.join(AGGREGATIONS)}; and functions of your own, as "
        "path/to/file.py:function."
    )
