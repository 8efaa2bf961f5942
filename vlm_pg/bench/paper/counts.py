"""What was counted of one piece of work."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

# Kinds of operations: products of matrices, attention over pairs, one value from one place ("element-wise", fused norms
# and activations among them), sums over a dimension, and what only moves or fills memory.
KINDS = ("matmul", "attention", "elementwise", "reduction", "copy")


@dataclass
class Counts:
    """Sums over all operations that a device would have run.

    ``flops``: by kind; a multiply-add counts as two. ``bytes``: read and written, by (kind, operation).
    ``launches``: kernels, by operation. ``waits``: by the line of code whose host waits for the device.
    ``sent``: bytes to other ranks, by collective.
    ``peak_bytes``: most that was alive at one time, without what was there before; ``end_bytes``: alive at the end.
    """

    flops: Counter[str] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    peak_bytes: int = 0
    end_bytes: int = 0

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())

    @property
    def total_launches(self) -> int:
        return sum(self.launches.values())

    @property
    def total_waits(self) -> int:
        return sum(self.waits.values())

    def bytes_of(self, kind: str) -> int:
        """Of all operations of one of ``KINDS``."""
        return sum(amount for (of, _), amount in self.bytes.items() if of == kind)
