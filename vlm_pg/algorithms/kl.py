"""Estimates of the KL divergence to the reference, token by token."""

from __future__ import annotations

from typing import get_args

import torch

from vlm_pg.algorithms.ratios import LOG_RATIO_CLAMP, require_same_length
from vlm_pg.algorithms.settings import AlgorithmSettings, KlEstimator
from vlm_pg.algorithms.tokens import ResponseTokens
from vlm_pg.metrics import KL_CHART, Metric

KL = Metric("kl", "nat per token", chart=KL_CHART)


def kl_penalty(
    policy_logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    estimator: KlEstimator,
    clamp: float = LOG_RATIO_CLAMP,
) -> torch.Tensor:
    """Per-token estimate of KL(policy || ref) with d = policy - ref (joschu.net/blog/kl-approx).

    ``k1``: d, unbiased, may be negative. ``k2``: d^2 / 2. ``k3``: exp(-d) - 1 + d, unbiased and never negative. Only
    k3 exponentiates: there d is held at -clamp from below, where exp(-d) would overflow, and such tokens have no
    gradient; upwards it is nearly linear and needs no bound.

    As a term of the loss k1 has the gradient of log p, whose expectation under the policy is 0: it does not hold the
    policy near the reference. It belongs into the reward.

    Args:
        policy_logprobs: [R_total], carries the graph.
        ref_logprobs: [R_total], no gradient flows into it.
        estimator: ``"k1"``, ``"k2"`` or ``"k3"``.
        clamp: the lower bound on d in k3 is minus this.

    Returns:
        [R_total] estimates in nats; see ``kl_term``.

    Raises:
        ValueError: the tensors are not one-dimensional and of one length, or ``estimator`` is unknown.
    """
    if estimator not in get_args(KlEstimator):
        raise ValueError(
            f"Unknown KL estimator {estimator!r}. Allowed are {', '.join(get_args(KlEstimator))}. "
            "Set algorithm.kl_estimator to one of them."
        )
    require_same_length(policy_logprobs=policy_logprobs, ref_logprobs=ref_logprobs)
    log_ratio = policy_logprobs - ref_logprobs.detach()
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    log_ratio = log_ratio.clamp(min=-clamp)
    return torch.expm1(-log_ratio) + log_ratio


def kl_term(tokens: ResponseTokens, settings: AlgorithmSettings) -> tuple[torch.Tensor, dict[Metric, torch.Tensor]]:
    """Term of the loss: kl_coef * sum(weights * kl_penalty(...)), and the sum of the estimates."""
    assert tokens.ref_logprobs is not None
    kl = kl_penalty(tokens.policy_logprobs, tokens.ref_logprobs, settings.kl_estimator, settings.log_ratio_clamp)
    return settings.kl_coef * (tokens.weights * kl).sum(), {KL: kl.detach().sum()}
