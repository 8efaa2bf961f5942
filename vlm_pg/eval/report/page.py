"""report.html of an evaluation: figures side by side for all runs, comparison, protocol."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from markupsafe import Markup

from vlm_pg import __version__
from vlm_pg.errors import ConfigError
from vlm_pg.eval.estimates import mean_of
from vlm_pg.eval.report.embed import Embedded, Room, embed
from vlm_pg.eval.report.results import Mark, Marks, Results, label, read_marks, read_results
from vlm_pg.files import write_bytes_atomic
from vlm_pg.observe.report.charts import Curve, LineChart, draw_chart
from vlm_pg.observe.report.markup import dict_at, environment, number, number_or_none, percent
from vlm_pg.observe.text import visible

MAX_RUNS = 6  # as many as there are colours
_OBSERVE, _EVAL = "vlm_pg.observe.report", "vlm_pg.eval.report"


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
            f"{len(compare)} folders are given for comparison. At most {MAX_RUNS - 1} can be told apart in one report; "
            "give fewer, or those of one run as checkpoints."
        )
    runs = [read_results(Path(one)) for one in (folder, *compare)]
    _name_apart(runs)
    page = _page_of(runs, title, [read_results(Path(one)) for one in checkpoints], room)
    path = Path(folder) / "report.html"
    write_bytes_atomic(path, page.encode("utf-8", "replace"))
    return path


def _name_apart(runs: Sequence[Results]) -> None:
    """Runs of the same folder name also get the name of the folder above."""
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = f"{run.folder.resolve().parent.name}/{run.name}"


def _page_of(runs: Sequence[Results], title: str, checkpoints: Sequence[Results], room: Room | None) -> str:
    this = runs[0]
    marks = [read_marks(run) for run in runs]
    others = [(run.name, found) for run, found in zip(runs[1:], marks[1:], strict=True)]
    embedded = embed(this, others, room)
    curve = [this, *checkpoints] if checkpoints and this.step is not None else list(checkpoints)
    rows, more_rows = protocol_rows(runs)
    ks, by_k = k_rows(runs)
    style = _piece(_OBSERVE, "style.css") + _piece(_EVAL, "style.css")
    scripts = [_piece(_OBSERVE, "hover.js"), _piece(_EVAL, "window.js"), _piece(_EVAL, "browser.js")]
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    return (
        environment(_EVAL, _OBSERVE)
        .get_template("eval_page.html")
        .render(
            policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {hashes}",
            style=style,
            scripts=scripts,
            title=title or label(this.name),
            checkpoint=this.protocol.get("checkpoint") or "",
            runs=[label(run.name) for run in runs],
            missing=[f"{label(run.name)}: {run.missing}" for run in runs if run.missing],
            tiles=_tiles(this),
            sets=set_views(runs),
            judged=judged_rows(runs),
            notes=note_rows(runs),
            has_judge=any("judged" in entry for entry in this.sets.values()),
            ks=ks,
            by_k=by_k,
            comparison=comparison_rows(marks[0], others),
            charts=step_charts(curve),
            protocol=rows,
            more_protocol=more_rows,
            embedded=embedded,
            data=_data(embedded),
            version=__version__,
            written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        )
    )


def _piece(package: str, name: str) -> Markup:
    """One of our own files, as it is."""
    return Markup(resources.files(package).joinpath(name).read_text("utf-8"))


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")


def _data(embedded: Embedded) -> list[tuple[str, Markup]]:
    """Element id and content of each piece of data. Base64 and lists of it hold nothing that could be markup."""
    pieces = [("index", embedded.index)]
    pieces += [(f"page-{number}", page) for number, page in enumerate(embedded.pages)]
    pieces += [(f"frames-{number}", chunk) for number, chunk in enumerate(embedded.frames)]
    return [(name, Markup(piece)) for name, piece in pieces]


def _tiles(this: Results) -> list[dict[str, Any]]:
    """Key numbers: accuracy where there is one set alone, since a mean over sets is nobody's figure."""
    summed = totals(this)
    tiles = []
    if len(this.sets) == 1:
        ((name, entry),) = this.sets.items()
        error = number_or_none(entry.get("standard_error"))
        note = label(name) if error is None else f"± {100 * error:.1f} points (1 standard error)"
        tiles.append({"title": "accuracy", "value": percent(number_or_none(entry.get("accuracy"))), "note": note})
    else:
        names = [label(name) for name in this.sets]
        note = ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")
        tiles.append({"title": "evaluation sets", "value": number(float(len(names))), "note": note})
    tiles.append(_count("questions scored", summed["n"], "of", summed["n_total"]))
    tiles.append(_count("unparsed", summed["n_unparsed"], "truncated:", summed["n_truncated"]))
    tiles.append(_count("bad media", summed["n_bad_media"], "questions that could not be asked", None))
    return tiles


