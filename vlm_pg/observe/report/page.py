"""report.html of a run: its sections, and the values that their templates show."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from vlm_pg.metrics import MAIN_CHARTS, SAVED_CHART, Chart
from vlm_pg.observe.logs import Drawn
from vlm_pg.observe.report.charts import LineChart, draw_chart, make_curve, window_of
from vlm_pg.observe.report.markup import (
    HOVER_SCRIPT,
    accuracy_figure,
    dict_at,
    duration,
    number,
    number_or_none,
    percent,
    rates_by_k,
    shown,
    tile,
    write_page,
)
from vlm_pg.observe.report.read import RunData, Series, is_step, read_run
from vlm_pg.observe.report.rollouts import rollouts_view
from vlm_pg.observe.report.timeline import in_order, phase_style, timeline_view
from vlm_pg.observe.text import one_line

_TEMPLATE = Path(__file__).parent / "templates" / "run.html"
_SECTIONS = ("Accuracy", "Curves", "Rollouts", "Sharing", "Time", "Bad samples", "Settings")
_MAX_OTHER_CHARTS, _MAX_CONFIG_CHARACTERS = 24, 200_000
# More lines in one chart cannot be distinguished; names are cut where a damaged file has whole texts for them.
_MAX_CURVES, _MAX_NAME_CHARACTERS = 16, 80
_SAVED = "tokens_saved_share"


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into a run's folder and return its path.

    Reads nothing outside the folder; works for a run in progress. Raises ConfigError when it is no run's folder.
    """
    run = read_run(Path(run_dir))
    done, planned = run.metrics.last_step, dict_at(run.config, "training").get("steps")
    return write_page(
        run.folder.report,
        _TEMPLATE,
        dict_at(run.config, "run").get("name") or run.folder.path.resolve().name,
        scripts=[HOVER_SCRIPT],
        tiles=_tiles(run),
        nav=[(name.split()[0].lower(), name) for name in _SECTIONS],
        run=run,
        finished=run.summary.get("finished") is True,
        model=dict_at(run.config, "model").get("path") or "model unknown",
        data=dict_at(run.config, "data").get("train") or "data unknown",
        steps=f"step {done:,} of {planned:,}" if is_step(planned) and planned > done else f"{done:,} steps",
        accuracy=accuracy_view(run),
        curves=curves_view(run),
        rollouts=rollouts_view(run),
        sharing=sharing_view(run),
        time=time_view(run),
        timeline=timeline_view(run),
        bad_samples=[(reason, count, run.bad_samples.get(reason, {})) for reason, count in run.bad_counts.items()],
        versions=dict_at(run.summary, "versions"),
        config=run.config_text and shown(run.config_text, _MAX_CONFIG_CHARACTERS),
    )


def _tiles(run: RunData) -> list[dict[str, Any]]:
    """Key numbers: accuracy, reward, tokens saved, duration."""
    before, after = (dict_at(run.summary, f"eval_{phase}") for phase in ("before", "after"))
    start, end = (number_or_none(entry.get("accuracy")) for entry in (before, after))
    if end is None:
        note = "evaluation after training is still to come" if start is not None else "not evaluated yet"
        tiles = [tile("accuracy", percent(start), note)]
    else:
        words = Markup(f"{after['n']:,} questions" if is_step(after.get("n")) else "")
        if words and after.get("headline_set"):
            words += Markup(" ({})").format(shown(after["headline_set"]))
        if start is not None:
            change = f"{100 * (end - start):+.1f} points".replace("-", "−")
            words = Markup("{} on ").format(change) + words if words else Markup(change)
        tiles = [tile("accuracy", percent(end), words, None if start is None else percent(start))]
    trained = run.metrics.of("train")
    name = next((one for one in ("nll", "preference/accuracy") if one in trained), "reward")
    values = trained.get(name, Series()).values
    if values:
        width = window_of(len(values))
        first_mean, last_mean = (sum(part) / len(part) for part in (values[:width], values[-width:]))
        note = f"means of first and last {width:,} steps" if width > 1 else "first and last step"
        tiles.append(tile(name, f"{last_mean:.2f}", note, f"{first_mean:.2f}"))
    else:
        tiles.append(tile(name, "–", "no step yet"))
    computed, repeated = sharing_totals(run) or (0, 0)
    share = percent(1 - computed / repeated) if repeated else "–"
    note = f"{repeated - computed:,} of {repeated:,}" if repeated else "not counted yet"
    tiles.append(tile("tokens saved by sharing", share, note))
    seconds, note = number_or_none(dict_at(run.summary, "seconds").get("total")), "whole run"
    if seconds is None and run.metrics.first_seconds is not None and run.metrics.last_seconds is not None:
        seconds, note = run.metrics.last_seconds - run.metrics.first_seconds, "from first to last step so far"
    kernel = run.summary.get("attention_kernel")
    words = Markup("{} · {} attention").format(note, shown(kernel)) if kernel else Markup("{}").format(note)
    return [*tiles, tile("duration", duration(seconds), words)]


