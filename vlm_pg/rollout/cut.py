"""Prompts are read in pieces where few long ones would leave most of a GPU idle.

A variable-length call of flash attention gives one thread block to each segment, key-value head and tile of queries,
and that block walks over all keys of its segment. It splits keys among blocks only where every segment has one query
or keys are paged (torch's flash_api.cpp, mha_varlen_fwd). A decode step has some ten to some hundred queries a prompt:
behind one prompt with 4 key-value heads 4 blocks would read everything, on a device that runs 264 at a time. So a long
node's keys become several segments, each with the same queries, whose results are merged by their log-sum-exp. Each key
is still read once.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

# Queries that one block takes. Only the number of blocks is derived from it.
TILE_QUERIES = 128
# Shorter pieces are not worth their merging.
LEAST_KEYS = 256
# A piece's queries, results and their merging move six rows for each query, its keys and values two rows for each key:
# at this many keys a query merging moves at most three quarters of what reading does.
LEAST_KEYS_A_QUERY = 4
# Rows of all pieces of a node together, one for each query and key-value head: merging them moves six times as many, at
# head dim 128 in half precision 19 MB in a layer. More pieces than that cost more than they gain.
MOST_ROWS = 12_288


def pieces_of(
    tokens: Mapping[int, int], queries: Mapping[int, int], kv_heads: int, tiles_at_once: int | None
) -> dict[int, int]:
    """In how many pieces each node of one call is read, so that its blocks come near to filling the device once.

    Args:
        tokens: keys of each node, at least 1.
        queries: rows that meet each of them.
        kv_heads: K, each of which has blocks of its own.
        tiles_at_once: blocks that the device runs at a time; None: it needs no pieces.
    """
    if tiles_at_once is None:
        return dict.fromkeys(tokens, 1)
    blocks = {node: kv_heads * -(-queries[node] // TILE_QUERIES) for node in tokens}
    # Keys of a piece with which all blocks have equally many and are as many as run at a time.
    even = -(-sum(count * blocks[node] for node, count in tokens.items()) // tiles_at_once)
    found: dict[int, int] = {}
    for node, count in tokens.items():
        by_keys = count // max(even, LEAST_KEYS, LEAST_KEYS_A_QUERY * queries[node])
        found[node] = rounded_down(max(1, min(by_keys, MOST_ROWS // (kv_heads * queries[node]))))
    return found


def rounded_down(pieces: int) -> int:
    """To 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: nodes with equally many pieces share a call, so numbers are few."""
    power = 1 << (pieces.bit_length() - 1)
    between = power + power // 2
    return between if between <= pieces else power


def cut(tokens: int, pieces: int) -> tuple[int, ...]:
    """Lengths of so many pieces, as equal as can be, that make up ``tokens`` together."""
    ends = [tokens * piece // pieces for piece in range(pieces + 1)]
    return tuple(end - start for start, end in pairwise(ends))
