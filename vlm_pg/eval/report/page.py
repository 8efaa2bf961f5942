"""report.html of an evaluation: figures side by side for all runs, comparison, protocol."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from vlm_pg.errors import ConfigError
from vlm_pg.eval.measures import mean_of
from vlm_pg.eval.report.embed import Room, embed
from vlm_pg.eval.report.results import Marks, Results, label, read_marks, read_results
from vlm_pg.observe.report.charts import Curve, LineChart, draw_chart
from vlm_pg.observe.report.markup import (
    HOVER_SCRIPT,
    accuracy_figure,
    dict_at,
    number,
    number_or_none,
    percent,
    rates_by_k,
    tile,
    write_page,
)
from vlm_pg.observe.text import dotted, visible

MAX_RUNS = 6  # as many as there are colours
_HERE = Path(__file__).parent
_COUNTS = ("n", "n_total", "n_unparsed", "n_truncated", "n_bad_media")
_JUDGE_COUNTS = ("n_asked", "n_raised", "n_lowered", "n_valued", "n_undecided", "n_unreached")


def write_eval_report(
    folder: Path,
    title: str = "",
    compare: Sequence[Path] = (),
    checkpoints: Sequence[Path] = (),
    room: Room | None = None,
) -> Path:
    """Write ``report.html`` into a results folder: figures, protocol, and a browser of its questions.

    Args:
        folder: holds ``result.json`` and ``answers_<set>.jsonl``; one of the two may be missing.
        title: heading of the page, the folder's name by default.
        compare: other results folders, shown side by side with this one.
        checkpoints: results folders of other checkpoints of the same run, for the curve over training steps; this one's
            own is added where its step is known.
        room: how large the file may become, a little below 100 MB by default.

    Returns:
        The file's path.

    Raises:
        ConfigError: a folder holds no results, there are too many to compare, or a checkpoint's step is unknown.
    """
    if len(compare) >= MAX_RUNS:
        raise ConfigError(
            f"{len(compare)} folders are given for comparison. At most {MAX_RUNS - 1} can be distinguished in one; "
            "give fewer, or those of one run as checkpoints."
        )
    runs = [read_results(Path(one)) for one in (folder, *compare)]
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = f"{run.folder.resolve().parent.name}/{run.name}"
    this, names = runs[0], [label(run.name) for run in runs]
    marks = [read_marks(run) for run in runs]
    others = [(run.name, found) for run, found in zip(runs[1:], marks[1:], strict=True)]
    embedded = embed(this, others, room)
    pieces = {"index": embedded.index} | {f"page-{number}": page for number, page in enumerate(embedded.pages)}
    pieces |= {f"frames-{number}": chunk for number, chunk in enumerate(embedded.frames)}
    sets, ks = set_views(runs), k_rows(runs)
    comparison = comparison_rows(marks[0], others)
    of_run = [read_results(Path(one)) for one in checkpoints]
    charts = step_charts([this, *of_run] if of_run and this.step is not None else of_run)
    nav = {"accuracy": True, "comparison": comparison, "steps": charts, "categories": True, "protocol": True}
    titles = {"steps": "Training steps"}
    return write_page(
        Path(folder) / "report.html",
        _HERE / "templates" / "eval.html",
        title or label(this.name),
        scripts=[HOVER_SCRIPT, _HERE / "browser.js"],
        styles=[_HERE / "eval.css"],
        tiles=_tiles(this),
        nav=[(key, titles.get(key, key.capitalize())) for key, shown in nav.items() if shown]
        + [("questions", "Questions")],
        checkpoint=this.protocol.get("checkpoint") or "",
        runs=names,
        series=[(name, f"c{color}") for color, name in enumerate(names)],
        missing=[f"{label(run.name)}: {run.missing}" for run in runs if run.missing],
        sets=sets,
        has_chance=any(one["chance"] is not None for one in sets),
        numbers=number_rows(runs),
        notes=note_rows(runs),
        judged=judged_rows(runs),
        has_judge=any("judged" in entry for entry in this.sets.values()),
        by_k_head=ks[0],
        by_k=ks[1],
        comparison=comparison,
        charts=charts,
        protocol=protocol_rows(runs),
        embedded=embedded,
        # Element id and content of each piece. Base64 and lists of it hold nothing that could be markup.
        data=[(name, Markup(piece)) for name, piece in pieces.items()],
    )


def _tiles(this: Results) -> list[dict[str, Any]]:
    """Key numbers: accuracy where there is a single set, since no set has the mean over sets."""
    summed: dict[str, float | None] = {}
    for key in _COUNTS:
        known = [value for entry in this.sets.values() if (value := number_or_none(entry.get(key))) is not None]
        summed[key] = sum(known) if known else None
    names = [label(name) for name in this.sets]
    if len(names) == 1:
        entry = this.sets[next(iter(this.sets))]
        error = number_or_none(entry.get("standard_error"))
        note = names[0] if error is None else f"± {100 * error:.1f} points (1 standard error)"
        main = tile("accuracy", percent(number_or_none(entry.get("accuracy"))), note)
    else:
        note = ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")
        main = tile("evaluation sets", number(float(len(names))), note)

    def count(title: str, key: str, words: str, more: str) -> dict[str, Any]:
        return tile(title, number(summed[key]), words if summed[more] is None else f"{words} {number(summed[more])}")

    return [
        main,
        count("questions scored", "n", "of", "n_total"),
        count("unparsed", "n_unparsed", "truncated:", "n_truncated"),
        tile("bad media", number(summed["n_bad_media"]), "questions that could not be asked"),
    ]


def _set_names(runs: Sequence[Results]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.sets))


def set_views(runs: Sequence[Results]) -> list[dict[str, Any]]:
    """Each set with its figure in every run (None where a run has none) and its categories."""
    views = []
    for name in _set_names(runs):
        entries = [run.sets.get(name, {}) for run in runs]
        newest = next(entry for entry in entries if entry)
        names = dict.fromkeys(key for entry in entries for key in dict_at(entry, "by_category"))
        categories = [_bar_row(key, [dict_at(entry, "by_category", key) for entry in entries], None) for key in names]
        row = _bar_row(name, entries, number_or_none(newest.get("chance")))
        views.append(row | {"categories": categories})
    return views


def _bar_row(name: str, entries: Sequence[dict[str, Any]], chance: float | None) -> dict[str, Any]:
    counts = dict.fromkeys(number(number_or_none(entry["n"])) for entry in entries if "n" in entry)
    figures = [accuracy_figure(entry) for entry in entries]
    return {"name": label(name), "n": " / ".join(counts) or "?", "chance": chance, "figures": figures}


def number_rows(runs: Sequence[Results]) -> list[list[str]]:
    """Set, run, accuracy, standard error, counts and reader of each set and run."""
    return [
        [
            label(name),
            label(run.name),
            *(percent(number_or_none(entry.get(key))) for key in ("accuracy", "standard_error")),
            *(number(number_or_none(entry.get(key))) for key in _COUNTS),
            label(entry.get("reader") or "–"),
        ]
        for name in _set_names(runs)
        for run in runs
        if (entry := run.sets.get(name))
    ]


def note_rows(runs: Sequence[Results]) -> list[str]:
    """Remarks on figures, such as missing tasks, with the set and run that each is about."""
    rows = []
    for run in runs:
        of_run = f" ({label(run.name)})" if len(runs) > 1 else ""
        for name, entry in run.sets.items():
            rows += [f"{label(name)}{of_run}: {visible(note)}" for note in entry.get("notes", ())]
    return rows


def judged_rows(runs: Sequence[Results]) -> list[list[str]]:
    """Set, run and judge model; the figure of the rules, that with the judge's decisions, its error and counts."""
    return [
        [
            label(name),
            label(run.name),
            label(judged.get("model") or "–"),
            percent(number_or_none(entry.get("accuracy"))),
            *(percent(number_or_none(judged.get(key))) for key in ("accuracy", "standard_error")),
            *(number(number_or_none(judged.get(key))) for key in _JUDGE_COUNTS),
        ]
        for run in runs
        for name, entry in run.sets.items()
        if (judged := dict_at(entry, "judged"))
    ]


