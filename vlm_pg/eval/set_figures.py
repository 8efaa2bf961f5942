"""The figures of each evaluation set, one function a set, by the set's own rule.

Details are read under the names the sets publish them by. A figure by groups that a set publishes is there if the
questions have that detail; a rule whose main figure needs one raises without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from vlm_pg.errors import VlmPgError
from vlm_pg.eval.contracts import Answered
from vlm_pg.eval.estimates import SCORES, Estimate, Figure, combination, mean_of, mean_of_estimates
from vlm_pg.eval.measures import (
    figure_of,
    ks_of,
    mean_over_outputs,
    question_majority_at_k,
    question_pass_at_k,
    values_of,
)
from vlm_pg.eval.tables import NOT_GIVEN, Table, detail, estimates_of, grouped, grouped_by, mean_of_groups, shown

OVERALL = "mean over questions"

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


def plain(answered: Sequence[Answered]) -> Table:
    """The mean over questions."""
    return Table(OVERALL, {OVERALL: figure_of(answered)})


def video_mme(answered: Sequence[Answered]) -> Table:
    """By length of the video, domain, part of it and task."""
    table = plain(answered)
    table.group_by(answered, "duration", "domain", "sub_category", "task_type")
    return table


def mvbench(answered: Sequence[Answered]) -> Table:
    """The paper's mean of 20 tasks, and beside it the mean over questions: equal where every task has as many."""
    table = Table("mean of tasks")
    tasks = grouped_by(answered, lambda question: str(detail(question, "task")))
    table.figures["mean of tasks"] = shown(mean_of_groups(tasks, "tasks", 20, table.notes))
    table.figures[OVERALL] = figure_of(answered)
    table.group_by(answered, "task")
    return table


def tempcompass(answered: Sequence[Answered]) -> Table:
    """Papers average the tasks, VLMEvalKit pools the questions; the set itself publishes no total.

    It does publish each task by dimension and by fine dimension (``print_result`` of its ``utils/eval_utils.py``).
    """
    table = Table("mean of tasks")
    tasks = grouped_by(answered, lambda question: str(detail(question, "task")))
    table.figures["mean of tasks"] = shown(mean_of_groups(tasks, "tasks", 4, table.notes))
    table.figures[OVERALL] = figure_of(answered)
    table.group_by(answered, "task", "dim")
    has_fine = any(question.details.get("fine_dim") for question in answered)
    if has_fine:
        fine = grouped_by(answered, _tempcompass_fine_dim)
        table.groups["fine_dim"] = {name: figure_of(each) for name, each in fine.items()}
    for task, items in tasks.items():
        table.groups[f"dim of {task}"] = {name: figure_of(each) for name, each in grouped(items, "dim").items()}
        if has_fine:
            fine = grouped_by(items, _tempcompass_fine_dim)
            table.groups[f"fine_dim of {task}"] = {name: figure_of(each) for name, each in fine.items()}
    return table


def _tempcompass_fine_dim(question: Answered) -> str:
    """As its videos are annotated; order is not divided further, and has its own name there."""
    return "order" if question.details.get("dim") == "order" else str(question.details.get("fine_dim") or NOT_GIVEN)


def vsi_bench_official(answered: Sequence[Answered]) -> Table:
    """Eight tasks count alike; relative direction is one, the mean of its three levels."""
    table = Table("mean of tasks")
    types = estimates_of(_vsi_types(answered, table))
    levels = [types[name] for name in VSI_DIRECTIONS if name in types]
    direction = mean_of_estimates(levels)
    tasks = {name: one for name, one in types.items() if name not in VSI_DIRECTIONS}
    if direction is not None:
        tasks["object_rel_direction"] = direction
    table.figures["mean of tasks"] = shown(mean_of_estimates(list(tasks.values())))
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
    unknown = [name for name in types if name not in (*VSI_NUMERICAL, *VSI_CHOICE)]
    if unknown:
        raise VlmPgError(
            f"VSI-Bench has no question type {unknown[0]!r} (question {types[unknown[0]][0].sample_id!r}). Its types "
            f"are {', '.join((*VSI_NUMERICAL, *VSI_CHOICE))}. Correct the details, or choose the aggregation 'mean'."
        )
    table.group_by(answered, "question_type")
    found = estimates_of(types)
    missing = [name for name in (*VSI_NUMERICAL, *VSI_CHOICE) if name not in found]
    if missing:
        table.notes.append(f"No question of {', '.join(missing)} could be scored.")
    return types


