"""Whether a decode step runs on fused kernels: on a GPU, where they give what they stand in for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn import functional as F

from vlm_pg.models.layer_globals import layer_global
from vlm_pg.models.policy import Policy
from vlm_pg.models.scattered import is_scattered
from vlm_pg.rollout.sampling import policy_statistics
from vlm_pg.rollout.settings import RolloutSettings

# Mean error beside the mean size. Sums in another order move one bf16 number in some thousands to its neighbour; where
# something is rounded elsewhere, every third one moves, which is 1e-3.
_TOLERANCE = {torch.bfloat16: 1e-4, torch.float16: 2e-5}
_WIDE_TOLERANCE = 1e-5


# Of each language model, by device and dtype: what does not agree, or None.
_PROBLEMS: WeakKeyDictionary[torch.nn.Module, dict[tuple[torch.device, torch.dtype], str | None]] = WeakKeyDictionary()


@dataclass(frozen=True)
class FusedStep:
    """How small operations of a step run.

    ``name``: "triton", or "torch" and why. ``kernels``: by a kernel attention's parts are merged, and log-probabilities
    found. ``layers``: what the language model's layers run in.
    """

    name: str
    kernels: bool = False
    layers: AbstractContextManager[None] = field(default_factory=nullcontext)


def fused_step(policy: Policy, settings: RolloutSettings) -> FusedStep:
    """For the language model of a policy, where it is now."""
    because = _off_because(policy, settings)
    return FusedStep(f"torch ({because})") if because else fused_unchecked(policy)


def fused_unchecked(policy: Policy) -> FusedStep:
    """Without a comparison: for work that is counted and not computed."""
    if policy.settings.liger:
        # Its operators are one kernel each as well, and what an update's passes run on.
        return FusedStep("triton, in layers liger-kernel's", True)
    from vlm_pg.rollout.fused.layers import FusedLayers

    return FusedStep("triton", True, FusedLayers(policy.language_model))


def _off_because(policy: Policy, settings: RolloutSettings) -> str | None:
    if not settings.fused_kernels:
        return "rollout.fused_kernels is false"
    if policy.device.type != "cuda":
        return f"the model is on {policy.device.type}"
    # Their weights are there while a module is called, and cannot be compared with anything before.
    if policy.turns is not None or is_scattered(policy.language_model):
        return "weights are scattered over ranks"
    known = _PROBLEMS.setdefault(policy.language_model, {})
    place = (policy.device, policy.dtype)
    if place not in known:
        known[place] = _problem(policy)
    return known[place]


def _problem(policy: Policy) -> str | None:
    try:
        return _difference(policy.language_model, policy.device, policy.dtype, not policy.settings.liger)
    except Exception as error:  # whatever a compiler and a driver come up with
        lines = str(error).splitlines()
        return f"Triton kernels: {type(error).__name__}: {lines[0] if lines else 'no message'}"


@torch.no_grad()
def _difference(
    language_model: torch.nn.Module, device: torch.device, dtype: torch.dtype, with_layers: bool = True
) -> str | None:
    """None if all kernels give what a module of each kind gives on random numbers, else which does not, and how."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    for name, got, expected in _pairs(language_model if with_layers else torch.nn.Module(), random):
        error = float((got.float() - expected.float()).abs().sum() / expected.float().abs().sum())
        if got.dtype != expected.dtype or not error < _TOLERANCE.get(expected.dtype, _WIDE_TOLERANCE):
            return f"Triton kernels: {name} differs by {error:.1e}"
    return None


def _pairs(language_model: torch.nn.Module, random: Any) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, by a kernel, by what it stands in for), one for each kind and size."""
    from vlm_pg.rollout.fused import layers
    from vlm_pg.rollout.fused.gate import silu_mul
    from vlm_pg.rollout.fused.parts import merge_parts
    from vlm_pg.rollout.fused.statistics import token_statistics

    seen: set[Any] = set()
    for module in language_model.modules():
        found: Any = module
        if layers.is_norm(module):
            width = found.weight.shape[0]
            kind: tuple[Any, ...] = (type(module), width)
        elif layers.is_gated(module) or layers.rotates(module):
            kind = (type(module),)
        else:
            continue
        if kind in seen:
            continue
        seen.add(kind)
        if layers.is_norm(module):
            x = random(1, 64, width)
            yield type(module).__name__, layers.norm_of(module)(x), module(x)
        elif layers.is_gated(module):
            gate, up = random(1, 64, 256), random(1, 64, 256)
            yield type(module).__name__, silu_mul(gate, up), layers.product_of(found, gate, up)
        else:
            yield from _rotations(found, random)
    yield "merging", *_merged(merge_parts, random)
    logits, tokens = 4 * random(3, 5000), torch.tensor([0, 17, 4999]).to(random(1).device)
    found, expected = token_statistics(logits, 0.7, tokens), policy_statistics(logits, 0.7, tokens)
    yield from zip(("log-probabilities", "entropies"), found, expected, strict=True)


def _rotations(attention: Any, random: Any) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    from vlm_pg.rollout.fused import layers

    text = attention.config
    rope = getattr(text, "rope_parameters", None) or {}
    turned = int(attention.head_dim * rope.get("partial_rotary_factor", 1.0))
    q, k = (random(1, 9, heads, attention.head_dim).transpose(1, 2) for heads in (4, 2))
    # As they come: both halves alike.
    cos, sin = (random(1, 9, turned // 2).repeat(1, 1, 2) for _ in range(2))
    expected = layer_global(attention, layers.ROTATION)(q, k, cos, sin)
    got = layers.rotation_of(attention)(q, k, cos, sin)
    for part, one, other in zip(("queries", "keys"), got, expected, strict=True):
        yield f"rotation of {part}", one, other


def _merged(merge_parts: Any, random: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Three rows of two heads over their own tokens and five pieces, against all six weighted by a softmax."""
    rows, heads, pieces = 3, 2, 5
    own, own_lse = random(rows, heads, 128), random(heads, rows).float()
    parts, parts_lse = random(pieces * rows * heads, 1, 128), random(1, pieces * rows * heads).float()
    places = torch.arange(0, pieces * rows * heads, heads, dtype=torch.int32, device=own.device).view(pieces, rows)
    got, _ = merge_parts(own, own_lse, parts, parts_lse, places, own.dtype)
    shares = F.softmax(torch.cat([own_lse.t()[None], parts_lse.view(pieces, rows, heads)]), dim=0)
    every = torch.cat([own[None], parts.view(pieces, rows, heads, 128)]).float()
    return got, (shares[..., None] * every).sum(0).to(own.dtype)
