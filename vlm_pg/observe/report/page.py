"""The page around the sections: head, title, key numbers, footer."""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path

from markupsafe import Markup

from vlm_pg import __version__
from vlm_pg.files import write_bytes_atomic
from vlm_pg.observe.report.accuracy import accuracy_view
from vlm_pg.observe.report.curves import window_of
from vlm_pg.observe.report.markup import dict_at, duration, number_or_none, percent, render, shown
from vlm_pg.observe.report.metric_charts import curves_view
from vlm_pg.observe.report.panels import bad_samples_view, settings_view, sharing_totals, sharing_view, time_view
from vlm_pg.observe.report.read import RunData, is_step, read_run
from vlm_pg.observe.report.rollouts import rollouts_view
from vlm_pg.observe.report.timeline import timeline_view


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into a run's folder and return its path.

    Reads nothing outside the folder; works for a run in progress. Raises ConfigError when it is no run's folder.
    """
    run = read_run(Path(run_dir))
    write_bytes_atomic(run.folder.report, page_of(run).encode("utf-8", "replace"))
    return run.folder.report


def page_of(run: RunData) -> Markup:
    """The whole page. Its policy lets the browser load nothing and run no script but ours."""
    style, script = _piece("style.css"), _piece("hover.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return render(
        "page.html",
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        style=style,
        script=script,
        run=run,
        name=dict_at(run.config, "run").get("name") or run.folder.path.resolve().name,
        finished=run.summary.get("finished") is True,
        model=dict_at(run.config, "model").get("path") or "model unknown",
        data=dict_at(run.config, "data").get("train") or "data unknown",
        steps=_steps_text(run),
        tiles=[_accuracy_tile(run), _reward_tile(run), _sharing_tile(run), _time_tile(run)],
        accuracy=accuracy_view(run),
        curves=curves_view(run),
        rollouts=rollouts_view(run),
        sharing=sharing_view(run),
        time=time_view(run),
        timeline=timeline_view(run),
        bad=bad_samples_view(run),
        settings=settings_view(run),
        version=__version__,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _piece(name: str) -> Markup:
    """One of our own files, as it is."""
    return Markup(resources.files("vlm_pg.observe.report").joinpath(name).read_text("utf-8"))


def _steps_text(run: RunData) -> str:
    done = run.metrics.last_step
    planned = dict_at(run.config, "training").get("steps")
    if is_step(planned) and planned > done:
        return f"step {done:,} of {planned:,}"
    return f"{done:,} steps"


def _tile(title: str, value: str, note: str | Markup, start: str | None = None) -> dict[str, str | None]:
    """A key number; ``start``: what it was at the beginning of the run."""
    return {"title": title, "start": start, "value": value, "note": note}


def _accuracy_tile(run: RunData) -> dict[str, str | None]:
    before, after = (dict_at(run.summary, f"eval_{phase}") for phase in ("before", "after"))
    start, end = (number_or_none(before.get("accuracy")), number_or_none(after.get("accuracy")))
    if end is None:
        note = "evaluation after training is still to come" if start is not None else "not evaluated yet"
        return _tile("accuracy", percent(start), note)
    count = Markup(f"{after['n']:,} questions" if is_step(after.get("n")) else "")
    if count and after.get("headline_set"):
        count += Markup(" ({})").format(shown(after["headline_set"]))
    if start is None:
        return _tile("accuracy", percent(end), count)
    change = f"{100 * (end - start):+.1f} points".replace("-", "−")
    return _tile("accuracy", percent(end), Markup("{} on ").format(change) + count if count else change, percent(start))


def _reward_tile(run: RunData) -> dict[str, str | None]:
    series = run.metrics.of("train").get("reward")
    if series is None:
        return _tile("reward", "–", "no step yet")
    width = max(1, window_of(len(series.values)))
    first, end = (sum(part) / len(part) for part in (series.values[:width], series.values[-width:]))
    note = f"means of first and last {width:,} steps" if width > 1 else "first and last step"
    return _tile("reward", f"{end:.2f}", note, f"{first:.2f}")


def _sharing_tile(run: RunData) -> dict[str, str | None]:
    title, totals = "tokens saved by sharing", sharing_totals(run)
    if totals is None:
        return _tile(title, "–", "not counted yet")
    computed, repeated = totals
    return _tile(title, percent(1 - computed / repeated), f"{repeated - computed:,} of {repeated:,}")


def _time_tile(run: RunData) -> dict[str, str | None]:
    seconds = number_or_none(dict_at(run.summary, "seconds").get("total"))
    note = "whole run"
    if seconds is None and run.metrics.first_seconds is not None and run.metrics.last_seconds is not None:
        seconds, note = (run.metrics.last_seconds - run.metrics.first_seconds, "from first to last step so far")
    kernel = run.summary.get("attention_kernel")
    words = Markup("{} · {} attention").format(note, shown(kernel)) if kernel else note
    return _tile("duration", duration(seconds), words)
