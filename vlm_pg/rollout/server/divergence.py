"""How far a server's weights lie from the trainer's, by the log-probabilities it says it sampled with.

Servers differ in whether those are of the logits as they are or divided by the temperature. Where the two differ, the
nearer reading counts: other weights are far from both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# The range of exp(d): one token of two models that disagree would otherwise decide everything.
LOG_RATIO_CLAMP = 20.0
# Rounding stays below, in bf16 too; see ``HEALTHY`` of training.
HEALTHY_KL = 0.01
# vLLM writes no number below; it stands for one that is not known.
UNKNOWN_LOGPROB = -9999.0
# Fewer tokens say little: the estimate has the spread of a mean.
ENOUGH_TOKENS = 64


@dataclass(frozen=True)
class Divergence:
    """Sums over sampled tokens of d = trainer - server, nats: ``kl`` of exp(d) - 1 - d (the k3 estimate of
    KL(server || trainer), joschu.net/blog/kl-approx), and the ``largest`` |d|."""

    tokens: int = 0
    kl: float = 0.0
    largest: float = 0.0

    def __add__(self, other: Divergence) -> Divergence:
        return Divergence(self.tokens + other.tokens, self.kl + other.kl, max(self.largest, other.largest))

    @property
    def mean(self) -> float:
        """KL a token; 0 where nothing was compared."""
        return self.kl / self.tokens if self.tokens else 0.0


def divergence(said: Sequence[tuple[float, ...] | None], scored: Sequence[torch.Tensor]) -> Divergence:
    """Of responses for which the server has said its log-probabilities; tokens at ``UNKNOWN_LOGPROB`` are left out.

    Args:
        said: of the first tokens of each response; None: not known.
        scored: fp32 [R] of each response, under the trainer's weights.
    """
    pairs = [(values, ours[: len(values)]) for values, ours in zip(said, scored, strict=True) if values]
    if not pairs:
        return Divergence()
    server = torch.cat([torch.tensor(values, dtype=torch.float64) for values, _ in pairs])
    known = server > UNKNOWN_LOGPROB
    if not known.any():
        return Divergence()
    difference = (torch.cat([ours.double() for _, ours in pairs]) - server)[known]
    held = difference.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return Divergence(len(difference), float((torch.expm1(held) - held).sum()), float(difference.abs().max()))
