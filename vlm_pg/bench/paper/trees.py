"""Counts as they stand in a file, and sums over them: nested dictionaries of numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vlm_pg.bench.paper.counts import KINDS, Counts

Tree = dict[str, Any]


def tree_of(counts: Counts) -> Tree:
    """Sums as a file has them, what was sent only where something was; memory is apart, for it does not add up."""
    by_operation: dict[str, dict[str, int]] = {}
    for (kind, operation), amount in counts.bytes.items():
        by_operation.setdefault(kind, {})[operation] = amount
    return {
        "flops": {kind: counts.flops[kind] for kind in KINDS},
        "bytes": {kind: counts.bytes_of(kind) for kind in KINDS},
        "launches": counts.total_launches,
        "waits": dict(counts.waits),
        "bytes_by_operation": by_operation,
        "launches_by_operation": {name: count for name, count in counts.launches.items() if count},
        **({"sent": dict(counts.sent)} if counts.sent else {}),
    }


def weighted(terms: Iterable[tuple[float, Tree]]) -> Tree:
    """The sum of ``weight * tree``; whole numbers stay whole where they are."""
    total: Tree = {}
    for weight, tree in terms:
        for key, value in tree.items():
            if isinstance(value, dict):
                total[key] = weighted([(1, total.get(key, {})), (weight, value)])
            else:
                total[key] = total.get(key, 0) + weight * value
    return {key: _whole(value) for key, value in total.items()}


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def extrapolated(near: Tree, far: Tree, at: tuple[int, int], to: int) -> Tree:
    """What is affine in a whole number, known at the two of ``at``, at ``to``."""
    step = (to - at[0]) / (at[1] - at[0])
    return weighted([(1 - step, near), (step, far)])
