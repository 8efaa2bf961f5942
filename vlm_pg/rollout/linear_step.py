"""One token of gated linear attention (Qwen3.5) for many rollouts, each from its own state: what decoding needs.

The same layer as ``linear_attention_over_tree``, token by token instead of in chunks. Of everything a rollout has read,
such a layer keeps the last inputs of its convolution and one state of fixed size; both are replaced at every token.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn import functional as F
from transformers.activations import ACT2FN

from vlm_pg.models.linear_attention import LinearStates, per_value_head


def linear_attention_step(mixer: Any, hidden: torch.Tensor, states: LinearStates) -> tuple[torch.Tensor, LinearStates]:
    """transformers' gated delta layer on the next token of n rollouts.

    Args:
        mixer: transformers' ``Qwen3_5GatedDeltaNet`` or its mixture-of-experts twin.
        hidden: [n, D], one token each.
        states: of the same n rollouts, before this token; left as they are.

    Returns:
        [n, D], and the states after this token.
    """
    count = hidden.shape[0]
    # The modules in the order in which a tree calls them: ranks that take turns may be on either path.
    qkv = mixer.in_proj_qkv(hidden)
    beta = mixer.in_proj_b(hidden).sigmoid()
    decay = -mixer.A_log.float().exp() * F.softplus(mixer.in_proj_a(hidden).float() + mixer.dt_bias)
    qkv, conv_tail = _convolution(mixer, qkv, states.conv_tail)
    query, key, value = qkv.split([mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
    core, recurrent = _recurrent_rule(mixer)(
        per_value_head(query.reshape(count, 1, -1, mixer.head_k_dim), mixer.num_v_heads),
        per_value_head(key.reshape(count, 1, -1, mixer.head_k_dim), mixer.num_v_heads),
        value.reshape(count, 1, -1, mixer.head_v_dim),
        g=decay[:, None],
        beta=beta[:, None],
        initial_state=states.recurrent,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    z = mixer.in_proj_z(hidden).reshape(-1, mixer.head_v_dim)
    normed = mixer.norm(core.reshape(-1, mixer.head_v_dim), z).reshape(count, -1)
    return mixer.out_proj(normed), LinearStates(conv_tail, recurrent)


def _convolution(mixer: Any, qkv: torch.Tensor, tail: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Depthwise convolution over tail [n, W - 1, C] and token [n, C] -> [n, C], and the tail after it."""
    width = mixer.conv1d.kernel_size[0]
    window = torch.cat([tail, qkv[:, None]], dim=1)
    # Called as a module, so that hooks that gather scattered weights run; its own zero padding is cut off.
    out = mixer.conv1d(window.to(mixer.conv1d.weight.dtype).transpose(1, 2))[..., width - 1]
    return ACT2FN[mixer.activation](out).to(qkv.dtype), window[:, 1:]


def _recurrent_rule(mixer: Any) -> Any:
    """transformers' own function: a fused kernel where one is installed, else its torch code."""
    own = getattr(mixer, "recurrent_gated_delta_rule", None)
    return own or sys.modules[type(mixer).__module__].torch_recurrent_gated_delta_rule
