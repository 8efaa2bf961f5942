"""Which code replaces the states of linear-attention layers at a token: one Triton kernel, or torch's operators.

Not transformers' own: with the packages flash-linear-attention and causal-conv1d it calls kernels that return a new
state, which would have to be copied to where a recorded step reads it; without them it reads tensors of a state's size
seven times and writes five. What is chosen here is the same with these packages and without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from vlm_pg.models.policy import Policy
from vlm_pg.rollout import delta_step

RuleStep = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# Both compute in fp32 and differ in the order of sums of some hundred terms.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class DeltaRule:
    """``step_`` as ``delta_step.gated_delta_step_``; ``name``: "triton", or "torch" and why."""

    name: str
    step_: RuleStep


def rule_of(policy: Policy) -> DeltaRule:
    """For the linear-attention layers of a policy, where it is now."""
    text = policy.model.config.get_text_config()
    return delta_rule_for(policy.device, text.linear_key_head_dim, text.linear_value_head_dim)


def triton_rule() -> DeltaRule:
    """The kernel, without a comparison: for work that is counted and not computed.

    Raises:
        ImportError: no Triton.
    """
    from vlm_pg.rollout.delta_triton import gated_delta_step_

    return DeltaRule("triton", gated_delta_step_)


@cache
def delta_rule_for(device: torch.device, key_size: int, value_size: int) -> DeltaRule:
    """The Triton kernel on CUDA, where it agrees with torch's operators on random numbers; else these.

    Args:
        key_size, value_size: dk and dv, for which a kernel is compiled.
    """
    if device.type != "cuda":
        return DeltaRule("torch", delta_step.gated_delta_step_)
    try:
        rule = triton_rule()
        problem = _difference(rule.step_, device, key_size, value_size)
    except Exception as error:  # whatever a compiler and a driver come up with
        lines = str(error).splitlines()
        problem = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    if problem is None:
        return rule
    return DeltaRule(f"torch (Triton kernel: {problem})", delta_step.gated_delta_step_)


def _difference(step_: RuleStep, device: torch.device, key_size: int, value_size: int) -> str | None:
    """None if the rule gives what torch's operators give, else by how much it does not."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    rows, heads = 3, 2
    query, key, value = (random(rows, heads, size) for size in (key_size, key_size, value_size))
    log_decay, beta = -random(rows, heads).exp(), random(rows, heads).sigmoid()
    states = [random(rows, heads, key_size, value_size)]
    states.append(states[0].clone())
    rules = (step_, delta_step.gated_delta_step_)
    found = [one(state, query, key, value, log_decay, beta) for one, state in zip(rules, states, strict=True)]
    for got, expected in (states, found):
        error = float((got - expected).norm() / expected.norm())
        if not error < _TOLERANCE:
            return f"differs from torch's operators by {error:.1e}"
    return None
