"""Which passes every rank makes in a step: the same kinds in the same order, whatever each has to do.

Ranks that reduce gradients (ZeRO-2) or gather weights (ZeRO-3) together must run the same sequence of forward and
backward passes, or their collectives meet the wrong partners. A rank with less to do fills its places with passes worth
zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vlm_pg.batching.plan import MicroBatch
from vlm_pg.distributed import max_over_ranks


@dataclass(frozen=True)
class PassSlot:
    """One place in the common order. ``micro``: what this rank computes there, None for nothing of its own.

    ``chunks``: chunks that every rank runs there, 1 for a single pass.
    """

    micro: MicroBatch | None
    chunks: int

    @property
    def backward_calls(self) -> int:
        return 1 if self.chunks == 1 else self.chunks + 1


def agreed_slots(plan: Sequence[MicroBatch], device: torch.device) -> list[PassSlot]:
    """The common order: chunked micro-batches, most chunks first, then single passes. A collective itself."""
    chunked = sorted((micro for micro in plan if len(micro.chunks) > 1), key=lambda micro: -len(micro.chunks))
    plain = [micro for micro in plan if len(micro.chunks) == 1]
    counts = max_over_ranks({"chunked": float(len(chunked)), "plain": float(len(plain))}, device)
    chunked_places, plain_places = int(counts["chunked"]), int(counts["plain"])
    lengths = [float(len(micro.chunks)) for micro in chunked] + [0.0] * (chunked_places - len(chunked))
    most = {f"place {place:06d}": length for place, length in enumerate(lengths)}
    if most:
        most = max_over_ranks(most, device)
    places = [
        PassSlot(chunked[place] if place < len(chunked) else None, int(most[f"place {place:06d}"]))
        for place in range(chunked_places)
    ]
    return places + [PassSlot(plain[place] if place < len(plain) else None, 1) for place in range(plain_places)]