def accuracy_view(run: RunData) -> dict[str, Any]:
    """Evaluation sets and controls with a figure before and after training; rows of all numbers and of categories."""
    found = {phase: dict_at(run.summary, f"eval_{phase}", "sets") for phase in ("before", "after")}
    names = dict.fromkeys(name for of_phase in found.values() for name in of_phase)
    sets: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    numbers, categories = [], []
    for name in names:
        entries = [dict_at(of_phase, name) for of_phase in found.values()]
        newest = entries[1] or entries[0]
        sets[newest.get("kind") == "control"].append(
            {
                "name": name,
                "n": " / ".join(dict.fromkeys(str(entry["n"]) for entry in entries if "n" in entry)) or "?",
                "chance": number_or_none(newest.get("chance")),
                "figures": [accuracy_figure(entry) for entry in entries],
            }
        )
        numbers += [[name, phase, *_cells(entry)] for phase, entry in zip(found, entries, strict=True) if entry]
        of_phases = [dict_at(entry, "by_category") for entry in entries]
        for category in dict.fromkeys(key for of in of_phases for key in of):
            pair = [dict_at(of, category) for of in of_phases]
            count = next((entry["n"] for entry in reversed(pair) if "n" in entry), "–")
            categories.append([name, category, count, *(percent(number_or_none(e.get("accuracy"))) for e in pair)])
    return {
        "missing": run.missing.get("summary.json", "summary.json holds no evaluation: none has finished yet."),
        "evals": sets[False],
        "controls": sets[True],
        "absent_phases": [phase for phase, of_phase in found.items() if not of_phase],
        "numbers": numbers,
        "categories": categories,
    }


def _cells(entry: Mapping[str, Any]) -> list[Any]:
    """Accuracy, standard error, n, right format, pass rate at the largest k, that k, chance, questions left out."""
    accuracy, error, rate_of_format, chance = (
        percent(number_or_none(entry.get(key))) for key in ("accuracy", "standard_error", "format_rate", "chance")
    )
    k, rate = next(reversed(rates_by_k(entry.get("pass_at_k")).items()), (0, None))
    # Questions without an accuracy, by cause; they are in no average.
    causes = (("n_bad_media", "unusable"), ("n_no_value", "no value"))
    left_out = [f"{number(number_or_none(entry[key]))} {words}" for key, words in causes if entry.get(key)]
    return [accuracy, error, entry.get("n", "–"), rate_of_format, rate, k, chance, ", ".join(left_out) or "0"]


def curves_view(run: RunData) -> dict[str, Any]:
    """The charts of all curves, the main ones first, and a sentence on main ones that this run lacks."""
    metrics = dict(run.metrics.of("train"))
    if not metrics:
        return {"none": run.missing.get("metrics.jsonl", "No training step has been logged."), "lead": ""}
    drawn, saved = dict(run.drawn), saved_share(metrics)
    if saved is not None:
        metrics[_SAVED], drawn[_SAVED] = saved, Drawn("of the tokens repeating it would cost", SAVED_CHART)
    planned = planned_charts(metrics, drawn)
    titles = {plan.title for plan, _ in planned}
    of_rl = MAIN_CHARTS if "reward" in metrics else ()
    missing = ", ".join(chart.title for chart in of_rl if chart.title not in titles)
    more = [chart for plan, chart in planned if plan.position >= 10] + _phase_charts(run)
    return {
        "none": "",
        "lead": "Strong lines are rolling means, faint lines the values of single steps. Point at a chart to read "
        "values.",
        "main": [draw_chart(chart) for plan, chart in planned if plan.position < 10],
        "missing": run.missing.get("curves.json", f"Not logged in this run: {missing}." if missing else ""),
        "more": [draw_chart(chart) for chart in more],
    }


