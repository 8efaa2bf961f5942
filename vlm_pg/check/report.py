"""What a check says: lines for the console, ``check.json`` and a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from vlm_pg.check.findings import Reasons, SetTally
from vlm_pg.files import write_bytes_atomic, write_json_atomic
from vlm_pg.observe.report.markup import number, shown

REFUSED, WARNED, REPORT, PAGE = "refused.jsonl", "warned.jsonl", "check.json", "check.html"
# Upper ends of the first bins.
_TOKENS, _SECONDS = 64, 1


def lines(tally: SetTally) -> Iterator[str]:
    """A set in a few lines."""
    yield (
        f"{tally.name} ({tally.path}): {tally.records:,} records, {tally.usable:,} usable, {tally.with_errors:,} not; "
        f"{tally.media:,} media{_left_out(tally)}"
    )
    for word, reasons in (("error", tally.errors), ("warning", tally.warnings)):
        for reason, count, (example, *_) in reasons.rows():
            shown_first = f"{example.where} ({example.sample_id}): {example.message}"
            yield f"  {word:7} {count:8,}  {reason}, for example {shown_first}"
    for title, row, note, _ in _figures(tally):
        yield f"  {title.lower()}: {row}" + (f"; {note}" if note else "")


def _left_out(tally: SetTally) -> str:
    return f"; {tally.left_out:,} more are left out, because the run never asks for them" if tally.left_out else ""


def write_reports(folder: Path, tallies: Sequence[SetTally], settings: dict[str, Any]) -> None:
    """Write ``check.json`` and ``check.html``, which holds everything in itself and runs no script.

    Args:
        folder: where they are written.
        tallies: of all sets.
        settings: what was checked under, as JSON values.
    """
    write_json_atomic(folder / REPORT, {"settings": settings, "sets": {one.name: one.as_json() for one in tallies}})
    write_bytes_atomic(folder / PAGE, _page(tallies, settings).encode("utf-8", "backslashreplace"))


def _page(tallies: Sequence[SetTally], settings: dict[str, Any]) -> str:
    from jinja2 import Environment, StrictUndefined

    template = resources.files("vlm_pg.check").joinpath("page.html").read_text("utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=shown
    )
    environment.filters["number"] = number
    return environment.from_string(template).render(sets=[_view(one) for one in tallies], settings=settings)


def _view(tally: SetTally) -> dict[str, Any]:
    found = [("error", row) for row in _rows(tally.errors)] + [("warning", row) for row in _rows(tally.warnings)]
    return {"tally": tally, "left_out": _left_out(tally), "found": found, "figures": list(_figures(tally))}


def _figures(tally: SetTally) -> Iterator[tuple[str, str, str, list[dict[str, Any]]]]:
    """Of each distribution its title, its percentiles, a note and its bars."""
    tokens, seconds = tally.tokens.summary(), tally.seconds.summary()
    if tokens is not None:
        above = f"{tally.above_limit:,} above the limit of {tally.limit:,}"
        yield "Prompt length in tokens", _percentiles(tokens, ",.0f"), above, _bars(tally.tokens.bins(_TOKENS))
    if seconds is not None:
        yield "Length of videos in seconds", _percentiles(seconds, ",.1f"), "", _bars(tally.seconds.bins(_SECONDS))


def _percentiles(summary: dict[str, float], form: str) -> str:
    return ", ".join(f"{name} {value:{form}}" for name, value in summary.items())


def _rows(reasons: Reasons) -> list[dict[str, Any]]:
    return [{"reason": reason, "count": count, "examples": examples} for reason, count, examples in reasons.rows()]


def _bars(bins: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    """Of each bin its label, count, and width in percent."""
    most = max(count for _, count in bins)
    return [{"label": label, "count": count, "width": f"{100 * count / most:.1f}"} for label, count in bins]
