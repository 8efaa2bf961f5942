"""How much memory keys, values and states take, and how much they may take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from vlm_pg.errors import ConfigError
from vlm_pg.memory import GIB, free_bytes, gpu_bytes
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.cohort_attention import BLOCK_TOKENS
from vlm_pg.rollout.settings import RolloutSettings

SHARE_OF_FREE = 0.6


@dataclass(frozen=True)
class TokenCosts:
    """Bytes that generation keeps: per token of a prompt or a response, and per node or rollout (linear layers)."""

    per_token: int
    per_state: int

    @classmethod
    def of(cls, policy: Policy) -> TokenCosts:
        config, size = policy.model.config, policy.dtype.itemsize
        kinds = policy.family.layer_kinds(config)
        linear = kinds.count("linear_attention")
        _, kv_heads, head_dim = policy.family.head_shape(config)
        per_token = 2 * kv_heads * head_dim * size * (len(kinds) - linear)
        return cls(per_token, linear * _state_bytes(config.get_text_config(), size) if linear else 0)

    def prompts(self, tokens: int, nodes: int, settings: RolloutSettings, divided_by: int = 1) -> int:
        """Of so many tokens of prompts in so many nodes; what one of ``divided_by`` processes holds of them."""
        here = tokens
        if divided_by > 1:
            # Each pass is divided by itself, those of its rows that are read apart from the others.
            here = -(-tokens // divided_by) + 2 * -(-tokens // settings.prefill_tokens)
        return min(here, tokens) * self.per_token + nodes * self.per_state

    def rollout(self, settings: RolloutSettings) -> int:
        """Of one rollout at its longest; room grows in blocks, so that is how it is booked."""
        blocks = -(-settings.max_new_tokens // BLOCK_TOKENS)
        return blocks * BLOCK_TOKENS * self.per_token + self.per_state


def _state_bytes(text: Any, size: int) -> int:
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    values = text.linear_num_value_heads * text.linear_value_head_dim
    tail = (text.linear_conv_kernel_dim - 1) * (2 * keys + values) * size
    # The recurrent state is fp32 whatever the weights are.
    return tail + text.linear_num_value_heads * text.linear_key_head_dim * text.linear_value_head_dim * 4


def budget_bytes(settings: RolloutSettings, device: torch.device, kept: int = 0) -> int:
    """What keys, values and states may take: as the settings say, else a share of what is free now.

    ``kept``: bytes that the last call has left for the next one, which are not free.
    """
    if settings.memory_gb is not None:
        return int(settings.memory_gb * GIB)
    return int(SHARE_OF_FREE * (free_bytes(device) + kept))


def most_kept(device: torch.device) -> int:
    """Bytes of buffers that may stay on a GPU from one call to the next, so that recorded decode steps stay of use."""
    return (gpu_bytes(device) or 0) // 32


def check_fits(needed: int, budget: int, sample_id: str, settings: RolloutSettings, advice: str = "") -> None:
    """Raise ConfigError if one group alone goes beyond the budget. ``advice``: what else would help."""
    if needed > budget:
        raise ConfigError(
            f"One group needs {needed / GIB:.3g} GiB for keys and values ({settings.num_generations} rollouts of up to "
            f"{settings.max_new_tokens} tokens behind the prompt of sample {sample_id}), but generation may take "
            f"{budget / GIB:.3g} GiB. Raise rollout.memory_gb to at least {_rounded_up(needed / GIB)}, or lower "
            f"rollout.num_generations, rollout.max_new_tokens or the media's size{advice}."
        )


def _rounded_up(gib: float) -> str:
    """Three digits that are enough."""
    digits = max(0, 2 - math.floor(math.log10(gib)))
    return f"{math.ceil(gib * 10**digits) / 10**digits:.{digits}f}"
