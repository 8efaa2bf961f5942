"""Whether a decode step runs on fused kernels: on a GPU, where they give what they stand in for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn import functional as F

from vlm_pg.models.kernel_trials import Trial, faults, kinds, product_of
from vlm_pg.models.layer_globals import layer_global
from vlm_pg.models.liger import liger_of, without_liger
from vlm_pg.models.policy import Policy
from vlm_pg.models.scattered import is_scattered
from vlm_pg.rollout.sampling import policy_statistics
from vlm_pg.rollout.settings import RolloutSettings

# Of each language model, by device and dtype: the kernels that are not used, and why.
_REFUSED: WeakKeyDictionary[torch.nn.Module, dict[tuple[torch.device, torch.dtype], dict[str, str]]] = (
    WeakKeyDictionary()
)
NORMS, GATES, ROTATION, MERGING, STATISTICS = "norms", "gates", "rotary positions", "merging", "log-probabilities"
KERNELS = (NORMS, GATES, ROTATION, MERGING, STATISTICS)
# With the parts of ``Liger`` that they stand in for, too.
_OF_LAYERS = {NORMS: {"rms_norm", "rms_norm_around_one"}, GATES: {"swiglu"}, ROTATION: {"rope"}}


@dataclass(frozen=True)
class FusedStep:
    """How small operations of a step run.

    Attributes:
        name: "triton", with what torch does instead and why; or "torch" and why.
        merges: attention's parts are merged by one kernel.
        statistics: log-probabilities and entropies are found by one kernel.
        layers: what the language model's layers run in.
    """

    name: str
    merges: bool = False
    statistics: bool = False
    layers: AbstractContextManager[None] = field(default_factory=nullcontext)


def fused_step(policy: Policy, settings: RolloutSettings) -> FusedStep:
    """For the language model of a policy, where it is now."""
    because = _off_because(policy, settings)
    return FusedStep(f"torch ({because})") if because else fused_unchecked(policy, _refused(policy))


def fused_unchecked(policy: Policy, refused: Mapping[str, str] = MappingProxyType({})) -> FusedStep:
    """Every kernel but those ``refused``, by name and why; with none for work that is counted and not computed."""
    ligers = liger_of(policy.model).parts
    others = {name: "liger-kernel" for name, parts in _OF_LAYERS.items() if parts & set(ligers)}
    words = "; ".join(f"{name} by {others.get(name, 'torch')}: {refused[name]}" for name in KERNELS if name in refused)
    if all(name in refused for name in KERNELS):
        return FusedStep(f"torch ({words})")
    from vlm_pg.rollout.fused.layers import FusedLayers
    from vlm_pg.rollout.fused.packed import packed_linears

    words = "; ".join(filter(None, (words, packed_linears(policy.language_model)[1])))
    layers = FusedLayers(policy.language_model, [name for name in _OF_LAYERS if name not in refused])
    name = f"triton ({words})" if words else "triton"
    return FusedStep(name, MERGING not in refused, STATISTICS not in refused, layers)


def prefill_layers(policy: Policy, settings: RolloutSettings) -> AbstractContextManager[None]:
    """What the language model's layers run in while prompts are prefilled: norms and gates as one kernel each, where
    decode steps have these too (``fused_step``); else the modules as they are."""
    if policy.settings.liger or _off_because(policy, settings):
        return nullcontext()
    return prefill_unchecked(policy, _refused(policy))


def prefill_unchecked(policy: Policy, refused: Collection[str] = ()) -> AbstractContextManager[None]:
    """As ``prefill_layers``, whatever the device; what a context has a part in (rotary positions) stays torch's."""
    from vlm_pg.rollout.fused.layers import FusedLayers

    return FusedLayers(policy.language_model, [name for name in (NORMS, GATES) if name not in refused])


def _off_because(policy: Policy, settings: RolloutSettings) -> str | None:
    if not settings.fused_kernels:
        return "rollout.fused_kernels is false"
    if policy.device.type != "cuda":
        return f"the model is on {policy.device.type}"
    # Their weights are there while a module is called, and cannot be compared with anything before.
    if policy.turns is not None or is_scattered(policy.language_model):
        return "weights are scattered over ranks"
    return None


def _refused(policy: Policy) -> dict[str, str]:
    known = _REFUSED.setdefault(policy.language_model, {})
    place = (policy.device, policy.dtype)
    if place not in known:
        known[place] = judged(policy.language_model, policy.device, policy.dtype)
    return known[place]


