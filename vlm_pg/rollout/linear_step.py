"""One token of gated linear attention (Qwen3.5) for many rollouts, each from its own state, as decoding needs it.

The same layer as ``linear_attention_over_tree``. Of everything a rollout has read, it keeps the last inputs of its
convolution and one state of fixed size. That state is replaced by one Triton kernel or by torch operators, with and
without flash-linear-attention and causal-conv1d, whose kernels return a new state, which would have to be copied to
where a recorded step reads it; transformers' torch code reads tensors of a state's size seven times and writes five.

n rollouts or R rows, C convolution channels, W convolution width, Hv value heads, dk, dv sizes of a key and value head.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F
from transformers.activations import ACT2FN

from vlm_pg.models.linear_attention import NORM_EPSILON, LinearStates, per_value_head
from vlm_pg.models.policy import Policy

# Both rules compute in fp32 and differ in the order of sums of some hundred terms.
_TOLERANCE = 1e-4
RuleStep = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


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

    def mix(*operands: torch.Tensor) -> torch.Tensor:
        # transformers' own function: a fused kernel where one is installed, else its torch code.
        rule = getattr(mixer, "recurrent_gated_delta_rule", None)
        rule = rule or sys.modules[type(mixer).__module__].torch_recurrent_gated_delta_rule
        query, key, value, decay, beta = (x[:, None] for x in operands)
        named = {"g": decay, "beta": beta, "initial_state": states.recurrent, "output_final_state": True}
        core, recurrent = rule(query, key, value, **named, use_qk_l2norm_in_kernel=True)
        after.append(recurrent)
        return core[:, 0]

    return _layer(mixer, hidden, convolve, mix), LinearStates(*after)


def linear_attention_step_(mixer: Any, hidden: torch.Tensor, states: RowStates, rule_step_: RuleStep) -> torch.Tensor:
    """The same, with the states replaced in place: shapes and addresses stay, so a CUDA graph can hold this call.

    Args:
        rule_step_: replaces the recurrent states; see ``DeltaRule``.
    """

    def convolve(qkv: torch.Tensor) -> torch.Tensor:
        window = torch.cat([states.inputs, qkv[..., None]], dim=2)
        states.inputs.copy_(window[..., 1:])
        return _convolution(mixer, window)

    def mix(query: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return rule_step_(states.recurrent, query, *rest).to(query.dtype)

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
    # The modules in the order in which a tree calls them: ranks in lockstep may be on either path.
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


@dataclass(frozen=True)
class RowStates:
    """The states of a layer, replaced at every token, in place.

    ``inputs`` [R, C, W - 1]: last inputs of the convolution, oldest first. ``recurrent`` fp32 [R, Hv, dk, dv].
    """

    inputs: torch.Tensor
    recurrent: torch.Tensor


@dataclass(frozen=True)
class DeltaRule:
    """``step_`` as ``gated_delta_step_``; ``name``: "triton", or "torch" and why."""

    name: str
    step_: RuleStep


def rule_of(policy: Policy) -> DeltaRule:
    """For the linear-attention layers of a policy, on its device."""
    text = policy.model.config.get_text_config()
    return delta_rule_for(policy.device, text.linear_key_head_dim, text.linear_value_head_dim)


def triton_rule() -> DeltaRule:
    """The kernel, not compared: for work that is counted and not computed. Raises ImportError without Triton."""
    from vlm_pg.rollout.fused.delta_rule import gated_delta_step_

    return DeltaRule("triton", gated_delta_step_)


@cache
def delta_rule_for(device: torch.device, key_size: int, value_size: int) -> DeltaRule:
    """The Triton kernel, compiled for dk and dv, on CUDA where it agrees with torch operators on random numbers."""
    if device.type != "cuda":
        return DeltaRule("torch", gated_delta_step_)
    try:
        rule = triton_rule()
        problem = _difference(rule.step_, device, key_size, value_size)
    except Exception as error:  # anything a compiler or a driver raises
        problem = f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
    return DeltaRule(f"torch (Triton kernel: {problem})", gated_delta_step_) if problem else rule


def _difference(step_: RuleStep, device: torch.device, key_size: int, value_size: int) -> str | None:
    """By how much the rule differs from torch operators; None where it agrees."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    rows, heads = 3, 2
    query, key, value = (random(rows, heads, size) for size in (key_size, key_size, value_size))
    log_decay, beta = -random(rows, heads).exp(), random(rows, heads).sigmoid()
    state = random(rows, heads, key_size, value_size)
    states = [state, state.clone()]
    rules = (step_, gated_delta_step_)
    found = [one(state, query, key, value, log_decay, beta) for one, state in zip(rules, states, strict=True)]
    for got, expected in (states, found):
        error = float((got - expected).norm() / expected.norm())
        if not error < _TOLERANCE:
            return f"differs from torch's operators by {error:.1e}"
    return None


def gated_delta_step_(
    state: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
) -> torch.Tensor:
    """One token of transformers' ``torch_recurrent_gated_delta_rule``, with its norms, the state replaced in place.

    The rule (https://arxiv.org/abs/2412.06464), with state S [dk, dv], normed key k and query q [dk], value v [dv],
    0 < decay <= 1, 0 < beta < 1:

        S' = decay S + k delta^T        delta = beta (v - decay S^T k)        out = S'^T q

    Since S'^T q = decay S^T q + (q . k) delta, one matrix product reads S for key and query together.

    Args:
        state: fp32 [n, Hv, dk, dv], contiguous; replaced in place.
        query, key: [n, Hv, dk], any floating dtype.
        value: [n, Hv, dv].
        log_decay, beta: [n, Hv].

    Returns:
        fp32 [n, Hv, dv].
    """
    wide = (x.float() for x in (query, key))
    query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPSILON) for x in wide)
    query = query / query.shape[-1] ** 0.5
    decay, beta = log_decay.float().exp()[..., None], beta.float()[..., None]
    # The state is read once here, and read and written once by each of the two operators below.
    with torch.autocast(state.device.type, enabled=False):
        reads = torch.matmul(torch.stack([key, query], dim=-2), state) * decay[..., None]
    delta = (value.float() - reads[..., 0, :]) * beta
    state.mul_(decay[..., None])
    state.addcmul_(key[..., None], delta[..., None, :])
    return reads[..., 1, :] + (query * key).sum(-1, keepdim=True) * delta
