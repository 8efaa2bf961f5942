"""A packed stream through the decoder layers of any registered family.

transformers' own layers are called one by one, for three things its model's forward cannot do: the last layer runs
only on rows that are read, DeepStack features are added at known rows without masks, and no mask is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vlm_pg.attention.registration import AttentionContext
from vlm_pg.models.contexts import TreeContext
from vlm_pg.models.layer_globals import layer_global
from vlm_pg.models.prefix_states import KeysValues


def run_decoder(
    language_model: Any,
    embeddings: Tensor,
    positions_AT: Tensor,
    context: AttentionContext,
    media_rows: Tensor | None = None,
    early_features: Sequence[Tensor] = (),
    trim: bool = True,
) -> Tensor:
    """Last hidden states of the rows that are read, after the final norm.

    Args:
        language_model: transformers' text model (layers, norm, rotary_emb).
        embeddings: [T, D], visual features already in place.
        positions_AT: int64 [A, T]; A rotary axes, 3 or, where the model has but one, 1.
        context: what the layers do; a ``TreeContext`` with a ``last_plan`` names the rows to read.
        media_rows: int64 [M], rows of visual tokens.
        early_features: DeepStack (Qwen3-VL): [M, D] each, added to the output of layer 0, 1, ... at ``media_rows``.
        trim: leave out in the last layer what is not read; else it is run on all rows and cut afterwards.

    Returns:
        [rows read, D]; all T rows where the context names none.
    """
    hidden = embeddings[None]
    # transformers takes [batch, T] where there is one axis, [3, batch, T] where there are three.
    rotary = language_model.rotary_emb(hidden, positions_AT if len(positions_AT) == 1 else positions_AT[:, None])
    last = len(language_model.layers) - 1
    for index, layer in enumerate(language_model.layers):
        if index == last and isinstance(context, TreeContext) and context.last_plan is not None:
            hidden = _last_layer(layer, hidden, rotary, context, trim)
        else:
            hidden = _run(layer, hidden, rotary, context)
        # Visual tokens are never read: behind a last layer cut to the rows that are, there is nothing to add.
        if index < len(early_features) and hidden.shape[1] == embeddings.shape[0]:
            assert media_rows is not None
            hidden = hidden.index_add(1, media_rows, early_features[index].to(hidden.dtype)[None])
    return language_model.norm(hidden).squeeze(0)


def _run(layer: Any, hidden: Tensor, rotary: tuple[Tensor, ...], context: AttentionContext) -> Tensor:
    # The context decides what attends to what; no mask is built. A gradient that enters a checkpointed layer through
    # its hidden states reaches the weights; nothing else in the call needs one.
    out = layer(hidden, position_embeddings=rotary, attention_mask=None, attention_context=context)
    return out[0] if isinstance(out, tuple) else out


def _last_layer(layer: Any, hidden: Tensor, rotary: tuple[Tensor, ...], context: TreeContext, trim: bool) -> Tensor:
    """The last layer needs only keys and values of rows that are not read."""
    read, unread = context.split_rows(hidden.device)
    if not trim or not hasattr(layer, "self_attn"):
        # A recurrent layer must pass through every row.
        return _run(layer, hidden, rotary, context)[:, read]
    # A sequence rank may have no unread rows where another one has some: all ranks split the layer, or none.
    if len(unread) or context.share is not None:
        if context.share is None:
            chosen, others = _SplitRows.apply(hidden, read, unread)
        else:
            chosen, others = hidden[:, read], hidden[:, unread]
        keys_values = partial(_keys_values, layer)
        operands = (others, *(part[..., unread, :] for part in rotary))
        if torch.is_grad_enabled() and getattr(layer, "gradient_checkpointing", False) and layer.training:
            supplied = layer._gradient_checkpointing_func(keys_values, *operands)
        else:
            supplied = keys_values(*operands)
        context.supply_unread(layer.self_attn.layer_idx, supplied)
    else:
        chosen = hidden[:, read]
    return _run(layer, chosen, tuple(part[..., read, :] for part in rotary), context)


class _SplitRows(torch.autograd.Function):
    """Hidden states [1, T, D] in two disjoint parts.

    So backward copies each part's gradient; indexing would sort rows, because it accumulates duplicates.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, rows: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        ctx.rows = (rows, others)
        return hidden[:, rows], hidden[:, others]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        grad = grad_outputs[0].new_empty(1, sum(map(len, ctx.rows)), grad_outputs[0].shape[-1])
        for rows, part in zip(ctx.rows, grad_outputs, strict=True):
            grad.index_copy_(1, rows, part)
        return grad, None, None


def _keys_values(layer: Any, hidden: Tensor, cos: Tensor, sin: Tensor) -> KeysValues:
    """Keys and values [rows, K, H] as the layer's own attention makes them, without queries and outputs."""
    attention = layer.self_attn
    normed = layer.input_layernorm(hidden)
    shape = (*normed.shape[:-1], -1, attention.head_dim)
    key = attention.k_proj(normed).view(shape)
    if hasattr(attention, "k_norm"):
        key = attention.k_norm(key)
    key = _rotate(attention, key.transpose(1, 2), cos, sin)
    value = attention.v_proj(normed).view(shape)
    return key[0].transpose(0, 1), value[0]


def _rotate(attention: Any, key: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """By the rotation of the layer itself: liger's, or the modeling file's."""
    rotation = layer_global(attention, "apply_rotary_pos_emb")
    # It takes queries, too: a copy of one key head, because liger's kernel rotates in place.
    return rotation(key[:, :1].detach().clone(), key, cos, sin)[1]
