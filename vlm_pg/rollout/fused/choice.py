"""Which fused kernels a decode step and a prefill run on: on a GPU, those no less accurate than what they replace."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from vlm_pg.models.kernel_trials import Trial, faults
from vlm_pg.models.liger import liger_of
from vlm_pg.models.policy import Policy
from vlm_pg.models.weights import is_sharded
from vlm_pg.rollout.fused import DRAWING, GATES, KERNELS, MERGING, NORMS, OWN, ROTATION, STATISTICS, SUMS
from vlm_pg.rollout.settings import RolloutSettings

if TYPE_CHECKING:
    from vlm_pg.rollout.fused.layers import DeferredRotation

# Of each language model, by device and dtype: the kernels that are not used, and why.
_Refused = dict[tuple[torch.device, torch.dtype], dict[str, str]]
_REFUSED: WeakKeyDictionary[torch.nn.Module, _Refused] = WeakKeyDictionary()
# With the parts of ``Liger`` that they replace, too.
_OF_LAYERS = {NORMS: {"rms_norm", "rms_norm_around_one"}, SUMS: set[str](), GATES: {"swiglu"}, ROTATION: {"rope"}}


@dataclass(frozen=True)
class FusedStep:
    """The implementation of a step's small operations.

    Attributes:
        name: "triton", with what torch does instead and why; or "torch" and why.
        merges: attention's parts are merged by one kernel.
        attends: attention over rows' own tokens is one kernel, whose parts are merged with the others.
        draws: tokens are drawn by two kernels.
        statistics: log-probabilities and entropies are found by one kernel.
        layers: context that the language model's layers run in.
    """

    name: str
    merges: bool = False
    attends: bool = False
    draws: bool = False
    statistics: bool = False
    layers: AbstractContextManager[None] = field(default_factory=nullcontext)

    @property
    def deferred(self) -> DeferredRotation | None:
        """``layers`` for a context that applies rotary positions itself; None where no kernel does."""
        return getattr(self.layers, "deferred", None)


def fused_step(policy: Policy, settings: RolloutSettings) -> FusedStep:
    """For the language model of a policy, on its device."""
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
    taken = {"merges": MERGING, "attends": OWN, "draws": DRAWING, "statistics": STATISTICS}
    return FusedStep(name, layers=layers, **{field: kernel not in refused for field, kernel in taken.items()})


def prefill_layers(policy: Policy, settings: RolloutSettings) -> AbstractContextManager[None]:
    """Context of the language model's layers during prefill: norms and gates as one kernel each, where decode steps
    have these too (``fused_step``); else the plain modules."""
    if _off_because(policy, settings):
        return nullcontext()
    return prefill_unchecked(policy, _refused(policy))


def prefill_unchecked(policy: Policy, refused: Collection[str] = ()) -> AbstractContextManager[None]:
    """As ``prefill_layers``, whatever the device; rotary positions, which a context applies, stay torch's."""
    from vlm_pg.rollout.fused.layers import FusedLayers

    return FusedLayers(policy.language_model, [name for name in (NORMS, GATES) if name not in refused])


def _off_because(policy: Policy, settings: RolloutSettings) -> str | None:
    if not settings.fused_kernels:
        return "rollout.fused_kernels is false"
    if policy.device.type != "cuda":
        return f"the model is on {policy.device.type}"
    # Their weights exist during a module's call only, so nothing can be compared beforehand.
    if policy.lockstep is not None or is_sharded(policy.language_model):
        return "weights are scattered over ranks"
    return None


def _refused(policy: Policy) -> dict[str, str]:
    known = _REFUSED.setdefault(policy.language_model, {})
    key = (policy.device, policy.dtype)
    if key not in known:
        known[key] = judged(policy.language_model, *key)
    return known[key]


@torch.no_grad()
def judged(language_model: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """The kernels that are further from float64 than what they replace, and by how much; {} where none is.

    Each is judged alone, on random numbers for every kind and size of module.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    def trials(kernel: str) -> Iterator[Trial]:
        from vlm_pg.rollout.fused.trials import TRIALS  # needs Triton

        yield from TRIALS[kernel](language_model, random)

    refused = faults({kernel: partial(trials, kernel) for kernel in KERNELS})
    # Norms take what sums leave for them; own tokens come in parts.
    for kernel, needed in ((SUMS, NORMS), (OWN, MERGING)):
        if needed in refused:
            refused.setdefault(kernel, f"with {needed}")
    return refused
