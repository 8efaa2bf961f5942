"""Figures of sets and categories, side by side for all runs, as the page shows them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from vlm_pg.errors import ConfigError
from vlm_pg.eval.report.results import Results, label
from vlm_pg.observe.report.charts import Chart, draw_chart
from vlm_pg.observe.report.curves import Curve
from vlm_pg.observe.report.markup import dict_at, number, number_or_none, percent
from vlm_pg.observe.text import visible

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
            charts.append(draw_chart(Chart(label(name), "by training step", tuple(curves), as_percent=True)))
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
