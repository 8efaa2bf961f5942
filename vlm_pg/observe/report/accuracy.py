"""Accuracy before and after training: per evaluation set and per category, as the page shows it."""

from __future__ import annotations

from typing import Any

from vlm_pg.observe.report.markup import dict_at, first, number, number_or_none, percent
from vlm_pg.observe.report.read import RunData

_PHASES = ("before", "after")
_MAX_SETS, _MAX_CATEGORIES = 60, 200


def accuracy_view(run: RunData) -> dict[str, Any]:
    """Evaluation sets and controls, each with its results before and after; categories as rows of a table."""
    found = {phase: dict_at(run.summary, f"eval_{phase}", "sets") for phase in _PHASES}
    names, more = first(list(dict.fromkeys([*found["before"], *found["after"]])), _MAX_SETS)
    return {
        "missing": run.missing.get("summary.json", "summary.json holds no evaluation: none has finished yet."),
        "sets": [_set(name, *(dict_at(found[phase], name) for phase in _PHASES)) for name in names],
        "more": more,
        "absent_phases": [phase for phase in _PHASES if not found[phase]],
        "categories": _category_rows(names, found),
    }


def _set(name: str, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    counts = dict.fromkeys(str(entry["n"]) for entry in (before, after) if "n" in entry)
    newest = after or before
    return {
        "name": name,
        "counts": " / ".join(counts),
        "chance": number_or_none(newest.get("chance")),
        "is_control": newest.get("kind") == "control",
        "results": {"before": _result(before), "after": _result(after)},
    }


def _result(entry: dict[str, Any]) -> dict[str, Any] | None:
    """One evaluation; None where there was none. ``low``, ``high``: accuracy and its standard error, from 0 to 1."""
    if not entry:
        return None
    shares = {key: number_or_none(entry.get(key)) for key in ("accuracy", "format_rate", "chance")}
    error = number_or_none(entry.get("standard_error"))
    middle, spread = shares["accuracy"] or 0.0, error or 0.0
    ends = {"low": max(0.0, middle - spread), "high": min(1.0, middle + spread)}
    rate, k = _pass_at_k(entry)
    of_set = {"n": entry.get("n", "–"), "pass_rate": rate, "pass_k": k, "left_out": _left_out(entry)}
    return {**shares, "error": error, **ends, **of_set}


def _pass_at_k(entry: dict[str, Any]) -> tuple[float | None, int | None]:
    """The pass rate at the largest k of ``{"1": 0.5, "8": 0.9}`` and that k, or the one rate that is given."""
    rates = entry.get("pass_at_k")
    if not isinstance(rates, dict):
        return number_or_none(rates), None
    ks = sorted((k for k in rates if str(k).isdecimal() and len(k) < 10), key=int)
    return (number_or_none(rates[ks[-1]]), int(ks[-1])) if ks else (None, None)


def _left_out(entry: dict[str, Any]) -> str:
    """Questions without an accuracy, by cause; they are in no average."""
    causes = (("n_bad_media", "unusable"), ("n_no_value", "no value"))
    said = [f"{number(number_or_none(entry[key]))} {words}" for key, words in causes if entry.get(key)]
    return ", ".join(said) or "0"


def _category_rows(names: list[str], found: dict[str, dict[str, Any]]) -> list[list[Any]]:
    rows = []
    for name in names:
        before, after = (dict_at(found[phase], name, "by_category") for phase in _PHASES)
        for category in first(list(dict.fromkeys([*before, *after])), _MAX_CATEGORIES)[0]:
            entries = [dict_at(before, category), dict_at(after, category)]
            count = next((entry["n"] for entry in reversed(entries) if "n" in entry), "–")
            rows.append([name, category, count, *(percent(number_or_none(e.get("accuracy"))) for e in entries)])
    return rows