@torch.no_grad()
def judged(language_model: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """The kernels that are further from the truth than what they stand in for, and by how much; {} where none is.

    Each is judged alone, on random numbers for every kind and size of module.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    return faults({kernel: partial(_TRIALS[kernel], language_model, random) for kernel in KERNELS})


def _norms(language_model: torch.nn.Module, random: Any) -> Iterator[Trial]:
    from vlm_pg.rollout.fused import layers

    for module in kinds(language_model, layers.is_norm):
        x, usual = random(1, 64, module.weight.shape[0]), without_liger(module)
        truth = torch.func.functional_call(usual, {"weight": module.weight.double()}, (x.double(),))
        yield Trial(type(module).__name__, layers.norm_of(module)(x), usual(x), truth)


def _gates(language_model: torch.nn.Module, random: Any) -> Iterator[Trial]:
    from vlm_pg.rollout.fused import gate as fused
    from vlm_pg.rollout.fused import layers

    for module in kinds(language_model, layers.is_gated):
        gate, up = random(1, 64, 512).chunk(2, -1)  # as a packed product has them
        truth = product_of(module, gate.double(), up.double())
        yield Trial(type(module).__name__, fused.silu_mul(gate, up), product_of(module, gate, up), truth)


def _rotations(language_model: torch.nn.Module, random: Any) -> Iterator[Trial]:
    from vlm_pg.rollout.fused import layers

    for attention in kinds(language_model, layers.rotates):
        rope = getattr(attention.config, "rope_parameters", None) or {}
        turned = int(attention.head_dim * rope.get("partial_rotary_factor", 1.0))
        q, k = (random(1, 9, heads, attention.head_dim).transpose(1, 2) for heads in (4, 2))
        # As they come: both halves alike.
        cos, sin = (random(1, 9, turned // 2).repeat(1, 1, 2) for _ in range(2))
        usual = layer_global(without_liger(attention), layers.ROTATION)
        results = (
            layers.rotation_of(attention)(q, k, cos, sin),
            usual(q, k, cos, sin),
            usual(*(x.double() for x in (q, k, cos, sin))),
        )
        for name, *parts in zip(("queries", "keys"), *results, strict=True):
            yield Trial(name, *parts)


def _merges(_: torch.nn.Module, random: Any) -> Iterator[Trial]:
    """Three rows of two heads over their own tokens and five pieces, against all six weighted by a softmax."""
    from vlm_pg.rollout.fused import parts as fused

    rows, heads, pieces = 3, 2, 5
    own, own_lse = random(rows, heads, 128), random(heads, rows).float()
    parts, parts_lse = random(pieces * rows * heads, 1, 128), random(1, pieces * rows * heads).float()
    places = torch.arange(0, pieces * rows * heads, heads, dtype=torch.int32, device=own.device).view(pieces, rows)
    got, _lse = fused.merge_parts(own, own_lse, parts, parts_lse, places, own.dtype)
    lse = torch.cat([own_lse.t()[None], parts_lse.view(pieces, rows, heads)])
    every = torch.cat([own[None], parts.view(pieces, rows, heads, 128)])
    usual = (F.softmax(lse, dim=0)[..., None] * every.float()).sum(0).to(own.dtype)
    yield Trial("merging", got, usual, (F.softmax(lse.double(), dim=0)[..., None] * every.double()).sum(0))


def _statistics(_: torch.nn.Module, random: Any) -> Iterator[Trial]:
    from vlm_pg.models import fused_logits as fused

    logits, temperature = 4 * random(3, 5000), 0.7
    tokens = torch.tensor([0, 17, 4999]).to(logits.device)
    log_shares = (logits.double() / temperature).log_softmax(-1)
    truth = (log_shares.gather(-1, tokens[:, None])[:, 0], -(log_shares.exp() * log_shares).sum(-1))
    found = fused.token_statistics(logits, temperature, tokens)
    usual = policy_statistics(logits, temperature, tokens)
    for name, *results in zip(("log-probabilities", "entropies"), found, usual, truth, strict=True):
        yield Trial(name, *results)


_TRIALS: dict[str, Callable[[torch.nn.Module, Any], Iterator[Trial]]] = {
    NORMS: _norms,
    GATES: _gates,
    ROTATION: _rotations,
    MERGING: _merges,
    STATISTICS: _statistics,
}