def k_rows(runs: Sequence[Results]) -> tuple[list[str], list[list[str]]]:
    """pass@k and majority@k of each set and run, with the head of their table; nothing if all have k = 1 alone."""
    found = [
        (label(name), label(run.name), title, rates)
        for name in _set_names(runs)
        for run in runs
        for title, key in (("pass@k", "pass_at_k"), ("majority@k", "majority_at_k"))
        if (rates := rates_by_k(run.sets.get(name, {}).get(key)))
    ]
    ks = sorted({k for row in found for k in row[-1]})
    if ks in ([], [1]):
        return [], []
    head = ["set", "run", "", *(f"k = {k}" if k else "rate" for k in ks)]
    return head, [[*words, *(percent(rates.get(k)) for k in ks)] for *words, rates in found]


def step_charts(checkpoints: Sequence[Results]) -> list[Markup]:
    """A chart per set: accuracy, and pass@k at the largest k where there are several outputs, over the training step.

    Raises:
        ConfigError: a checkpoint's results do not say its step, or two say the same.
    """
    by_step: dict[int, Results] = {}
    for one in checkpoints:
        if one.step is None:
            raise ConfigError(
                f"The results in '{one.folder}' name no training step: protocol.checkpoint in result.json is "
                f"{one.protocol.get('checkpoint')!r}, and a step is read from a name such as step-000120. Give these "
                "results for comparison instead."
            )
        if one.step in by_step:
            raise ConfigError(
                f"'{one.folder}' and '{by_step[one.step].folder}' are both of step {one.step}. A curve has one value "
                "a step: give one of them."
            )
        by_step[one.step] = one
    charts = []
    for name in _set_names(checkpoints):
        points: dict[str, dict[int, float]] = {"accuracy": {}, "pass@k, largest k": {}}
        for step in sorted(by_step):
            entry = by_step[step].sets.get(name, {})
            k, rate = next(reversed(rates_by_k(dict_at(entry, "pass_at_k")).items()), (0, None))
            # With one output a question pass@1 is the accuracy once more.
            values = (number_or_none(entry.get("accuracy")), rate if k > 1 else None)
            for of_curve, value in zip(points.values(), values, strict=True):
                if value is not None:
                    of_curve[step] = value
        curves = [
            Curve(title, tuple(known), tuple(known.values()), tuple(known.values()))
            for title, known in points.items()
            if known
        ]
        if curves:
            charts.append(draw_chart(LineChart(label(name), "by training step", tuple(curves), as_percent=True)))
    return charts


