"""The shape of a packed stream in which nodes share their ancestors.

A node is a run of tokens. A token attends to all tokens of its node's ancestors and causally within its own node.
Two levels give the ordinary case (prefix, responses); three give video, question, responses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise

import torch

from vlm_pg.attention.segments import SegmentCall


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
        self.depths = self._depths()
        self._check_order()
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

    def _depths(self) -> tuple[int, ...]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == -1 else depths[parent] + 1)
        return tuple(depths)

    def _check_order(self) -> None:
        keys = list(zip(self.depths, self.parents, strict=True))
        for node in range(1, len(keys)):
            if keys[node] < keys[node - 1]:
                raise ValueError(
                    f"Node {node} (level {keys[node][0]}, parent {keys[node][1]}) comes after node {node - 1} "
                    f"(level {keys[node - 1][0]}, parent {keys[node - 1][1]}). Nodes must come breadth first: "
                    "level by level, and within a level ordered by parent."
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
        self, level: int, asked: Sequence[int]
    ) -> Iterator[tuple[range, tuple[int, ...], tuple[int, ...]]]:
        """For each level above: its nodes, how many of the asking rows descend from each, and the nodes' lengths.

        ``asked``: rows that ask, for each node of ``level``.
        """
        for above in range(level):
            keys = self.level_nodes[above]
            # An ancestor without descendants here keeps its place as a segment with no queries.
            queries = [0] * len(keys)
            for node, rows in zip(self.level_nodes[level], asked, strict=True):
                queries[self.ancestor(node, above) - keys[0]] += rows
            yield keys, tuple(queries), self.lengths[keys[0] : keys[-1] + 1]

    def mask(self, device: torch.device | str = "cpu") -> torch.Tensor:
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