def _count(title: str, value: float | None, words: str, more: float | None) -> dict[str, Any]:
    return {"title": title, "value": number(value), "note": words if more is None else f"{words} {number(more)}"}


_MAX_SETS, _MAX_CATEGORIES, _MAX_PROTOCOL, _MAX_NOTES = 100, 200, 300, 20


def set_views(runs: Sequence[Results]) -> list[dict[str, Any]]:
    """Each set with its figure in every run (None where a run has none) and its categories."""
    names = list(dict.fromkeys(name for run in runs for name in run.sets))[:_MAX_SETS]
    views = []
    for name in names:
        entries = [run.sets.get(name, {}) for run in runs]
        newest = next(entry for entry in entries if entry)
        categories = list(dict.fromkeys(key for entry in entries for key in dict_at(entry, "by_category")))
        views.append(
            {
                "name": label(name),
                "n": _counts(entries),
                "chance": number_or_none(newest.get("chance")),
                "figures": [_figure(entry) for entry in entries],
                "numbers": [
                    {"run": label(run.name), **_numbers(entry)}
                    for run, entry in zip(runs, entries, strict=True)
                    if entry
                ],
                "categories": [
                    _category(key, [dict_at(entry, "by_category", key) for entry in entries])
                    for key in categories[:_MAX_CATEGORIES]
                ],
                "more_categories": max(0, len(categories) - _MAX_CATEGORIES),
            }
        )
    return views


def _category(name: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": label(name),
        "n": _counts(entries),
        "chance": None,
        "figures": [_figure(entry) for entry in entries],
    }


def _counts(entries: Sequence[dict[str, Any]]) -> str:
    return " / ".join(dict.fromkeys(number(number_or_none(entry["n"])) for entry in entries if "n" in entry)) or "?"


def _figure(entry: dict[str, Any]) -> dict[str, float | None] | None:
    """Accuracy, its standard error, and the ends of the bar that shows it, all from 0 to 1."""
    accuracy, error = number_or_none(entry.get("accuracy")), number_or_none(entry.get("standard_error"))
    if accuracy is None:
        return None
    spread = error or 0.0
    inside = [min(max(value, 0.0), 1.0) for value in (accuracy - spread, accuracy, accuracy + spread)]
    return {"accuracy": accuracy, "error": error, "low": inside[0], "bar": inside[1], "high": inside[2]}


def _numbers(entry: dict[str, Any]) -> dict[str, str]:
    """The cells of the table of all numbers."""
    keys = ("n", "n_total", "n_unparsed", "n_truncated", "n_bad_media")
    return {
        "accuracy": percent(number_or_none(entry.get("accuracy"))),
        "error": percent(number_or_none(entry.get("standard_error"))),
        "reader": label(entry.get("reader") or "–"),
        **{key: number(number_or_none(entry.get(key))) for key in keys},
    }


def note_rows(runs: Sequence[Results]) -> list[str]:
    """What is to be known of figures, such as tasks that are missing, with the set and run that it is about."""
    said = []
    for run in runs:
        for name, entry in list(run.sets.items())[:_MAX_SETS]:
            notes = entry.get("notes")
            for note in notes[:_MAX_NOTES] if isinstance(notes, list) else ():
                of_run = f" ({label(run.name)})" if len(runs) > 1 else ""
                said.append(f"{label(name)}{of_run}: {visible(str(note))[:_MAX_PROTOCOL]}")
    return said


def judged_rows(runs: Sequence[Results]) -> list[dict[str, str]]:
    """Of each set and run with a judge: the figure of the rules, that with its decisions, and what it was asked."""
    keys = ("n_asked", "n_raised", "n_lowered", "n_valued", "n_undecided", "n_unreached")
    rows = []
    for run in runs:
        for name, entry in run.sets.items():
            judged = dict_at(entry, "judged")
            if judged:
                rows.append(
                    {
                        "set": label(name),
                        "run": label(run.name),
                        "model": label(judged.get("model") or "–"),
                        "rules": percent(number_or_none(entry.get("accuracy"))),
                        "judged": percent(number_or_none(judged.get("accuracy"))),
                        "error": percent(number_or_none(judged.get("standard_error"))),
                        **{key: number(number_or_none(judged.get(key))) for key in keys},
                    }
                )
    return rows


