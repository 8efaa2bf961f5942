"""The page around the sections: head, title, key numbers, footer."""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path

from vlm_pg.files import write_bytes_atomic
from vlm_pg.observe.report.accuracy import accuracy_section
from vlm_pg.observe.report.curves import window_of
from vlm_pg.observe.report.markup import dict_at, duration, esc, number_or_none, percent
from vlm_pg.observe.report.metric_charts import curves_section
from vlm_pg.observe.report.panels import (
    bad_samples_section,
    settings_section,
    sharing_section,
    sharing_totals,
    time_section,
)
from vlm_pg.observe.report.read import RunData, is_step, read_run
from vlm_pg.observe.report.rollouts import rollouts_section

_NAVIGATION = (
    ("accuracy", "Accuracy"),
    ("curves", "Curves"),
    ("rollouts", "Rollouts"),
    ("sharing", "Sharing"),
    ("time", "Time"),
    ("bad", "Bad samples"),
    ("settings", "Settings"),
)


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into a run's folder and return its path.

    Reads nothing outside the folder; works for a run in progress. Raises ConfigError when it is no run's folder.
    """
    run = read_run(Path(run_dir))
    write_bytes_atomic(run.folder.report, render(run).encode("utf-8", "replace"))
    return run.folder.report


def render(run: RunData) -> str:
    """The whole page. Its policy lets the browser load nothing and run no script but ours."""
    style, script = _piece("style.css"), _piece("hover.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    name = _run_name(run)
    body = "".join(
        make(run)
        for make in (
            accuracy_section,
            curves_section,
            rollouts_section,
            sharing_section,
            time_section,
            bad_samples_section,
            settings_section,
        )
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{esc(name)} · run report</title><style>{style}</style></head><body>"
        f"{_header(run, name)}<main>{body}</main>{_footer()}"
        f'<div id="tooltip" hidden></div><script>{script}</script></body></html>\n'
    )


def _piece(name: str) -> str:
    return resources.files("vlm_pg.observe.report").joinpath(name).read_text("utf-8")


def _run_name(run: RunData) -> str:
    return str(dict_at(run.config, "run").get("name") or run.folder.path.resolve().name)


def _header(run: RunData, name: str) -> str:
    finished = run.summary.get("finished") is True
    state = '<span class="state done">finished</span>' if finished else '<span class="state">in progress</span>'
    model = dict_at(run.config, "model").get("path") or "model unknown"
    data = dict_at(run.config, "data").get("train") or "data unknown"
    links = "".join(f'<a href="#{anchor}">{title}</a>' for anchor, title in _NAVIGATION)
    return (
        f'<header><div class="title"><h1>{esc(name)}</h1>{state}</div>'
        f'<p class="sub"><b>{esc(model)}</b> trained on <b>{esc(data)}</b> · {esc(_steps_text(run))}</p>'
        f'<div class="tiles">{_tiles(run)}</div><nav>{links}</nav></header>'
    )


def _steps_text(run: RunData) -> str:
    done = run.metrics.last_step
    planned = dict_at(run.config, "training").get("steps")
    if is_step(planned) and planned > done:
        return f"step {done:,} of {planned:,}"
    return f"{done:,} steps"


def _tiles(run: RunData) -> str:
    tiles = [_accuracy_tile(run), _reward_tile(run), _sharing_tile(run), _time_tile(run)]
    return "".join(
        f'<div class="tile"><span>{title}</span><b>{value}</b><small>{note}</small></div>'
        for title, value, note in tiles
    )


def _accuracy_tile(run: RunData) -> tuple[str, str, str]:
    before, after = (dict_at(run.summary, f"eval_{phase}") for phase in ("before", "after"))
    start, end = (number_or_none(before.get("accuracy")), number_or_none(after.get("accuracy")))
    if end is None:
        note = "evaluation after training is still to come" if start is not None else "not evaluated yet"
        return "accuracy", percent(start), note
    count = f"{after['n']:,} questions" if is_step(after.get("n")) else ""
    if count and after.get("headline_set"):
        count += f" ({esc(after['headline_set'])})"
    if start is None:
        return "accuracy", percent(end), count
    change = f"{100 * (end - start):+.1f} points".replace("-", "−")
    return (
        "accuracy",
        f"<i>{percent(start)}</i> <em>→</em> {percent(end)}",
        f"{change} on {count}" if count else change,
    )


def _reward_tile(run: RunData) -> tuple[str, str, str]:
    series = run.metrics.of("train").get("reward")
    if series is None:
        return "reward", "–", "no step yet"
    width = max(1, window_of(len(series.values)))
    first, end = (sum(part) / len(part) for part in (series.values[:width], series.values[-width:]))
    note = f"means of first and last {width:,} steps" if width > 1 else "first and last step"
    return "reward", f"<i>{first:.2f}</i> <em>→</em> {end:.2f}", note


def _sharing_tile(run: RunData) -> tuple[str, str, str]:
    totals = sharing_totals(run)
    if totals is None:
        return "tokens saved by sharing", "–", "not counted yet"
    computed, repeated = totals
    return ("tokens saved by sharing", percent(1 - computed / repeated), f"{repeated - computed:,} of {repeated:,}")


def _time_tile(run: RunData) -> tuple[str, str, str]:
    seconds = number_or_none(dict_at(run.summary, "seconds").get("total"))
    note = "whole run"
    if seconds is None and run.metrics.first_seconds is not None and run.metrics.last_seconds is not None:
        seconds, note = (run.metrics.last_seconds - run.metrics.first_seconds, "from first to last step so far")
    kernel = run.summary.get("attention_kernel")
    return ("duration", duration(seconds), f"{note} · {esc(kernel)} attention" if kernel else note)


def _footer() -> str:
    from vlm_pg import __version__

    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"<footer>vlm_pg {esc(__version__)} · written {written} from the files in this run's folder</footer>"
