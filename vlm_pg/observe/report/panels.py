"""The smaller sections: where the time went, what sharing saved, bad samples, settings and versions."""

from __future__ import annotations

from vlm_pg.observe.report.markup import (
    absent,
    dict_at,
    duration,
    esc,
    first,
    first_entries,
    number,
    number_or_none,
    percent,
    section,
    table,
)
from vlm_pg.observe.report.read import RunData

_PHASE_ORDER = ("setup", "eval_before", "prompts", "vision", "rollout", "rewards", "train", "checkpoint", "eval_after")
_MAX_PHASES, _MAX_REASONS, _MAX_VERSIONS, _MAX_FILES = 60, 100, 100, 100
_MAX_CONFIG_CHARACTERS = 200_000
_PHASE_NAMES = {
    "setup": "set-up",
    "eval_before": "evaluation before",
    "prompts": "media and prompts",
    "vision": "vision tower",
    "rollout": "generating rollouts",
    "rewards": "rewards",
    "train": "policy update",
    "checkpoint": "checkpoints",
    "eval_after": "evaluation after",
}


def time_section(run: RunData) -> str:
    """Seconds per phase as one stacked bar with a legend."""
    stated = {key: number_or_none(value) for key, value in first_entries(dict_at(run.summary, "seconds"), _MAX_PHASES)}
    seconds = {key: value for key, value in stated.items() if value is not None and key != "total" and value >= 0}
    if not seconds:
        reason = run.missing.get("summary.json", "summary.json holds no seconds per phase yet.")
        return section("time", "Where the time went", absent(reason))
    names: list[str] = [name for name in _PHASE_ORDER if name in seconds]
    names += sorted(set(seconds) - set(_PHASE_ORDER))
    total = max(stated.get("total") or 0.0, sum(seconds.values()))
    parts = [(_PHASE_NAMES.get(name, name.replace("_", " ")), seconds[name]) for name in names]
    unaccounted = total - sum(seconds.values())
    if unaccounted > 0.005 * total:
        parts.append(("everything else", unaccounted))
    total = total or 1.0
    bar = "".join(
        f'<div class="p{index % 10}" style="width:{100 * value / total:.2f}%" '
        f'title="{esc(name)}: {duration(value)}"></div>'
        for index, (name, value) in enumerate(parts)
    )
    keys = "".join(
        f'<li><i class="p{index % 10}"></i><span>{esc(name)}</span><b>{duration(value)}</b>'
        f"<small>{percent(value / total, 0)}</small></li>"
        for index, (name, value) in enumerate(parts)
    )
    body = f'<div class="card"><div class="stack">{bar}</div><ul class="stack-keys">{keys}</ul></div>'
    return section("time", "Where the time went", body, f"{duration(total)} in all.")


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


def sharing_section(run: RunData) -> str:
    """Tokens computed beside what repeating the prefix for every rollout would have cost."""
    totals = sharing_totals(run)
    title = "What sharing the prefix saved"
    if totals is None:
        return section("sharing", title, absent("No tokens have been counted yet."))
    computed, repeated = totals
    ratio, widest = repeated / computed, max(computed, repeated)
    rows = "".join(
        f'<div class="set"><div class="set-name">{name}</div><div class="tracks"><div class="track wide">'
        f'<div class="bar {css_class}" style="width:{100 * tokens / widest:.2f}%"></div></div></div>'
        f'<div class="set-values">{tokens:,} <small>tok</small></div></div>'
        for name, css_class, tokens in (
            ("prefix repeated<small>once per rollout</small>", "before", repeated),
            ("prefix shared<small>once per group, as here</small>", "after", computed),
        )
    )
    kernel = run.summary.get("attention_kernel")
    kernel_text = f" Attention kernel: <b>{esc(kernel)}</b>." if kernel else ""
    text = (
        f'<p class="hint">Computed: {percent(computed / repeated)} of the tokens that repeating each prefix would '
        f"have cost. Work that grows with the number of tokens can become at most <b>{ratio:.2f} times</b> faster "
        f"this way: G(P+R) / (P+GR) for G rollouts of R tokens on a prefix of P.{kernel_text}</p>"
    )
    bound = f'<div class="big">{ratio:.2f}×<small>token bound</small></div>'
    body = f'<div class="card split">{bound}<div>{rows}{text}</div></div>'
    return section("sharing", title, body)


def bad_samples_section(run: RunData) -> str:
    """How many samples could not be used, by reason, with one example each."""
    title = "Samples that could not be used"
    if not run.bad_counts:
        return section("bad", title, '<p class="hint">None: every sample that was read could be used.</p>')
    examples = {str(record.get("reason")): record for record in run.bad_samples}
    rows = []
    reasons, more = first(list(run.bad_counts.items()), _MAX_REASONS)
    for reason, count in reasons:
        example = examples.get(reason, {})
        where = f'<small class="where">{esc(example.get("where", ""))}</small>' if example else ""
        rows.append([f"<code>{esc(reason)}</code>", number(count), f"{esc(example.get('message', '–'))} {where}"])
    if more:
        rows.append([f"… {more:,} more reasons", "", "see bad_samples.jsonl"])
    body = table(["reason", "samples", "for example"], rows, "last-left")
    return section("bad", title, f'<div class="card">{body}</div>', "Left out and counted, never scored.")


def settings_section(run: RunData) -> str:
    """Versions, files of the run, and the resolved configuration."""
    versions = dict_at(run.summary, "versions")
    items = "".join(
        f"<li><span>{esc(name)}</span><b>{esc(version)}</b></li>"
        for name, version in first_entries(versions, _MAX_VERSIONS)
    )
    body = f'<ul class="versions">{items}</ul>' if items else absent("summary.json names no versions yet.")
    if run.eval_files:
        listed = ", ".join(
            f"<code>{esc(name)}</code> ({count:,} lines)" for name, count in first_entries(run.eval_files, _MAX_FILES)
        )
        body += f'<p class="hint">Every evaluated answer: {listed}.</p>'
    for name, count in run.damaged_lines.items():
        body += absent(f"{name}: {number(count)} line(s) are not JSON and were left out of this report.")
    for name, count in run.odd.items():
        body += absent(f"{name}: {number(count)} step(s) or value(s) are no number that a run can have, and left out.")
    # Of a file that is no YAML the text is shown all the same, below the reason why it says nothing.
    if "config.yaml" in run.missing or not run.config_text:
        body += absent(run.missing.get("config.yaml", "config.yaml is empty."))
    if run.config_text:
        text = esc(run.config_text, _MAX_CONFIG_CHARACTERS)
        body += f"<details><summary>config.yaml as resolved</summary><pre>{text}</pre></details>"
    return section("settings", "Versions and settings", body)