def is_question_only(question: Answered) -> bool:
    """Whether a question of Video-MMMU was asked without its lecture: details["question_only"] is true."""
    return question.details.get("question_only") is True


def video_mmmu(answered: Sequence[Answered]) -> Table:
    """The mean of three tracks, and what a model learns from the lecture where it was also asked without."""
    before = tuple(question for question in answered if is_question_only(question))
    after = [question for question in answered if not is_question_only(question)]
    table = Table("mean of tracks", left_out=before)
    tracks = grouped_by(after, lambda question: str(detail(question, "track")))
    table.figures["mean of tracks"] = shown(mean_of_groups(tracks, "tracks", 3, table.notes))
    table.figures[OVERALL] = figure_of(after)
    table.group_by(after, "track", "subject")
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
    table = plain(answered)
    kinds = grouped_by(answered, lambda question: str(detail(question, "question_type")))
    for name, kind in (("multiple choice", "multiple-choice"), ("open-ended", "open-ended")):
        table.figures[name] = figure_of(kinds.get(kind, ()))
    table.group_by(answered, "question_type", "subject")
    groups = grouped_by(answered, _mmvu_group)
    table.groups["group"] = {name: figure_of(items) for name, items in groups.items()}
    return table


def _mmvu_group(question: Answered) -> str:
    subject = str(detail(question, "subject"))
    group = _MMVU_GROUP_OF.get(subject.replace("_", " "))
    if group is None:
        raise VlmPgError(
            f"MMVU has no subject {subject!r} (question {question.sample_id!r}). Its subjects are "
            f"{', '.join(sorted(_MMVU_GROUP_OF))}. Correct the details, or choose the aggregation 'mean'."
        )
    return group


def longvideobench(answered: Sequence[Answered]) -> Table:
    """By length of the video in seconds and kind of question."""
    table = plain(answered)
    table.group_by(answered, "duration_group", "question_category", "topic_category", "level")
    return table


def nextqa(answered: Sequence[Answered]) -> Table:
    """By type and by its first letter: causal, temporal, descriptive. TP counts as TN, as in ``eval_mc.py``."""
    table = plain(answered)
    types = grouped_by(answered, _nextqa_type)
    table.groups["type"] = {name: figure_of(items) for name, items in types.items()}
    kinds = grouped_by(answered, lambda question: _nextqa_type(question)[0])
    table.groups["kind"] = {name: figure_of(items) for name, items in kinds.items()}
    return table


def _nextqa_type(question: Answered) -> str:
    name = str(detail(question, "type"))
    return "TN" if name == "TP" else name


def mathvista(answered: Sequence[Answered]) -> Table:
    """By task, context, grade, kind of question and answer; a question counts for each of its skills."""
    table = plain(answered)
    table.group_by(answered, "task", "context", "grade", "skills", "question_type", "answer_type")
    return table


def charades_sta(answered: Sequence[Answered]) -> Table:
    """In percent: mIoU, and R@1 at three thresholds. The score of an output is its intersection over union."""
    table = Table("mIoU", {"mIoU": figure_of(answered, unit="percent")})
    for least in (0.3, 0.5, 0.7):
        table.figures[f"R@1 IoU>={least}"] = figure_of(
            answered, partial(_share_of_at_least, least=least), "percent", SCORES
        )
    return table


def _share_of_at_least(question: Answered, least: float) -> float | None:
    return mean_over_outputs(question, lambda score: float(score >= least))


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