def _by_k(rates: object) -> dict[int, str]:
    """``{"1": 0.5, "8": 0.9}`` by k, in order of k; k is 0 of the one rate that may be given instead."""
    if not isinstance(rates, dict):
        rate = number_or_none(rates)
        return {} if rate is None else {0: percent(rate)}
    return {k: percent(number_or_none(rates[str(k)])) for k in _ks(rates)}


def _ks(rates: dict[str, Any]) -> list[int]:
    return sorted(int(k) for k in rates if len(k) < 10 and k.isdecimal() and k == str(int(k)))


def k_rows(runs: Sequence[Results]) -> tuple[list[int], list[dict[str, Any]]]:
    """pass@k and majority@k of each set and run: all k, and a row with the rates by k for each that has some."""
    rows: list[dict[str, Any]] = []
    for name in list(dict.fromkeys(name for run in runs for name in run.sets))[:_MAX_SETS]:
        for run in runs:
            for title, key in (("pass@k", "pass_at_k"), ("majority@k", "majority_at_k")):
                rates = _by_k(run.sets.get(name, {}).get(key))
                if rates:
                    rows.append({"set": label(name), "run": label(run.name), "title": title, "rates": rates})
    ks: set[int] = {k for row in rows for k in row["rates"]}
    return sorted(ks), rows


def totals(run: Results) -> dict[str, float | None]:
    """Sums over a run's sets, None where no set says the number."""
    summed: dict[str, float | None] = {}
    for key in ("n", "n_total", "n_unparsed", "n_truncated", "n_bad_media"):
        values = [number_or_none(entry.get(key)) for entry in run.sets.values()]
        known = [value for value in values if value is not None]
        summed[key] = sum(known) if known else None
    return summed


def step_charts(checkpoints: Sequence[Results]) -> list[Any]:
    """A chart a set: accuracy, and pass@k at the largest k where there are several outputs, over the training step.

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
    for name in list(dict.fromkeys(name for one in checkpoints for name in one.sets))[:_MAX_SETS]:
        entries = {step: by_step[step].sets.get(name, {}) for step in sorted(by_step)}
        curves = [
            curve
            for title, read in (("accuracy", _accuracy), ("pass@k, largest k", _largest_pass))
            if (curve := _curve(title, {step: read(entry) for step, entry in entries.items()})) is not None
        ]
        if curves:
            charts.append(draw_chart(LineChart(label(name), "by training step", tuple(curves), as_percent=True)))
    return charts


def _curve(name: str, values: dict[int, float | None]) -> Curve | None:
    known = {step: value for step, value in values.items() if value is not None}
    return Curve(name, tuple(known), tuple(known.values()), tuple(known.values())) if known else None


def _accuracy(entry: dict[str, Any]) -> float | None:
    return number_or_none(entry.get("accuracy"))


def _largest_pass(entry: dict[str, Any]) -> float | None:
    """None with one output a question, where it is the accuracy once more."""
    rates = dict_at(entry, "pass_at_k")
    ks = _ks(rates)
    return number_or_none(rates[str(ks[-1])]) if ks and ks[-1] > 1 else None


def protocol_rows(runs: Sequence[Results]) -> tuple[list[dict[str, Any]], int]:
    """Settings by dotted key with their value in every run, and how many more there are; ``differs`` marks those that
    are not the same in all of them.
    """
    flat = [dict(_flattened("", run.protocol)) for run in runs]
    keys = list(dict.fromkeys(key for settings in flat for key in settings))
    rows = []
    for key in keys[:_MAX_PROTOCOL]:
        values = [settings.get(key, "–") for settings in flat]
        rows.append({"key": key, "values": values, "differs": len(set(values)) > 1})
    return rows, max(0, len(keys) - _MAX_PROTOCOL)


def _flattened(prefix: str, value: Any, depth: int = 0) -> list[tuple[str, str]]:
    if isinstance(value, dict) and value and depth < 8:
        return [pair for key, inner in value.items() for pair in _flattened(f"{prefix}.{key}", inner, depth + 1)]
    words = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return [(prefix.removeprefix("."), words)]


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
