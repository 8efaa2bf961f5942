"""What training costs a model, in operations: what work is balanced by."""

from __future__ import annotations

from typing import Any

from vlm_pg.batching.cost import CostModel
from vlm_pg.models.policy import Policy


def cost_model(policy: Policy) -> CostModel:
    """Operations of forward and backward with the policy's weights; a multiply-add is two.

    With checkpointing linear layers and the output head run forward twice. Attention runs forward once either way and
    costs two and a half times as much backward. Of a mixture's experts those count that see a token.
    """
    config = policy.model.config
    text = config.get_text_config()
    heads, _, head_dim = policy.family.head_shape(config)
    passes = 4 if policy.checkpointing else 3
    seen = getattr(text, "num_experts_per_tok", None) or 1
    share_seen = seen / (getattr(text, "num_experts", None) or seen)
    weights = sum(
        int(_size(parameter) * (share_seen if ".experts." in name else 1.0))
        for name, parameter in policy.language_model.layers.named_parameters()
    )
    full_layers = policy.family.layer_kinds(config).count("full_attention")
    return CostModel(
        token=2 * passes * weights,
        pair=14 * heads * head_dim * full_layers,
        logit=8 * text.hidden_size * text.vocab_size,
    )


def _size(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))
