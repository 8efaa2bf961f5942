"""The policy loss as a weighted sum over response tokens.

Shape letters: R_total response tokens of a batch, laid end to end. All log-probabilities are natural logarithms and
should be float32 or wider.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import torch

from vlm_pg.algorithms.ratios import LOG_RATIO_CLAMP, log_ratios, require_same_length
from vlm_pg.algorithms.settings import LossKind, RatioLevel
from vlm_pg.metrics import Chart, Metric

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


def policy_loss(
    policy_logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    *,
    lengths: Sequence[int],
    loss: LossKind,
    ratio_level: RatioLevel,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    log_ratio_clamp: float = LOG_RATIO_CLAMP,
    importance: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[Metric, torch.Tensor]]:
    """-sum(weights * importance * term) over all tokens, with the term of one token, r being its ratio:

    ``clip``: min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) (PPO, arXiv 1707.06347, equation 7; separate bounds
    as in DAPO, 2503.14476). With ``dual_clip`` c, where A < 0: max(that, c * A) (1912.09729).

    ``cispo``: clip(r, 1 - clip_low, 1 + clip_high) * A * policy_logprob, the clipped ratio without graph (MiniMax-M1,
    2506.13585, section 3.1). Clipping bounds what a token counts for and takes no token's gradient away.

    ``ratio_level`` says whose ratio r is, see ``log_ratios``. Log-ratios are held within +-log_ratio_clamp, which
    keeps exp finite; a held one has no gradient (none passes through it in ``cispo``).

    Args:
        policy_logprobs: [R_total] log-probability of each token under the policy being trained; carries the graph.
        behaviour_logprobs: [R_total] the same under the policy that sampled; no gradient flows into it.
        advantages: [R_total] advantage of each token.
        weights: [R_total] loss weight of each token, see ``response_token_weights``.
        lengths: tokens of each response, in order; they add up to R_total.
        loss: ``"clip"`` or ``"cispo"``.
        ratio_level: ``"token"`` or ``"sequence"``.
        clip_low: lower clip distance.
        clip_high: upper clip distance.
        dual_clip: the most that a ratio counts where the advantage is negative; None: no bound. Only with ``clip``.
        log_ratio_clamp: bound on the absolute log-ratio.
        importance: [R_total] factor of each token's term, see ``importance_weights``; no gradient flows into it.

    Returns:
        The scalar loss, and detached float32 scalars beside it, added up over the tokens: what a metric is the mean of,
        or its extreme. At either level of ratios ``behaviour_kl`` comes from each token's own.

    Raises:
        ValueError: shapes or lengths do not fit, ``loss`` or ``ratio_level`` is unknown, or ``cispo`` is given a
            ``dual_clip``.
    """
    _require_loss(loss, dual_clip)
    require_same_length(
        policy_logprobs=policy_logprobs,
        behaviour_logprobs=behaviour_logprobs,
        advantages=advantages,
        weights=weights,
        **({} if importance is None else {"importance": importance}),
    )
    ratio = log_ratios(policy_logprobs, behaviour_logprobs, lengths, ratio_level, log_ratio_clamp).exp()
    clipped_ratio = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    if loss == "cispo":
        terms = clipped_ratio.detach() * advantages * policy_logprobs
    else:
        terms = torch.minimum(ratio * advantages, clipped_ratio * advantages)
        if dual_clip is not None:
            terms = torch.where(advantages < 0, torch.maximum(terms, dual_clip * advantages), terms)
    if importance is not None:
        weights = weights * importance.detach()

    with torch.no_grad():
        low, high = ratio < 1.0 - clip_low, ratio > 1.0 + clip_high
        if loss == "cispo":
            low, high = low & (advantages != 0), high & (advantages != 0)
        else:
            low, high = low & (advantages < 0), high & (advantages > 0)
            if dual_clip is not None:
                high = high | ((ratio > dual_clip) & (advantages < 0))
        own_log_ratio = log_ratios(policy_logprobs, behaviour_logprobs, lengths, "token", log_ratio_clamp)
        metrics = {
            CLIP_LOW: low.sum().float(),
            CLIP_HIGH: high.sum().float(),
            BEHAVIOUR_KL: (torch.expm1(own_log_ratio) - own_log_ratio).sum().float(),
            **_ratio_metrics(ratio),
        }
    return -(weights * terms).sum(), metrics


def _ratio_metrics(ratio: torch.Tensor) -> dict[Metric, torch.Tensor]:
    def constant(value: float) -> torch.Tensor:
        return torch.full((), value, dtype=torch.float32, device=ratio.device)

    return {
        RATIO_MEAN: ratio.sum().float(),
        RATIO_MAX: ratio.max().float() if ratio.numel() else constant(0.0),
        RATIO_MIN: ratio.min().float() if ratio.numel() else constant(math.inf),
    }


def _require_loss(loss: LossKind, dual_clip: float | None) -> None:
    if loss not in get_args(LossKind):
        raise ValueError(
            f"Unknown loss {loss!r}. Allowed are {', '.join(get_args(LossKind))}. Set algorithm.loss to one of them."
        )
    if loss == "cispo" and dual_clip is not None:
        raise ValueError(
            f"dual_clip is {dual_clip} with the loss cispo, which bounds every ratio by clip_high. "
            "dual_clip is allowed with the loss clip. Leave algorithm.dual_clip out."
        )
