"""Accuracy before and after training, as bars per evaluation set and as numbers."""

from __future__ import annotations

from typing import Any

from vlm_pg.observe.report.markup import absent, dict_at, esc, first, number, number_or_none, percent, section, table
from vlm_pg.observe.report.read import RunData

_PHASES = ("before", "after")
_MAX_SETS, _MAX_CATEGORIES = 60, 200


def accuracy_section(run: RunData) -> str:
    """Bars for the evaluation sets and, apart from them, the controls; then all numbers in tables."""
    results = {phase: dict_at(run.summary, f"eval_{phase}", "sets") for phase in _PHASES}
    names, more = first(list(dict.fromkeys([*results["before"], *results["after"]])), _MAX_SETS)
    if not names:
        reason = run.missing.get("summary.json", "summary.json holds no evaluation: none has finished yet.")
        return section("accuracy", "Accuracy before and after", absent(reason))
    groups = {"eval": [], "control": []}  # type: dict[str, list[str]]
    for name in names:
        entry = dict_at(results["after"], name) or dict_at(results["before"], name)
        groups["control" if entry.get("kind") == "control" else "eval"].append(name)
    body = _legend() + _bars(groups["eval"], results)
    if more:
        body += absent(f"{more:,} more evaluation sets are in summary.json.")
    if groups["control"]:
        body += (
            '<h3>Controls</h3><p class="hint">The same questions about videos whose evidence was destroyed on purpose. '
            "A model that reads the evidence, and not a short cut, stays near chance here.</p>"
            + _bars(groups["control"], results)
        )
    for phase in _PHASES:
        if not results[phase]:
            body += absent(f"There is no evaluation {phase} training in summary.json.")
    return section("accuracy", "Accuracy before and after", f'<div class="card">{body}</div>{_tables(names, results)}')


def _legend() -> str:
    return (
        '<div class="bars-legend"><span class="sw before"></span>before <span class="sw after"></span>after '
        '<span class="sw whisker-key"></span>± 1 standard error <span class="sw chance-key"></span>chance</div>'
    )


def _bars(names: list[str], results: dict[str, dict[str, Any]]) -> str:
    if not names:
        return ""
    rows = "".join(_set_row(name, *(dict_at(results[phase], name) for phase in _PHASES)) for name in names)
    axis = "".join(f'<span style="left:{tick}%">{tick}\u202f%</span>' for tick in (0, 25, 50, 75, 100))
    return (
        f'<div class="bars">{rows}'
        f'<div class="set axis-row"><div></div><div class="axis-labels">{axis}</div><div></div></div></div>'
    )


def _set_row(name: str, before: dict[str, Any], after: dict[str, Any]) -> str:
    counts = list(dict.fromkeys(str(entry["n"]) for entry in (before, after) if "n" in entry))
    chance = number_or_none((after or before).get("chance"))
    tracks = "".join(_bar(phase, entry) for phase, entry in zip(_PHASES, (before, after), strict=True) if entry)
    if chance is not None:
        tracks += f'<div class="chance" style="left:{100 * chance:.2f}%" title="chance {percent(chance)}"></div>'
    return (
        f'<div class="set"><div class="set-name">{esc(name.replace("_", " "))}'
        f'<small>n = {esc(" / ".join(counts) or "?")}</small></div><div class="tracks">{tracks}</div>'
        f'<div class="set-values">{_value("before", before)}{_value("after", after)}</div></div>'
    )


def _bar(phase: str, entry: dict[str, Any]) -> str:
    accuracy = number_or_none(entry.get("accuracy"))
    if accuracy is None:
        return ""
    error = number_or_none(entry.get("standard_error")) or 0.0
    low, high = max(0.0, accuracy - error), min(1.0, accuracy + error)
    title = f"{phase}: {percent(accuracy)} ± {percent(error)}"
    return (
        f'<div class="track" title="{title}"><div class="bar {phase}" style="width:{100 * accuracy:.2f}%"></div>'
        f'<div class="whisker" style="left:{100 * low:.2f}%;width:{100 * (high - low):.2f}%"></div></div>'
    )


def _value(phase: str, entry: dict[str, Any]) -> str:
    if not entry:
        return f'<div class="{phase}">–</div>'
    error = number_or_none(entry.get("standard_error"))
    spread = "" if error is None else f" <small>± {100 * error:.1f}</small>"
    return f'<div class="{phase}">{percent(number_or_none(entry.get("accuracy")))}{spread}</div>'


def _tables(names: list[str], results: dict[str, dict[str, Any]]) -> str:
    head = ["set", "training", "accuracy", "standard error", "n", "right format", "pass@k", "chance", "left out"]
    rows = []
    for name in names:
        for phase in _PHASES:
            entry = dict_at(results[phase], name)
            if entry:
                shares = [percent(number_or_none(entry.get(key))) for key in ("accuracy", "standard_error")]
                count, form = esc(entry.get("n", "–")), percent(number_or_none(entry.get("format_rate")))
                chance = percent(number_or_none(entry.get("chance")))
                rows.append([esc(name), phase, *shares, count, form, _pass_at_k(entry), chance, _left_out(entry)])
    body = table(head, rows, "second-left")
    categories = _category_rows(names, results)
    if categories:
        body += "<h3>By category</h3>" + table(["set", "category", "n", "before", "after"], categories, "second-left")
    return f"<details><summary>All numbers</summary>{body}</details>"


def _pass_at_k(entry: dict[str, Any]) -> str:
    """The pass rate at the largest k of ``{"1": 0.5, "8": 0.9}``, or the one rate that is given."""
    rates = entry.get("pass_at_k")
    if not isinstance(rates, dict):
        return percent(number_or_none(rates))
    ks = sorted((k for k in rates if str(k).isdecimal() and len(k) < 10), key=int)
    return f"{percent(number_or_none(rates[ks[-1]]))} <small>k={int(ks[-1])}</small>" if ks else "–"


def _left_out(entry: dict[str, Any]) -> str:
    """Questions without an accuracy, by cause; they are in no average."""
    causes = (("n_bad_media", "unusable"), ("n_no_value", "no value"))
    said = [f"{number(number_or_none(entry[key]))} {words}" for key, words in causes if entry.get(key)]
    return ", ".join(said) or "0"


def _category_rows(names: list[str], results: dict[str, dict[str, Any]]) -> list[list[str]]:
    rows = []
    for name in names:
        before, after = (dict_at(results[phase], name, "by_category") for phase in _PHASES)
        for category in first(list(dict.fromkeys([*before, *after])), _MAX_CATEGORIES)[0]:
            entries = [dict_at(before, category), dict_at(after, category)]
            count = next((entry["n"] for entry in reversed(entries) if "n" in entry), "–")
            accuracies = [percent(number_or_none(entry.get("accuracy"))) for entry in entries]
            rows.append([esc(name), esc(category), esc(count), *accuracies])
    return rows