def planned_charts(metrics: Mapping[str, Series], drawn: Mapping[str, Drawn]) -> list[tuple[Chart, LineChart]]:
    """The charts that metrics were declared for, in their order, then one each of the other metrics."""
    keys_of: dict[Chart, list[str]] = {}
    for key, how in drawn.items():
        if key in metrics and how.chart is not None:
            keys_of.setdefault(how.chart, []).append(key)
    planned = sorted(keys_of.items(), key=lambda item: item[0].position)
    others = sorted(metrics.keys() - {key for _, keys in planned for key in keys})
    planned += [(Chart(key), [key]) for key in others[:_MAX_OTHER_CHARTS]]
    units = {key: one_line(how.unit, _MAX_NAME_CHARACTERS) for key, how in drawn.items()}
    return [(plan, _chart(plan, units.get(keys[0], ""), keys, metrics)) for plan, keys in planned]


def _chart(plan: Chart, unit: str, keys: list[str], metrics: Mapping[str, Series]) -> LineChart:
    """Parts of a metric, "reward/format", come after the total, "reward"."""
    keys = sorted(keys, key=lambda key: ("/" in key, key if "/" in key else ""))[:_MAX_CURVES]
    names = [key.rsplit("/", 1)[-1] if "/" in key or "/" not in keys[-1] else "total" for key in keys]
    curves = tuple(
        make_curve(one_line(name.replace("_", " "), _MAX_NAME_CHARACTERS), metrics[key], plan.smooth)
        for name, key in zip(names, keys, strict=True)
    )
    return LineChart(one_line(plan.title, _MAX_NAME_CHARACTERS), unit, curves, plan.as_percent)


def saved_share(metrics: Mapping[str, Series]) -> Series | None:
    """1 - tokens computed / tokens with the prefix repeated, for the steps that counted both."""
    if "tokens_computed" not in metrics or "tokens_repeated" not in metrics:
        return None
    both = metrics["tokens_computed"], metrics["tokens_repeated"]
    computed, repeated = (dict(zip(series.steps, series.values, strict=True)) for series in both)
    saved = {step: 1 - computed[step] / number for step, number in repeated.items() if step in computed and number > 0}
    return Series(array("q", saved), array("d", saved.values())) if saved else None


def _phase_charts(run: RunData) -> list[LineChart]:
    """Metrics of other phases (an evaluation now and then) that changed over at least two steps."""
    named = [
        (one_line(f"{phase}: {key}", _MAX_NAME_CHARACTERS), series)
        for phase in sorted(set(run.metrics.phases) - {"train"})
        for key, series in sorted(run.metrics.of(phase).items())
        if len(series.steps) > 1
    ]
    return [LineChart(name, "", (make_curve(name, series),)) for name, series in named[:_MAX_OTHER_CHARTS]]


def time_view(run: RunData) -> dict[str, Any]:
    """Parts as (name, colour, seconds, share of the total); without any, ``missing`` says why."""
    stated = {key: number_or_none(value) for key, value in dict_at(run.summary, "seconds").items()}
    seconds = {key: value for key, value in stated.items() if value is not None and key != "total" and value >= 0}
    if not seconds:
        reason = run.missing.get("summary.json", "summary.json holds no seconds per phase yet.")
        return {"parts": [], "missing": reason, "total": None}
    total = max(stated.get("total") or 0.0, sum(seconds.values()))
    parts = [(*phase_style(name), seconds[name]) for name in in_order(set(seconds))]
    unaccounted = total - sum(seconds.values())
    if unaccounted > 0.005 * total:
        parts.append(("everything else", phase_style("")[1], unaccounted))
    total = total or 1.0
    return {"parts": [(name, color, value, value / total) for name, color, value in parts], "total": total}


def sharing_totals(run: RunData) -> tuple[int, int] | None:
    """(tokens computed, tokens with the prefix repeated) of the run: from summary.json, else summed over the steps."""
    stated = dict_at(run.summary, "sharing")
    computed, repeated = (number_or_none(stated.get("tokens_computed")), number_or_none(stated.get("tokens_repeated")))
    if not computed or not repeated:
        series = run.metrics.of("train")
        if "tokens_computed" not in series or "tokens_repeated" not in series:
            return None
        computed, repeated = (sum(series["tokens_computed"].values), sum(series["tokens_repeated"].values))
    return (int(computed), int(repeated)) if computed > 0 and repeated > 0 else None


def sharing_view(run: RunData) -> dict[str, Any] | None:
    """Tokens computed beside the cost of repeating the prefix for every rollout; None if none were counted."""
    totals = sharing_totals(run)
    if totals is None:
        return None
    computed, repeated = totals
    bars = [("prefix repeated", "once per rollout", "before", repeated)]
    bars.append(("prefix shared", "once per group, as here", "after", computed))
    return {"computed": computed, "repeated": repeated, "bars": bars, "kernel": run.summary.get("attention_kernel")}
