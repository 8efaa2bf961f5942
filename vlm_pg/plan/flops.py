"""Floating-point operations from a model's dimensions; a multiply-add counts as two.

Backward costs a linear layer twice its forward (one product for the input, one for the weight). Flash attention makes
2 products forward and 5 backward, because it computes the scores again. Checkpointing adds one forward of all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from vlm_pg.batching.cost import CostModel
from vlm_pg.models.memory_sizes import LanguageShape, LinearAttention

LINEAR_BACKWARD = 2.0
ATTENTION_BACKWARD = 2.5


def token_flops(shape: LanguageShape) -> float:
    """Forward operations of one token in all layers, without the pairs of softmax attention and without the head."""
    queries = shape.query_width * (2 if shape.gated_query else 1)
    projections = 2 * (shape.hidden * (queries + 2 * shape.key_width) + shape.query_width * shape.hidden)
    total = shape.layers * 2 * 3 * shape.hidden * shape.intermediate + shape.full_layers * projections
    return total + linear_attention_flops(shape)


def linear_attention_flops(shape: LanguageShape) -> float:
    """Forward operations of one token in all gated linear-attention layers.

    Projections of query, key, value, output gate, decay and step size, and the output projection; a short convolution
    over query, key and value; and per value head, on its state S [key_dim, value_dim]: decay it, read it with the key,
    add the outer product of key and correction, read it with the query (1 + 2 + 2 + 2 operations per entry of S).
    Source of the recurrence: Gated Delta Networks, arXiv 2412.06464, equation 10.
    """
    if (linear := shape.linear) is None:
        return 0.0
    keys, values = linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim
    projections = 2 * shape.hidden * (2 * keys + 2 * values + 2 * linear.value_heads) + 2 * values * shape.hidden
    convolution = 2 * linear.conv_width * (2 * keys + values)
    return linear.layers * (projections + convolution + _recurrence(linear))


def _recurrence(linear: LinearAttention) -> int:
    return 7 * linear.value_heads * linear.key_dim * linear.value_dim


def pair_flops(shape: LanguageShape) -> float:
    """Forward operations of one (query, key) pair in all softmax-attention layers: score and weighted sum."""
    return shape.full_layers * 4 * shape.query_width


def head_flops(shape: LanguageShape) -> int:
    """Forward operations of one row of logits."""
    return 2 * shape.hidden * shape.vocab


def parameter_count(shape: LanguageShape) -> float:
    """Weights that a token of the language model uses, in linear layers and embeddings (norms and biases left out)."""
    recurrences = shape.linear.layers * _recurrence(shape.linear) if shape.linear else 0
    return (token_flops(shape) - recurrences) / 2 + shape.hidden * shape.vocab * (1 if shape.tied else 2)


def causal_pairs(length: int) -> int:
    """(query, key) pairs in causal attention of a sequence to itself, the diagonal included."""
    return length * (length + 1) // 2


def shared_pairs(prefix: int, own: Sequence[int]) -> int:
    """(query, key) pairs of a group: a prefix once, and behind it responses of so many tokens."""
    return causal_pairs(prefix) + sum(length * prefix + causal_pairs(length) for length in own)


def cost_model(shape: LanguageShape, checkpointing: bool) -> CostModel:
    """Training work for balancing over ranks (``batching/balance.py``); whole numbers, so that ranks add up alike.

    A recomputed layer takes its attention from the first run. The output head's chunks are always computed again.
    """
    return CostModel(
        token=round(token_flops(shape) * (1 + LINEAR_BACKWARD + checkpointing)),
        pair=round(pair_flops(shape) * (1 + ATTENTION_BACKWARD)),
        logit=round(head_flops(shape) * (2 + LINEAR_BACKWARD)),
    )


def sequence_parallel_bytes(shape: LanguageShape, tokens: int, ranks: int, element: int, checkpointing: bool) -> int:
    """Bytes one rank sends for one layer, forward and backward.

    Around attention queries, keys, values and its output change from t = tokens / ranks rows of all heads to all rows
    of some heads, and back: ``t H (2 N + 2 K') (s - 1) / s e`` bytes. N query heads, K' = max(K, s) key-value heads
    (each rank needs one, so fewer are repeated), head dim H, s ranks. Backward sends as much; a checkpointed layer once
    more.
    """
    heads = 2 * shape.heads + 2 * max(shape.kv_heads, ranks)
    once = Fraction(tokens, ranks) * shape.head_dim * heads * Fraction(ranks - 1, ranks) * element
    return int(once * (3 if checkpointing else 2))
