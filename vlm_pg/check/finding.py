"""What a check finds of one record."""

from __future__ import annotations

from dataclasses import dataclass

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
