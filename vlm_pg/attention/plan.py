"""Which rows of a tree have queries, and the variable-length calls that compute their attention.

Scoring needs no hidden state of most prefix tokens in the last layer, and a chunk of responses runs behind prefixes
whose keys and values are already known. In both cases queries are some rows of the tree and keys are all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from vlm_pg.attention.tree import PrefixTree, SegmentCall

Reads = Literal["all", "last", "none"]


@dataclass(frozen=True)
class AttentionPlan:
    """The calls of one attention layer.

    ``own``: calls in which rows meet their own node; together they hold every query row exactly once.
    ``above``: calls in which rows meet their ancestors.
    ``rows``: stream rows with queries, in stream order; None for all.
    """

    tree: PrefixTree
    own: tuple[SegmentCall, ...]
    above: tuple[SegmentCall, ...]
    rows: tuple[int, ...] | None = None
    _on_device: dict = field(default_factory=dict, compare=False, repr=False)

    @property
    def num_queries(self) -> int:
        return self.tree.num_tokens if self.rows is None else len(self.rows)

    @property
    def num_keys(self) -> int:
        return self.tree.num_tokens

    @cached_property
    def merges_once(self) -> bool:
        """No row meets its ancestors in more than one call."""
        return _apart(call.query_range for call in self.above)

    @cached_property
    def keys_read_once(self) -> bool:
        """No key meets queries of its descendants in more than one call."""
        return _apart(call.key_range for call in self.above)

    def mask(self, device: torch.device | str = "cpu") -> Tensor:
        """Boolean [queries, keys], True where a row attends: the definition, for the oracle."""
        mask = self.tree.mask(device)
        return mask if self.rows is None else mask[list(self.rows)]

    def split_rows(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Rows with queries and rows without, int64; made once per device, not once per layer."""
        if ("rows", device) not in self._on_device:
            has_query = np.zeros(self.tree.num_tokens, dtype=bool)
            has_query[slice(None) if self.rows is None else list(self.rows)] = True
            self._on_device["rows", device] = tuple(
                torch.from_numpy(np.flatnonzero(mask)).to(device, non_blocking=True) for mask in (has_query, ~has_query)
            )
        return self._on_device["rows", device]

    def stream_order(self, device: torch.device) -> Tensor:
        """int64 [T]: brings (rows with queries, rows without) back into stream order."""
        if ("order", device) not in self._on_device:
            self._on_device["order", device] = torch.cat(self.split_rows(device)).argsort()
        return self._on_device["order", device]


def _apart(ranges: Iterable[tuple[int, int]]) -> bool:
    return all(end <= start for (_, end), (start, _) in pairwise(sorted(ranges)))


def full_plan(tree: PrefixTree) -> AttentionPlan:
    """Queries of every row: one causal call over all nodes, one call per (level, ancestor level) pair."""
    return AttentionPlan(tree, (tree.self_call,), tree.ancestor_calls)


def reading_plan(tree: PrefixTree, reads: Sequence[Reads]) -> AttentionPlan:
    """Queries of some rows of each node: "all", its "last" one, or "none".

    Raises:
        ValueError: not one entry per node, an unknown entry, or nothing to read.
    """
    if len(reads) != len(tree.lengths):
        raise ValueError(f"The tree has {len(tree.lengths)} nodes but {len(reads)} reads were given; give one a node.")
    unknown = set(reads) - {"all", "last", "none"}
    if unknown:
        raise ValueError(f"Unknown reads {sorted(unknown)}; allowed are 'all', 'last' and 'none'.")
    # Rows with queries; a node that is not read is a segment without queries.
    counts = [{"all": length, "last": 1, "none": 0}[read] for length, read in zip(tree.lengths, reads, strict=True)]
    rows: list[int] = []
    own: list[SegmentCall] = []
    above: list[SegmentCall] = []
    for level, nodes in enumerate(tree.level_nodes):
        level_start = len(rows)
        for causal, group in groupby(nodes, key=lambda node: reads[node] == "all"):
            run = list(group)
            queries = tuple(counts[run[0] : run[-1] + 1])
            keys = tree.token_range(range(run[0], run[-1] + 1))
            start = len(rows)
            for node in run:
                end = tree.starts[node] + tree.lengths[node]
                rows.extend(range(end - counts[node], end))
            if any(queries):
                own.append(SegmentCall((start, len(rows)), keys, queries, tree.lengths[run[0] : run[-1] + 1], causal))
        if len(rows) > level_start:
            above.extend(
                SegmentCall((level_start, len(rows)), tree.token_range(keys), queries, lengths, causal=False)
                for keys, queries, lengths in tree.ancestor_segments(level, counts[nodes[0] : nodes[-1] + 1])
            )
    if not rows:
        raise ValueError("No node is read; at least one must be.")
    return AttentionPlan(tree, tuple(own), tuple(above), tuple(rows))
