"""Grouped attention as a transformers attention implementation.

A transformers model whose language model is set to ``ATTENTION_NAME`` hands every layer's q, k, v to
``attention_forward``. What to do with them is decided by the ``attention_context`` passed through the forward call,
never by positions or masks: transformers' own packed paths read position resets as sequence borders.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from transformers import AttentionInterface

ATTENTION_NAME = "vlm_pg_grouped"
# Set on a language model whose layers choose ``attention_forward`` themselves in calls with an attention_context.
ROUTED = "vlm_pg_attention_routed"


class AttentionContext(Protocol):
    """What one forward pass does in the token-mixing part of each layer.

    ``recorder``: a ``ForwardRecorder`` that collects what this pass computes; ``recorded``: the ``RecordedStream`` of
    such passes, whose layers run in backward only. Both None in most passes.
    """

    recorder: Any
    recorded: Any

    def attend(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Full attention: q [rows, N, H], k, v [rows, K, H] of the rows this layer runs on -> [rows, N, H]."""
        ...

    def mix_linear(self, layer_index: int, mixer: Any, hidden: Tensor) -> Tensor:
        """A linear-attention layer (``mixer`` is transformers' module) on hidden [rows, D] -> [rows, D]."""
        ...


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    attention_context: AttentionContext | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: q [1, N, T, H], k, v [1, K, T, H] -> ([1, T, N, H], no weights)."""
    if attention_context is None:
        raise ValueError(
            f"A layer set to attention implementation {ATTENTION_NAME!r} was called without attention_context. "
            "Use Policy.logprobs or the rollout engine, or model.set_attn_implementation('sdpa') for plain forwards."
        )
    if dropout:
        raise ValueError(f"Grouped attention got dropout={dropout}; only 0 is exact. Set attention_dropout to 0.")
    if sliding_window is not None:
        raise ValueError(f"Grouped attention got sliding_window={sliding_window}; only full attention is supported.")
    # Not x[0], whose backward fills a tensor of zeros and copies into it.
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    out = attention_context.attend(int(module.layer_idx), q, k, v, scale)
    return out.unsqueeze(0), None


def check_grouped(language_model: Any) -> None:
    """Raise ValueError for a model whose layers would read a packed stream as one causal sequence."""
    implementation = language_model.config._attn_implementation
    if implementation != ATTENTION_NAME and not getattr(language_model, ROUTED, False):
        raise ValueError(
            f"The language model's attention implementation is {implementation!r}, which would read a stream as "
            f"one sequence; allowed is {ATTENTION_NAME!r}. Call model.set_attn_implementation("
            f"{{'text_config': {ATTENTION_NAME!r}}}) before the policy is used again."
        )


AttentionInterface.register(ATTENTION_NAME, attention_forward)
