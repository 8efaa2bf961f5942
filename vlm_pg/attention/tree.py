"""The shape of a packed stream in which nodes share their ancestors, and the variable-length calls that cover it.

A node is a run of tokens. A token attends to all tokens of its node's ancestors and causally within its own node.
Two levels give the ordinary case (prefix, responses); three give video, question, responses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor

# Scattered segments with at most this many keys are gathered into one dense call; longer ones are not worth the copy.
GATHER_UP_TO = 256


class PrefixTree:
    """Nodes of a packed token stream, laid out level by level.

    Args:
        lengths: tokens of each node, in stream order; every length is at least 1.
        parents: index of each node's parent, -1 for a root. Nodes come breadth first: all roots, then their
            children ordered by parent, and so on. Then the descendants of a node at any level are one contiguous
            run of tokens, and a whole level attends to a whole ancestor level in one variable-length call.

    Raises:
        ValueError: a length below 1, a parent that does not exist, or another order.

    Example, two groups with two and one responses:

        PrefixTree(lengths=[900, 700, 20, 31, 8], parents=[-1, -1, 0, 0, 1])
    """

    def __init__(self, lengths: Sequence[int], parents: Sequence[int]):
        self.lengths = tuple(int(n) for n in lengths)
        self.parents = tuple(int(p) for p in parents)
        self._check_nodes()
        depths: list[int] = []
        for node, parent in enumerate(self.parents):
            depths.append(0 if parent == -1 else depths[parent] + 1)
            if node and (depths[node], parent) < (depths[node - 1], self.parents[node - 1]):
                raise ValueError(
                    f"Node {node} (level {depths[node]}, parent {parent}) comes after node {node - 1} (level "
                    f"{depths[node - 1]}, parent {self.parents[node - 1]}). Nodes must come breadth first: level by "
                    "level, and within a level ordered by parent."
                )
        self.depths = tuple(depths)
        self.starts = (0, *accumulate(self.lengths))[:-1]
        self.num_tokens = sum(self.lengths)

    @classmethod
    def from_groups(cls, groups: Sequence[tuple[int, Sequence[int]]]) -> PrefixTree:
        """The two-level tree of ``[(prefix_len, [response_len, ...]), ...]``: all prefixes, then all responses."""
        lengths = [prefix for prefix, _ in groups]
        parents = [-1] * len(groups)
        for index, (_, responses) in enumerate(groups):
            lengths.extend(responses)
            parents.extend([index] * len(responses))
        return cls(lengths, parents)

    def _check_nodes(self) -> None:
        if len(self.lengths) != len(self.parents) or not self.lengths:
            raise ValueError(
                f"PrefixTree got {len(self.lengths)} lengths and {len(self.parents)} parents; "
                "it needs one parent per node and at least one node."
            )
        for node, (length, parent) in enumerate(zip(self.lengths, self.parents, strict=True)):
            if length < 1:
                raise ValueError(
                    f"Node {node} has {length} tokens; every node needs at least 1. Leave empty nodes out."
                )
            if not -1 <= parent < node:
                raise ValueError(
                    f"Node {node} has parent {parent}; allowed are -1 (a root) and earlier nodes (0 to {node - 1})."
                )

    def ancestor(self, node: int, level: int) -> int:
        """The ancestor of ``node`` at ``level`` (the node itself at its own level)."""
        while self.depths[node] > level:
            node = self.parents[node]
        return node

    @cached_property
    def level_nodes(self) -> tuple[range, ...]:
        """Node indices of each level."""
        bounds = [self.depths.index(level) for level in range(max(self.depths) + 1)] + [len(self.depths)]
        return tuple(range(a, b) for a, b in pairwise(bounds))

    def token_range(self, nodes: range) -> tuple[int, int]:
        """First and past-the-last token of consecutive nodes."""
        last = nodes[-1]
        return self.starts[nodes[0]], self.starts[last] + self.lengths[last]

    @cached_property
    def self_call(self) -> SegmentCall:
        """Every node attending causally to itself."""
        return SegmentCall((0, self.num_tokens), (0, self.num_tokens), self.lengths, self.lengths, causal=True)

    @cached_property
    def ancestor_calls(self) -> tuple[SegmentCall, ...]:
        """One non-causal call per (level, ancestor level) pair, nearest ancestors last."""
        return tuple(
            SegmentCall(self.token_range(nodes), self.token_range(keys), queries, lengths, causal=False)
            for level, nodes in enumerate(self.level_nodes)
            for keys, queries, lengths in self.ancestor_segments(level, [self.lengths[node] for node in nodes])
        )

    def ancestor_segments(
        self, level: int, num_queries: Sequence[int]
    ) -> Iterator[tuple[range, tuple[int, ...], tuple[int, ...]]]:
        """For each level above: its nodes, how many queries descend from each, and the nodes' lengths.

        ``num_queries``: rows with queries, for each node of ``level``.
        """
        for above in range(level):
            keys = self.level_nodes[above]
            # An ancestor without descendants here is a segment with no queries.
            queries = [0] * len(keys)
            for node, rows in zip(self.level_nodes[level], num_queries, strict=True):
                queries[self.ancestor(node, above) - keys[0]] += rows
            yield keys, tuple(queries), self.lengths[keys[0] : keys[-1] + 1]

    def mask(self, device: torch.device | str = "cpu") -> Tensor:
        """Boolean [T, T], True where row attends to column: the definition, for the oracle."""
        node_of_token = torch.repeat_interleave(
            torch.arange(len(self.lengths)), torch.tensor(self.lengths), output_size=self.num_tokens
        )
        is_ancestor = torch.zeros(len(self.lengths), len(self.lengths), dtype=torch.bool)
        for node in range(len(self.lengths)):
            for level in range(self.depths[node]):
                is_ancestor[node, self.ancestor(node, level)] = True
        order = torch.arange(self.num_tokens)
        same_node = node_of_token[:, None] == node_of_token[None, :]
        causal = order[:, None] >= order[None, :]
        return (is_ancestor[node_of_token][:, node_of_token] | (same_node & causal)).to(device)


@dataclass(frozen=True)
class SegmentCall:
    """Segment i of the queries attends to segment i of the keys, and to nothing else.

    ``query_range`` and ``key_range``: first and past-the-last token in the stream; the segments fill them in order.
    ``query_lengths``, ``key_lengths``: tokens of each segment; a segment without queries is allowed.
    ``causal``: aligned at the top left (only used where both lengths are equal).
    ``at_most``: upper bounds of query and key lengths, passed to the kernel instead of the maxima, for a call in a CUDA
    graph whose replays have other lengths, see ``fixed_on``.

    Two groups (prefixes of 3 and 2 tokens, responses of 2+2 and 4), responses attending to their prefixes:

        SegmentCall((5, 13), (0, 5), (4, 4), (3, 2), causal=False)
    """

    query_range: tuple[int, int]
    key_range: tuple[int, int]
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    causal: bool
    _on_device: dict = field(default_factory=dict, compare=False, repr=False)
    at_most: tuple[int, int] | None = None

    @property
    def query_rows(self) -> slice:
        return slice(*self.query_range)

    @property
    def key_rows(self) -> slice:
        return slice(*self.key_range)

    @property
    def max_query_length(self) -> int:
        return self.at_most[0] if self.at_most else max(self.query_lengths)

    @property
    def max_key_length(self) -> int:
        return self.at_most[1] if self.at_most else max(self.key_lengths)

    def fixed_on(self, cu_q: Tensor, cu_k: Tensor) -> SegmentCall:
        """Take cumulative lengths from tensors that the caller owns; they may end in segments without rows."""
        self._on_device[cu_q.device] = (cu_q, cu_k)
        return self

    def cu_seqlens(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cumulative lengths int32 [segments + 1] of queries and keys; made once per device, not once per layer."""
        if device not in self._on_device:
            # Copied without a synchronization, in the first layer of a pass.
            self._on_device[device] = tuple(
                torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)
                for lengths in (self.query_lengths, self.key_lengths)
            )
        return self._on_device[device]

    def same_shape_batches(self) -> list[SegmentBatch]:
        """Segments with queries, gathered by (query length, key length): what a dense kernel can take in one call."""
        if "batches" not in self._on_device:
            query_starts = (0, *accumulate(self.query_lengths))
            key_starts = (0, *accumulate(self.key_lengths))
            by_shape: dict[tuple[int, int], list[int]] = {}
            for index, shape in enumerate(zip(self.query_lengths, self.key_lengths, strict=True)):
                if shape[0]:
                    by_shape.setdefault(shape, []).append(index)
            self._on_device["batches"] = [
                SegmentBatch(
                    len(run),
                    _row_index([query_starts[i] for i in run], q_len),
                    _row_index([key_starts[i] for i in run], k_len),
                )
                for (q_len, k_len), rows in by_shape.items()
                for run in (_consecutive_runs(rows) if k_len > GATHER_UP_TO else [rows])
            ]
        return self._on_device["batches"]


def _consecutive_runs(rows: list[int]) -> list[list[int]]:
    """[3, 4, 7] -> [[3, 4], [7]]."""
    return [[row for _, row in run] for _, run in groupby(enumerate(rows), key=lambda pair: pair[1] - pair[0])]


@dataclass(frozen=True)
class SegmentBatch:
    """Segments of one shape; an index is a slice (no copy) where rows are consecutive."""

    count: int
    query_index: slice | Tensor
    key_index: slice | Tensor


def _row_index(starts: list[int], length: int) -> slice | Tensor:
    if all(b - a == length for a, b in pairwise(starts)):
        return slice(starts[0], starts[-1] + length)
    return (torch.tensor(starts)[:, None] + torch.arange(length)).flatten()
