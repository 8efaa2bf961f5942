"""One token of gated linear attention (Qwen3.5) for many rollouts, each from its own state: what decoding needs.

The same layer as ``linear_attention_over_tree``, token by token instead of in chunks. Of everything a rollout has read,
such a layer keeps the last inputs of its convolution and one state of fixed size; both are replaced at every token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from transformers.activations import ACT2FN

from vlm_pg.models.linear_attention import LinearStates, per_value_head
from vlm_pg.rollout.delta_rule import RuleStep
from vlm_pg.rollout.own_states import RowStates


def linear_attention_step(mixer: Any, hidden: torch.Tensor, states: LinearStates) -> tuple[torch.Tensor, LinearStates]:
    """transformers' gated delta layer on the next token of n rollouts.

    Args:
        mixer: transformers' ``Qwen3_5GatedDeltaNet`` or its mixture-of-experts twin.
        hidden: [n, D], one token each.
        states: of the same n rollouts, before this token; left as they are.

    Returns:
        [n, D], and the states after this token.
    """
    after: list[torch.Tensor] = []

    def convolve(qkv: torch.Tensor) -> torch.Tensor:
        window = torch.cat([states.conv_tail, qkv[:, None]], dim=1).transpose(1, 2)
        after.append(window[..., 1:].transpose(1, 2))
        return _convolution(mixer, window)

    def mix(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        core, recurrent = _recurrent_rule(mixer)(
            query[:, None],
            key[:, None],
            value[:, None],
            g=decay[:, None],
            beta=beta[:, None],
            initial_state=states.recurrent,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        after.append(recurrent)
        return core[:, 0]

    return _layer(mixer, hidden, convolve, mix), LinearStates(*after)


def linear_attention_step_(mixer: Any, hidden: torch.Tensor, states: RowStates, rule_step_: RuleStep) -> torch.Tensor:
    """The same, with the states replaced in place: shapes and addresses stay, so a CUDA graph can hold this call.

    Args:
        mixer, hidden: as above.
        states: of the same n rollouts, before this token; afterwards those behind it.
        rule_step_: replaces the recurrent ones; see ``delta_rule``.

    Returns:
        [n, D].
    """

    def convolve(qkv: torch.Tensor) -> torch.Tensor:
        window = torch.cat([states.inputs, qkv[..., None]], dim=2)
        states.inputs.copy_(window[..., 1:])
        return _convolution(mixer, window)

    def mix(query: torch.Tensor, key: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return rule_step_(states.recurrent, query, key, *rest).to(query.dtype)

    return _layer(mixer, hidden, convolve, mix)


def _layer(
    mixer: Any, hidden: torch.Tensor, convolve: Callable[[torch.Tensor], torch.Tensor], mix: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """[n, D] -> [n, D].

    Args:
        convolve: the new inputs of the convolution [n, C] -> its outputs [n, C].
        mix: query, key [n, Hv, dk], value [n, Hv, dv], logarithm of the decay and beta [n, Hv] -> [n, Hv, dv].
    """
    count = hidden.shape[0]
    # The modules in the order in which a tree calls them: ranks that take turns may be on either path.
    qkv = mixer.in_proj_qkv(hidden)
    beta = mixer.in_proj_b(hidden).sigmoid()
    decay = -mixer.A_log.float().exp() * F.softplus(mixer.in_proj_a(hidden).float() + mixer.dt_bias)
    query, key, value = convolve(qkv).split([mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
    core = mix(
        per_value_head(query.reshape(count, -1, mixer.head_k_dim), mixer.num_v_heads),
        per_value_head(key.reshape(count, -1, mixer.head_k_dim), mixer.num_v_heads),
        value.reshape(count, -1, mixer.head_v_dim),
        decay,
        beta,
    )
    z = mixer.in_proj_z(hidden).reshape(-1, mixer.head_v_dim)
    normed = mixer.norm(core.reshape(-1, mixer.head_v_dim), z).reshape(count, -1)
    return mixer.out_proj(normed)


def _convolution(mixer: Any, window: torch.Tensor) -> torch.Tensor:
    """Depthwise convolution over the last inputs [n, C, W], the new ones among them -> [n, C]."""
    # Called as a module, so that hooks that gather scattered weights run.
    out = mixer.conv1d(window.to(mixer.conv1d.weight.dtype), padded=False)[..., 0]
    return ACT2FN[mixer.activation](out).to(window.dtype)


def _recurrent_rule(mixer: Any) -> Any:
    """transformers' own function: a fused kernel where one is installed, else its torch code."""
    own = getattr(mixer, "recurrent_gated_delta_rule", None)
    return own or sys.modules[type(mixer).__module__].torch_recurrent_gated_delta_rule
