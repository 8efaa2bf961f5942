"""Bytes that sequence parallelism sends."""

from __future__ import annotations

from fractions import Fraction

from vlm_pg.bench.shapes import LanguageShape


def sequence_parallel_bytes(text: LanguageShape, tokens: int, ranks: int, element: int, checkpointing: bool) -> int:
    """Bytes one rank sends for one layer, forward and backward.

    Around attention queries, keys, values and its output change from t = tokens / ranks rows of all heads to all rows
    of some heads, and back: ``t H (2 N + 2 K') (s - 1) / s e`` bytes. N query heads, K' = max(K, s) key-value heads
    (each rank needs one, so fewer are repeated), head dim H, s ranks. Backward sends as much; a checkpointed layer once
    more.
    """
    heads = 2 * text.heads + 2 * max(text.kv_heads, ranks)
    once = Fraction(tokens, ranks) * text.head_dim * heads * Fraction(ranks - 1, ranks) * element
    return int(once * (3 if checkpointing else 2))
