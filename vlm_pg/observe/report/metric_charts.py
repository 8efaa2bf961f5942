"""Which metrics go into which chart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlm_pg.metrics import MAIN_CHARTS, SAVED_CHART, Chart
from vlm_pg.observe.metrics import Drawn
from vlm_pg.observe.report import charts
from vlm_pg.observe.report.curves import make_curve
from vlm_pg.observe.report.read import RunData, Series
from vlm_pg.observe.text import one_line

_MAX_OTHER_CHARTS = 24
# More lines in one chart cannot be told apart; names are cut where a damaged file has whole texts for them.
_MAX_CURVES, _MAX_NAME_CHARACTERS = 16, 80
_SAVED = "tokens_saved_share"


def curves_view(run: RunData) -> dict[str, Any]:
    """The charts of all curves, the main ones first, and a sentence on main ones that this run lacks."""
    metrics = dict(run.metrics.of("train"))
    if not metrics:
        return {"none": run.missing.get("metrics.jsonl", "No training step has been logged."), "lead": ""}
    drawn, saved = dict(run.drawn), saved_share(metrics)
    if saved is not None:
        metrics[_SAVED], drawn[_SAVED] = saved, Drawn("of the tokens repeating it would cost", SAVED_CHART)
    planned = planned_charts(metrics, drawn)
    return {
        "none": "",
        "lead": "Strong lines are rolling means, faint lines the values of single steps. Point at a chart to read "
        "values.",
        "main": [charts.draw_chart(chart) for plan, chart in planned if plan.place < 10],
        "missing": _missing_sentence(run, {plan.title for plan, _ in planned}),
        "more": [charts.draw_chart(chart) for plan, chart in planned if plan.place >= 10]
        + [charts.draw_chart(chart) for chart in _phase_charts(run)],
    }


def planned_charts(metrics: Mapping[str, Series], drawn: Mapping[str, Drawn]) -> list[tuple[Chart, charts.Chart]]:
    """The charts that metrics were declared for, in their order, then one each of the other metrics."""
    keys_of: dict[Chart, list[str]] = {}
    for key, how in drawn.items():
        if key in metrics and how.chart is not None:
            keys_of.setdefault(how.chart, []).append(key)
    planned = sorted(keys_of.items(), key=lambda item: item[0].place)
    others = sorted(metrics.keys() - {key for _, keys in planned for key in keys})
    planned += [(Chart(key), [key]) for key in others[:_MAX_OTHER_CHARTS]]
    units = {key: one_line(how.unit, _MAX_NAME_CHARACTERS) for key, how in drawn.items()}
    return [(plan, _chart(plan, units.get(keys[0], ""), keys, metrics)) for plan, keys in planned]


def _chart(plan: Chart, unit: str, keys: list[str], metrics: Mapping[str, Series]) -> charts.Chart:
    """Parts of a metric, "reward/format", come after the total, "reward"."""
    keys = sorted(keys, key=lambda key: ("/" in key, key if "/" in key else ""))[:_MAX_CURVES]
    names = [key.rsplit("/", 1)[-1] if "/" in key or "/" not in keys[-1] else "total" for key in keys]
    curves = tuple(
        make_curve(one_line(name.replace("_", " "), _MAX_NAME_CHARACTERS), metrics[key], plan.smooth)
        for name, key in zip(names, keys, strict=True)
    )
    return charts.Chart(one_line(plan.title, _MAX_NAME_CHARACTERS), unit, curves, plan.as_percent)


def saved_share(metrics: Mapping[str, Series]) -> Series | None:
    """1 - tokens computed / tokens with the prefix repeated, for the steps that counted both."""
    if "tokens_computed" not in metrics or "tokens_repeated" not in metrics:
        return None
    computed = dict(zip(metrics["tokens_computed"].steps, metrics["tokens_computed"].values, strict=True))
    saved = Series()
    for step, repeated in zip(metrics["tokens_repeated"].steps, metrics["tokens_repeated"].values, strict=True):
        if step in computed and repeated > 0:
            saved.steps.append(step)
            saved.values.append(1 - computed[step] / repeated)
    return saved if saved.steps else None


def _phase_charts(run: RunData) -> list[charts.Chart]:
    """Metrics of other phases (an evaluation now and then) that changed over at least two steps."""
    found = []
    for phase in sorted(set(run.metrics.phases) - {"train"}):
        for key, series in sorted(run.metrics.of(phase).items()):
            if len(series.steps) > 1:
                name = one_line(f"{phase}: {key}", _MAX_NAME_CHARACTERS)
                found.append(charts.Chart(name, "", (make_curve(name, series),)))
    return found[:_MAX_OTHER_CHARTS]


def _missing_sentence(run: RunData, titles: set[str]) -> str:
    if "curves.json" in run.missing:
        return run.missing["curves.json"]
    missing = ", ".join(chart.title for chart in MAIN_CHARTS if chart.title not in titles)
    return f"Not logged in this run: {missing}." if missing else ""
