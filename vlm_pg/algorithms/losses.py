"""Losses of the policy: the response tokens of a pass in, (loss, metrics) out.

A loss is a sum over responses, with each token's weight of the whole optimizer batch, so that it does not matter which
of them are in a pass. Metrics are sums over the tokens, without graph: of what a metric is the mean of; or extremes.
Shape letters: R_total response tokens of a pass.
"""

from __future__ import annotations

import math

import torch

from vlm_pg.algorithms.ratios import log_ratios
from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.algorithms.tokens import ResponseTokens
from vlm_pg.metrics import Chart, Metric

LossAndMetrics = tuple[torch.Tensor, dict[Metric, torch.Tensor]]

_CLIPPED = Chart("Clipped tokens", 12, as_percent=True)
_EXTREMES = Chart("Extreme ratios", 13)
# Tokens whose gradient clipping removed, at the lower and at the upper bound or ``dual_clip`` (``cispo``: whose ratio
# counts as the bound).
CLIP_LOW = Metric("clip_low", "share of response tokens", chart=_CLIPPED)
CLIP_HIGH = Metric("clip_high", "share of response tokens", chart=_CLIPPED)
# Of the tokens' ratios before clipping.
RATIO_MEAN = Metric("ratio_mean", "policy / rollout probability")
RATIO_MAX = Metric("ratio_max", "policy / rollout probability", "largest", _EXTREMES)
RATIO_MIN = Metric("ratio_min", "policy / rollout probability", "smallest", _EXTREMES)
# k3 estimate of KL(behaviour || policy).
BEHAVIOUR_KL = Metric("behaviour_kl", "nat per token")


def clip(tokens: ResponseTokens, settings: AlgorithmSettings) -> LossAndMetrics:
    """min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) of each token (PPO, arXiv 1707.06347, equation 7; separate
    bounds as in DAPO, 2503.14476). With ``dual_clip`` c, where A < 0: max(that, c * A) (1912.09729).

    ``ratio_level`` says whose ratio r is, see ``log_ratios``. Log-ratios are held within +-log_ratio_clamp, which
    keeps exp finite; a held one has no gradient.

    Raises:
        ValueError: the lengths do not fit.
    """
    ratio, clipped, low, high = _clipped(tokens, settings)
    advantages, dual_clip = tokens.advantages, settings.dual_clip
    terms = torch.minimum(ratio * advantages, clipped * advantages)
    low, high = low & (advantages < 0), high & (advantages > 0)
    if dual_clip is not None:
        terms = torch.where(advantages < 0, torch.maximum(terms, dual_clip * advantages), terms)
        high = high | ((ratio > dual_clip) & (advantages < 0))
    return weighted_sum(tokens, terms), _ratio_metrics(tokens, settings, ratio, low, high)


def cispo(tokens: ResponseTokens, settings: AlgorithmSettings) -> LossAndMetrics:
    """clip(r, 1 - clip_low, 1 + clip_high) * A * policy_logprob of each token, the clipped ratio without graph
    (MiniMax-M1, arXiv 2506.13585, section 3.1). Clipping bounds what a token counts for and takes no token's gradient
    away; neither does holding its log-ratio.

    Raises:
        ValueError: the lengths do not fit.
    """
    ratio, clipped, low, high = _clipped(tokens, settings)
    terms = clipped.detach() * tokens.advantages * tokens.policy_logprobs
    counts = tokens.advantages != 0
    return weighted_sum(tokens, terms), _ratio_metrics(tokens, settings, ratio, low & counts, high & counts)


def entropy_bonus(tokens: ResponseTokens, settings: AlgorithmSettings) -> LossAndMetrics:
    """-entropy_coef * sum(weights * entropies)."""
    assert tokens.entropies is not None
    return -settings.entropy_coef * (tokens.weights * tokens.entropies).sum(), {}


def weighted_sum(tokens: ResponseTokens, terms: torch.Tensor) -> torch.Tensor:
    """-sum(weights * importance * terms): the loss of what each token is to gain, [R_total]."""
    weights = tokens.weights if tokens.importance is None else tokens.weights * tokens.importance.detach()
    return -(weights * terms).sum()


def _clipped(tokens: ResponseTokens, settings: AlgorithmSettings) -> tuple[torch.Tensor, ...]:
    """[R_total] each: ratio, clipped ratio, whether it is beyond the lower bound, and the upper one."""
    ratio = log_ratios(
        tokens.policy_logprobs,
        tokens.behaviour_logprobs,
        tokens.lengths,
        settings.ratio_level,
        settings.log_ratio_clamp,
    ).exp()
    lowest, highest = 1.0 - settings.clip_low, 1.0 + settings.clip_high
    return ratio, ratio.clamp(lowest, highest), ratio < lowest, ratio > highest


@torch.no_grad()
def _ratio_metrics(
    tokens: ResponseTokens, settings: AlgorithmSettings, ratio: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> dict[Metric, torch.Tensor]:
    """``low``, ``high``: which tokens count as clipped. At either level the KL comes from each token's own ratio."""
    own = log_ratios(
        tokens.policy_logprobs, tokens.behaviour_logprobs, tokens.lengths, "token", settings.log_ratio_clamp
    )
    some = ratio.numel() > 0
    return {
        CLIP_LOW: low.sum().float(),
        CLIP_HIGH: high.sum().float(),
        BEHAVIOUR_KL: (torch.expm1(own) - own).sum().float(),
        RATIO_MEAN: ratio.sum().float(),
        RATIO_MAX: ratio.max().float() if some else ratio.new_zeros((), dtype=torch.float32),
        RATIO_MIN: ratio.min().float() if some else ratio.new_full((), math.inf, dtype=torch.float32),
    }
