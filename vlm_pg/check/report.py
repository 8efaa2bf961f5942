"""The results of a check: lines for the console, ``check.json`` and a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vlm_pg.check.findings import SetTally
from vlm_pg.files import write_json_atomic
from vlm_pg.observe.report.markup import write_page

REFUSED, WARNED, REPORT, PAGE = "refused.jsonl", "warned.jsonl", "check.json", "check.html"
# Upper ends of the first bins.
_TOKENS, _SECONDS = 64, 1


def lines(tally: SetTally) -> Iterator[str]:
    """A set in a few lines."""
    yield f"{tally.name} ({tally.path}): {_counts(tally)}"
    for word, reasons in (("error", tally.errors), ("warning", tally.warnings)):
        for reason, count, (example, *_) in reasons.rows():
            shown_first = f"{example.where} ({example.sample_id}): {example.message}"
            yield f"  {word:7} {count:8,}  {reason}, for example {shown_first}"
    for title, row, note, _ in _figures(tally):
        yield f"  {title.lower()}: {row}" + (f"; {note}" if note else "")


def _counts(tally: SetTally) -> str:
    more = f"; {tally.left_out:,} more are left out, because the run never asks for them" if tally.left_out else ""
    return f"{tally.records:,} records, {tally.usable:,} usable, {tally.with_errors:,} not; {tally.media:,} media{more}"


def write_reports(folder: Path, tallies: Sequence[SetTally], settings: dict[str, Any]) -> None:
    """Write ``check.json`` and ``check.html``, which is self-contained and runs no script.

    Args:
        tallies: of all sets.
        settings: that the figures depend on, as JSON values.
    """
    write_json_atomic(folder / REPORT, {"settings": settings, "sets": {one.name: one.as_json() for one in tallies}})
    views = []
    for tally in tallies:
        found = [("error", "down", *row) for row in tally.errors.rows()]
        found += [("warning", "", *row) for row in tally.warnings.rows()]
        line = f"{tally.path}: {_counts(tally)}."
        views.append({"tally": tally, "line": line, "found": found, "figures": list(_figures(tally))})
    template = Path(__file__).parent / "templates" / "check.html"
    write_page(folder / PAGE, template, "Records before training", sets=views, settings=settings)


def _figures(tally: SetTally) -> Iterator[tuple[str, str, str, list[tuple[str, int, str]]]]:
    """Of each distribution its title, its percentiles, a note and its bins: label, count, width in percent."""
    tokens, seconds = tally.tokens.summary(), tally.seconds.summary()
    if tokens is not None:
        above = f"{tally.above_limit:,} above the limit of {tally.limit:,}"
        yield "Prompt length in tokens", _percentiles(tokens, ",.0f"), above, _bars(tally.tokens.bins(_TOKENS))
    if seconds is not None:
        yield "Length of videos in seconds", _percentiles(seconds, ",.1f"), "", _bars(tally.seconds.bins(_SECONDS))


def _percentiles(summary: dict[str, float], form: str) -> str:
    return ", ".join(f"{name} {value:{form}}" for name, value in summary.items())


def _bars(bins: Sequence[tuple[str, int]]) -> list[tuple[str, int, str]]:
    most = max(count for _, count in bins)
    return [(label, count, f"{100 * count / most:.1f}") for label, count in bins]
