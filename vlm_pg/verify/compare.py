"""How far two ways of computing log-probabilities and gradients lie apart, and how far they may.

**fp32.** Both sides add up the same products in another order. Every addition rounds by 6e-8 of its result; over the
layers of a large model that grows to some 1e-5, and to 1e-4 behind a softmax that is nearly certain. Allowed are 1e-3:
above what rounding does, far below what a wrong kernel does (a dropped log-sum-exp term in the backward of a merge puts
the gradients of keys off by 7e-2 and those of queries by 5e-1).

**bf16.** Both sides are compared with the repeated forward in fp32. bf16 has an error of its own there, whoever
computes; where sharing is exact its error is another draw of the same kind. Allowed is twice the error of the repeated
forward, and for single parameters, of which some are small and whose errors scatter more, 0.02 beyond that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

FP32_NATS = 1e-3
FP32_GRADIENT = 1e-3
BF16_TIMES = 2.0
BF16_PARAMETER_MARGIN = 0.02
# A gradient that is rounding itself (of key biases, say, which cancel in the softmax) is measured by the largest one.
SMALLEST_SHARE = 1e-3


@dataclass(frozen=True)
class Values:
    """``logprobs`` fp32 [R] of each response; ``gradients`` fp32 of each trained parameter, on the CPU."""

    logprobs: Sequence[torch.Tensor]
    gradients: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Errors:
    """Log-probabilities in nats; gradients relative to the reference's norm, of all parameters as one and of each."""

    logprob_max: float
    logprob_rms: float
    gradient: float
    by_parameter: Mapping[str, float]

    @property
    def worst(self) -> tuple[str, float]:
        """The parameter whose gradient is farthest off; one that is not a number before all others."""
        return max(self.by_parameter.items(), key=lambda item: (item[1] != item[1], item[1]))


def errors(found: Values, reference: Values) -> Errors:
    """How far ``found`` is from ``reference``."""
    apart = torch.cat([mine - other for mine, other in zip(found.logprobs, reference.logprobs, strict=True)]).double()
    norms = {name: float(gradient.double().norm()) for name, gradient in reference.gradients.items()}
    floor = max(SMALLEST_SHARE * max(norms.values()), 1e-30)
    distances = {
        name: float((found.gradients[name] - gradient).double().norm())
        for name, gradient in reference.gradients.items()
    }
    return Errors(
        float(apart.abs().max()),
        float(apart.square().mean().sqrt()),
        _length(distances.values()) / max(_length(norms.values()), floor),
        {name: distance / max(norms[name], floor) for name, distance in distances.items()},
    )


def too_far_in_fp32(shared: Errors) -> Iterator[str]:
    """What is beyond rounding, in words; nothing where sharing is exact."""
    if not shared.logprob_max <= FP32_NATS:
        yield f"log-probabilities differ by up to {shared.logprob_max:.1e} nats in fp32; allowed are {FP32_NATS:.0e}"
    name, error = shared.worst
    if not error <= FP32_GRADIENT:
        yield (
            f"the gradient of {name} is off by {error:.1e} of its norm in fp32, more than any other; allowed are "
            f"{FP32_GRADIENT:.0e}"
        )


def too_far_in_bf16(shared: Errors, repeated: Errors) -> Iterator[str]:
    """What is beyond the error that bf16 has anyway, in words."""
    if not shared.logprob_rms <= BF16_TIMES * repeated.logprob_rms:
        yield (
            f"log-probabilities in bf16 are {shared.logprob_rms:.1e} nats (rms) from fp32, repeated ones "
            f"{repeated.logprob_rms:.1e}; allowed is {BF16_TIMES:g} times that"
        )
    if not shared.gradient <= BF16_TIMES * repeated.gradient:
        yield (
            f"the gradient in bf16 is off by {shared.gradient:.1e} of its norm, the repeated one by "
            f"{repeated.gradient:.1e}; allowed is {BF16_TIMES:g} times that"
        )
    beyond = {name: error - BF16_TIMES * repeated.by_parameter[name] for name, error in shared.by_parameter.items()}
    name = max(beyond, key=lambda one: (beyond[one] != beyond[one], beyond[one]))
    if not beyond[name] <= BF16_PARAMETER_MARGIN:
        yield (
            f"the gradient of {name} in bf16 is off by {shared.by_parameter[name]:.1e} of its norm, the repeated one "
            f"by {repeated.by_parameter[name]:.1e}; allowed is {BF16_TIMES:g} times that and {BF16_PARAMETER_MARGIN:g}"
        )


def _length(values: Iterable[float]) -> float:
    return float(torch.tensor(list(values), dtype=torch.float64).norm())
