"""Which metrics go into which chart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlm_pg.observe.report.charts import Chart, draw_chart
from vlm_pg.observe.report.curves import make_curve
from vlm_pg.observe.report.read import RunData, Series
from vlm_pg.observe.text import one_line

_MAX_OTHER_CHARTS = 24
# More lines in one chart cannot be told apart; names are cut where a damaged file has whole texts for them.
_MAX_CURVES, _MAX_NAME_CHARACTERS = 16, 80
_SAVED = "tokens_saved_share"


@dataclass(frozen=True)
class Plan:
    """One chart: the metrics in it by key; a key that ends in ``/`` stands for all metrics that begin with it."""

    title: str
    unit: str
    keys: tuple[str, ...]
    as_percent: bool = False
    smooth: bool = True


MAIN = (
    Plan("Reward", "mean over rollouts", ("reward", "reward/")),
    Plan("Spread of the reward", "standard deviation within a group, mean", ("reward_std",)),
    Plan("KL to the reference policy", "nat per token", ("kl",)),
    Plan("Entropy of the policy", "nat per token", ("entropy",)),
    Plan("Response length", "tokens, mean", ("response_tokens_mean",)),
    Plan("Gradient norm", "L2, before clipping", ("grad_norm",)),
    Plan("Seconds per step", "s", ("step_seconds", "seconds/")),
    Plan("Tokens saved by sharing the prefix", "of the tokens repeating it would cost", (_SAVED,), as_percent=True),
    Plan("Throughput", "tokens per second", ("tokens_per_second",)),
)
MORE = (
    Plan("Loss", "", ("loss",)),
    Plan("Learning rate", "", ("lr",), smooth=False),
    Plan("Clipped tokens", "share of response tokens", ("clip_low", "clip_high"), as_percent=True),
    Plan("Extreme ratios", "policy / rollout probability", ("ratio_max", "ratio_min")),
    Plan("Spread by part", "standard deviation within a group, mean", ("reward_std/",)),
    Plan("Pruned rollouts", "share", ("pruned_share",), as_percent=True),
    Plan("Questions per step", "", ("questions", "resampled_groups", "filled_groups", "unused_groups")),
    Plan("Responses cut off, rewards without value", "share", ("truncated_share", "no_value_share"), as_percent=True),
    Plan("Groups without spread", "equal rewards, no gradient", ("groups_without_spread",), as_percent=True),
    Plan("Tokens per step", "", ("tokens_computed", "tokens_repeated")),
)


def curves_view(run: RunData) -> dict[str, Any]:
    """The charts of all curves, the main ones first, and the titles of main ones that this run lacks."""
    metrics = dict(run.metrics.of("train"))
    if not metrics:
        return {"none": run.missing.get("metrics.jsonl", "No training step has been logged."), "lead": ""}
    saved = saved_share(metrics)
    if saved is not None:
        metrics[_SAVED] = saved
    more = [*planned_charts(MORE, metrics), *_other_charts(metrics), *_phase_charts(run)]
    return {
        "none": "",
        "lead": "Strong lines are rolling means, faint lines the values of single steps. Point at a chart to read "
        "values.",
        "main": [draw_chart(chart) for chart in planned_charts(MAIN, metrics)],
        "missing": [plan.title for plan in MAIN if not any(_matching(key, metrics) for key in plan.keys)],
        "more": [draw_chart(chart) for chart in more],
    }


def planned_charts(plans: tuple[Plan, ...], metrics: Mapping[str, Series]) -> list[Chart]:
    """The charts of ``plans`` that have at least one metric."""
    charts = []
    for plan in plans:
        keys = [key for wanted in plan.keys for key in _matching(wanted, metrics)]
        curves = tuple(make_curve(_label(key, plan), metrics[key], plan.smooth) for key in keys)
        if curves:
            charts.append(Chart(plan.title, plan.unit, curves, plan.as_percent))
    return charts


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


def _matching(wanted: str, metrics: Mapping[str, Series]) -> list[str]:
    if wanted.endswith("/"):
        return sorted(key for key in metrics if key.startswith(wanted))[:_MAX_CURVES]
    return [wanted] if wanted in metrics else []


def _label(key: str, plan: Plan) -> str:
    if key == plan.keys[0] and len(plan.keys) > 1 and plan.keys[1].endswith("/"):
        return "total"
    return one_line(key.rsplit("/", 1)[-1].replace("_", " "), _MAX_NAME_CHARACTERS)


def _other_charts(metrics: Mapping[str, Series]) -> list[Chart]:
    """Metrics that no plan names, one chart each."""
    planned = {key for plan in MAIN + MORE for wanted in plan.keys for key in _matching(wanted, metrics)}
    others = sorted(key for key in metrics if key not in planned)
    return [_plain_chart(key, metrics[key]) for key in others[:_MAX_OTHER_CHARTS]]


def _plain_chart(name: str, series: Series) -> Chart:
    short = one_line(name, _MAX_NAME_CHARACTERS)
    return Chart(short, "", (make_curve(short, series),))


def _phase_charts(run: RunData) -> list[Chart]:
    """Metrics of other phases (an evaluation now and then) that changed over at least two steps."""
    charts = []
    for phase in sorted(set(run.metrics.phases) - {"train"}):
        for key, series in sorted(run.metrics.of(phase).items()):
            if len(series.steps) > 1:
                charts.append(_plain_chart(f"{phase}: {key}", series))
    return charts[:_MAX_OTHER_CHARTS]
