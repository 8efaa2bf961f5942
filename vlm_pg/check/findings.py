"""Findings of a check: counted per set, in memory that does not grow with records; printed, and written as reports."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vlm_pg.errors import SampleError
from vlm_pg.files import write_json_atomic
from vlm_pg.observe.report.markup import write_page
from vlm_pg.types import BadSample, Sample

REFUSED, WARNED, REPORT, PAGE = "refused.jsonl", "warned.jsonl", "check.json", "check.html"
_TEMPLATE = Path(__file__).parent / "templates" / "check.html"
_EXAMPLES = 5
# Upper ends of the first bins.
_TOKENS, _SECONDS = 64, 1


@dataclass(frozen=True)
class Finding:
    """A finding about one record.

    Args:
        is_error: training would skip the record, learn a wrong answer from it, or evaluate on what it was trained on;
            others are warnings.
        is_refusal: training would skip the record.
    """

    bad: BadSample
    is_error: bool = True
    is_refusal: bool = False


def error(sample: Sample, fault: SampleError, is_refusal: bool = False) -> Finding:
    """A fault of a sample; ``is_refusal``: training skips it."""
    bad = BadSample(sample.sample_id, fault.reason, str(fault), sample.where, fault.trace)
    return Finding(bad, is_refusal=is_refusal)


def warning(sample: Sample, reason: str, message: str) -> Finding:
    """A remark on a sample that can be used."""
    return replace(error(sample, SampleError(reason, message)), is_error=False)


@dataclass
class Distribution:
    """Counts of rounded values, for exact percentiles; ``digits`` after the point bound how many values there are."""

    digits: int = 0
    counts: Counter[float] = field(default_factory=Counter)

    def add(self, value: float) -> None:
        self.counts[round(value, self.digits)] += 1

    def at(self, share: float) -> float:
        """The least value that ``share`` of all values do not exceed (nearest rank)."""
        rank, passed = max(1, math.ceil(share * self.counts.total())), 0
        for value in sorted(self.counts):
            passed += self.counts[value]
            if passed >= rank:
                return value
        raise ValueError("there are no values")

    def summary(self) -> dict[str, float] | None:
        """Minimum, median, 95th percentile and maximum; None without values."""
        if not self.counts:
            return None
        points = {"min": 0.0, "median": 0.5, "p95": 0.95, "max": 1.0}
        return {name: self.at(share) if self.digits else int(self.at(share)) for name, share in points.items()}

    def bins(self, first: float) -> list[tuple[str, int]]:
        """Label and count of bins that double: up to ``first``, up to twice as much, and so on, empty ones between."""
        found: Counter[int] = Counter()
        for value, count in self.counts.items():
            found[max(0, math.ceil(math.log2(max(value, first) / first)))] += count
        exponents = range(min(found), max(found) + 1) if found else ()
        return [(f"up to {first * 2**exponent:,.0f}", found[exponent]) for exponent in exponents]


@dataclass
class Reasons:
    """Findings of one severity: counts by reason, and the first few of each."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[BadSample]] = field(default_factory=dict)

    def add(self, bad: BadSample) -> None:
        self.counts[bad.reason] += 1
        shown = self.examples.setdefault(bad.reason, [])
        if len(shown) < _EXAMPLES:
            shown.append(bad)

    def rows(self) -> list[tuple[str, int, Sequence[BadSample]]]:
        """The most frequent first."""
        ordered = sorted(self.counts.items(), key=lambda one: (-one[1], one[0]))
        return [(reason, count, self.examples[reason]) for reason, count in ordered]


@dataclass
class SetTally:
    """Counts of one set.

    Args:
        limit: most tokens of a prompt.
        records: that the run uses; ``left_out`` are those that it never uses.
        read: records that were read, ``unreadable`` those of them that reading refuses.
    """

    name: str
    path: str
    limit: int
    records: int = 0
    with_errors: int = 0
    above_limit: int = 0
    media: int = 0
    read: int = 0
    unreadable: int = 0
    left_out: int = 0
    errors: Reasons = field(default_factory=Reasons)
    warnings: Reasons = field(default_factory=Reasons)
    tokens: Distribution = field(default_factory=Distribution)
    seconds: Distribution = field(default_factory=lambda: Distribution(digits=1))

    @property
    def usable(self) -> int:
        return self.records - self.with_errors

    def add_prompt(self, tokens: int) -> None:
        """Count a prompt of that many tokens."""
        self.tokens.add(tokens)
        self.above_limit += tokens > self.limit

    def add(self, findings: Sequence[Finding]) -> None:
        """Count a record and its findings."""
        self.records += 1
        self.with_errors += any(one.is_error for one in findings)
        for one in findings:
            (self.errors if one.is_error else self.warnings).add(one.bad)

    def as_json(self) -> dict[str, Any]:
        """The set's entry in ``check.json``."""
        rows = [*self.errors.rows(), *self.warnings.rows()]
        return {
            "path": self.path,
            "records": self.records,
            "usable": self.usable,
            "left_out": self.left_out,
            "errors": {reason: count for reason, count, _ in self.errors.rows()},
            "warnings": {reason: count for reason, count, _ in self.warnings.rows()},
            "examples": {
                reason: [{"sample_id": one.sample_id, "where": one.where, "message": one.message} for one in shown]
                for reason, _, shown in rows
            },
            "media": self.media,
            "prompt_tokens": self.tokens.summary(),
            "prompt_tokens_limit": self.limit,
            "prompts_above_limit": self.above_limit,
            "video_seconds": self.seconds.summary(),
        }


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
    """Write ``check.json`` and ``check.html``, self-contained and without scripts; figures depend on ``settings``."""
    write_json_atomic(folder / REPORT, {"settings": settings, "sets": {one.name: one.as_json() for one in tallies}})
    views = []
    for tally in tallies:
        found = [("error", "down", *row) for row in tally.errors.rows()]
        found += [("warning", "", *row) for row in tally.warnings.rows()]
        line = f"{tally.path}: {_counts(tally)}."
        views.append({"name": tally.name, "line": line, "found": found, "figures": list(_figures(tally))})
    write_page(folder / PAGE, _TEMPLATE, "Records before training", sets=views, settings=settings)


def _figures(tally: SetTally) -> Iterator[tuple[str, str, str, list[tuple[str, int, str]]]]:
    """Of each distribution its title, its percentiles, a note and its bins: label, count, width in percent."""
    above = f"{tally.above_limit:,} above the limit of {tally.limit:,}"
    for title, note, values, form, first in (
        ("Prompt length in tokens", above, tally.tokens, ",.0f", _TOKENS),
        ("Length of videos in seconds", "", tally.seconds, ",.1f", _SECONDS),
    ):
        summary, bins = values.summary(), values.bins(first)
        if summary is not None:
            most = max(count for _, count in bins)
            bars = [(label, count, f"{100 * count / most:.1f}") for label, count in bins]
            yield title, ", ".join(f"{name} {value:{form}}" for name, value in summary.items()), note, bars