def protocol_rows(runs: Sequence[Results]) -> list[dict[str, Any]]:
    """Settings by dotted key with their value in every run; ``differs`` marks those that are not the same in all."""
    flat = [
        {key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for key, value in settings}
        for settings in (dotted(run.protocol) for run in runs)
    ]
    rows = []
    for key in dict.fromkeys(key for settings in flat for key in settings):
        values = [settings.get(key, "–") for settings in flat]
        rows.append({"key": key, "values": values, "differs": len(set(values)) > 1})
    return rows


def comparison_rows(own: Marks, others: Sequence[tuple[str, Marks]]) -> list[list[str]]:
    """Set, other run, n, mean difference (own minus other), standard error, higher and lower, where both share
    questions with a score. The error is clustered (``measures.py``); "–" with a single cluster.
    """
    rows = []
    for name, marks in own.items():
        for other_name, other in others:
            theirs = other.get(name, {})
            pairs = [(marks[key], theirs[key]) for key in sorted(marks.keys() & theirs.keys())]
            valued = [(a.cluster, a.score - b.score) for a, b in pairs if a.score is not None and b.score is not None]
            estimate = mean_of(valued)
            if estimate is None:
                continue
            difference = f"{100 * estimate.value:+.1f}".replace("-", "−") + " points"
            error = "–" if estimate.standard_error is None else f"{100 * estimate.standard_error:.1f}"
            higher, lower = (sum(sign * one > 1e-9 for _, one in valued) for sign in (1, -1))
            rows.append(
                [label(name), label(other_name), f"{estimate.n:,}", difference, error, f"{higher:,}", f"{lower:,}"]
            )
    return rows
