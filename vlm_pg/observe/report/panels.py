"""The smaller sections: where the time went, what sharing saved, bad samples, settings and versions."""

from __future__ import annotations

from typing import Any

from vlm_pg.observe.report.markup import dict_at, first, first_entries, number_or_none, shown
from vlm_pg.observe.report.phases import PHASES, color_of, name_of
from vlm_pg.observe.report.read import RunData

_MAX_PHASES, _MAX_REASONS, _MAX_VERSIONS, _MAX_FILES = 60, 100, 100, 100
_MAX_CONFIG_CHARACTERS = 200_000


def time_view(run: RunData) -> dict[str, Any]:
    """Parts as (name, colour, seconds, share of the total); without any, ``missing`` says why."""
    stated = {key: number_or_none(value) for key, value in first_entries(dict_at(run.summary, "seconds"), _MAX_PHASES)}
    seconds = {key: value for key, value in stated.items() if value is not None and key != "total" and value >= 0}
    if not seconds:
        reason = run.missing.get("summary.json", "summary.json holds no seconds per phase yet.")
        return {"parts": [], "missing": reason, "total": None}
    names: list[str] = [name for name in PHASES if name in seconds]
    names += sorted(set(seconds) - set(PHASES))
    total = max(stated.get("total") or 0.0, sum(seconds.values()))
    parts = [(name_of(name), color_of(name), seconds[name]) for name in names]
    unaccounted = total - sum(seconds.values())
    if unaccounted > 0.005 * total:
        parts.append(("everything else", color_of(""), unaccounted))
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
    """Tokens computed beside what repeating the prefix for every rollout would have cost; None if none were counted."""
    totals = sharing_totals(run)
    if totals is None:
        return None
    computed, repeated = totals
    return {
        "ratio": repeated / computed,
        "share": computed / repeated,
        "widest": max(computed, repeated),
        "rows": (
            ("prefix repeated", "once per rollout", "before", repeated),
            ("prefix shared", "once per group, as here", "after", computed),
        ),
        "kernel": run.summary.get("attention_kernel"),
    }


def bad_samples_view(run: RunData) -> dict[str, Any]:
    """(reason, how many samples, one of them) of what could not be used, and how many more reasons there are."""
    examples = {str(record.get("reason")): record for record in run.bad_samples}
    reasons, more = first(list(run.bad_counts.items()), _MAX_REASONS)
    return {"rows": [(reason, count, examples.get(reason, {})) for reason, count in reasons], "more": more}


def settings_view(run: RunData) -> dict[str, Any]:
    """Versions, files of the run, and the resolved configuration."""
    return {
        "versions": list(first_entries(dict_at(run.summary, "versions"), _MAX_VERSIONS)),
        "eval_files": list(first_entries(run.eval_files, _MAX_FILES)),
        "config": run.config_text and shown(run.config_text, _MAX_CONFIG_CHARACTERS),
    }
