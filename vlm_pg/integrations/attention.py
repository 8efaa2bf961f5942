"""One attention implementation for a model that two programs share: ours scores with it, theirs generates with it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from vlm_pg.attention.integration import GROUPED_NAMES, attention_forward

GROUPED_OR_SDPA = "vlm_pg_grouped_or_sdpa"


def grouped_or_sdpa(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' attention signature: grouped where the forward call carries an ``attention_context``, else sdpa.

    The decision travels with the call, so a layer that gradient checkpointing runs again in backward, long after the
    scoring is over, decides the same way. Switching the model's attention around the scoring would not.
    """
    if options.get("attention_context") is not None:
        return attention_forward(module, query, key, value, attention_mask, **options)
    options.pop("attention_context", None)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


AttentionInterface.register(GROUPED_OR_SDPA, grouped_or_sdpa)
AttentionMaskInterface.register(GROUPED_OR_SDPA, sdpa_mask)
GROUPED_NAMES.add(GROUPED_OR_SDPA)
