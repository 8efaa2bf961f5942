"""What a sampler reports of itself."""

from __future__ import annotations

from typing import Any

from vlm_pg.rollout.contracts import Sampler
from vlm_pg.tally import Tally


def reported(sampler: Sampler) -> dict[str, Any]:
    """The metrics of its calls since the last report."""
    tally = Tally()
    sampler.report(tally)
    return tally.reduced()
