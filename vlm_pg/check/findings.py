"""Findings about records, and what a check has counted of a set: as large for a million records as for ten."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vlm_pg.errors import SampleError
from vlm_pg.types import BadSample, Sample


@dataclass(frozen=True)
class Finding:
    """One thing about one record.

    ``is_error``: training would leave the record out, learn what is wrong from it, or measure what it has seen. Others
    are warnings: the record is used, and somebody should have a look. ``is_refusal``: training would leave it out.

    Finding(BadSample("17", "equal_options", "the right option A and option C ...", "train.jsonl:3"))
    """

    bad: BadSample
    is_error: bool = True
    is_refusal: bool = False

    @property
    def reason(self) -> str:
        """The unit in which findings are counted."""
        return self.bad.reason


def refusal(sample: Sample, fault: SampleError) -> Finding:
    """A fault for which training leaves a sample out."""
    return Finding(_bad(sample, fault), is_refusal=True)


def error(sample: Sample, fault: SampleError) -> Finding:
    """A fault of a sample that training uses."""
    return Finding(_bad(sample, fault))


def warning(sample: Sample, reason: str, message: str) -> Finding:
    """Something about a sample that does not keep it from being used."""
    return Finding(_bad(sample, SampleError(reason, message)), is_error=False)


def _bad(sample: Sample, fault: SampleError) -> BadSample:
    return BadSample(sample.sample_id, fault.reason, str(fault), sample.where, fault.trace)


_EXAMPLES = 5


@dataclass
class Distribution:
    """Values, each counted, and so exact percentiles; ``digits`` after the point are kept, which bounds how many there
    are."""

    digits: int = 0
    counts: Counter[float] = field(default_factory=Counter)

    def add(self, value: float) -> None:
        self.counts[round(value, self.digits)] += 1

    @property
    def total(self) -> int:
        return self.counts.total()

    def at(self, share: float) -> float:
        """The least value that ``share`` of all values do not exceed (nearest rank)."""
        rank, passed = max(1, math.ceil(share * self.total)), 0
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
        return {name: self._shown(self.at(share)) for name, share in points.items()}

    def bins(self, first: float) -> list[tuple[str, int]]:
        """Label and count of bins that double: up to ``first``, up to twice as much, and so on, empty ones between."""
        found: Counter[int] = Counter()
        for value, count in self.counts.items():
            found[max(0, math.ceil(math.log2(max(value, first) / first)))] += count
        places = range(min(found), max(found) + 1) if found else ()
        return [(f"up to {first * 2**place:,.0f}", found[place]) for place in places]

    def _shown(self, value: float) -> float:
        return value if self.digits else int(value)


@dataclass
class Reasons:
    """Findings of one weight, by reason, the first few of each."""

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
    """Of one set.

    ``limit``: most tokens of a prompt. ``read``: records that were read, ``unreadable`` those of them that reading
    refuses, ``left_out`` those that the run never asks for, which are not among ``records``.
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
        """A prompt of so many tokens."""
        self.tokens.add(tokens)
        self.above_limit += tokens > self.limit

    def add(self, findings: Sequence[Finding]) -> None:
        """A record, and what was found about it."""
        self.records += 1
        self.with_errors += any(one.is_error for one in findings)
        for one in findings:
            (self.errors if one.is_error else self.warnings).add(one.bad)

    def as_json(self) -> dict[str, Any]:
        """As ``check.json`` has it."""
        return {
            "path": self.path,
            "records": self.records,
            "usable": self.usable,
            "left_out": self.left_out,
            "errors": {reason: count for reason, count, _ in self.errors.rows()},
            "warnings": {reason: count for reason, count, _ in self.warnings.rows()},
            "examples": self._examples(),
            "media": self.media,
            "prompt_tokens": self.tokens.summary(),
            "prompt_tokens_limit": self.limit,
            "prompts_above_limit": self.above_limit,
            "video_seconds": self.seconds.summary(),
        }

    def _examples(self) -> dict[str, list[dict[str, str]]]:
        """By reason."""
        return {
            reason: [{"sample_id": one.sample_id, "where": one.where, "message": one.message} for one in shown]
            for weight in (self.errors, self.warnings)
            for reason, _, shown in weight.rows()
        }
