"""Losses of the policy: the response tokens of a pass in, (loss, metrics) out; KL estimates and loss weights.

A loss is a sum over responses, with each token's weight of the whole optimizer batch, so that it does not matter which
of them are in a pass. Metrics are sums over the tokens, without graph: of what a metric is the mean of; or extremes.
Shape letters: R_total response tokens of a pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from vlm_pg.algorithms.settings import (
    AlgorithmSettings,
    DistillationSettings,
    KlEstimator,
    LossAverage,
    PreferenceSettings,
)
from vlm_pg.algorithms.tokens import LOG_RATIO_CLAMP, ResponseTokens, log_ratios, response_sums
from vlm_pg.metrics import DISTILLATION_CHART, KL_CHART, NLL_CHART, PREFERENCE_CHART, Chart, Metric

LossAndMetrics = tuple[torch.Tensor, dict[Metric, torch.Tensor]]
TokenLoss = Callable[[ResponseTokens], LossAndMetrics]

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
KL = Metric("kl", "nat per token", chart=KL_CHART)
DIVERGENCE = Metric("distillation/divergence", "nat per token", chart=DISTILLATION_CHART)
NLL = Metric("nll", "nat per token", chart=NLL_CHART)
# Means over the pairs of an update, as sums of weighted parts. Rewards: beta * log(policy / reference) of a response.
_IMPLICIT_REWARDS = Chart("Implicit rewards", 3)
PAIRS_RIGHT = Metric("preference/accuracy", "share of pairs", "sum", PREFERENCE_CHART, over_updates="mean")
MARGIN = Metric("preference/margin", "reward of chosen - rejected", "sum", _IMPLICIT_REWARDS, over_updates="mean")
CHOSEN_REWARD = Metric("preference/chosen", "reward of chosen", "sum", _IMPLICIT_REWARDS, over_updates="mean")
REJECTED_REWARD = Metric("preference/rejected", "reward of rejected", "sum", _IMPLICIT_REWARDS, over_updates="mean")


def clip(tokens: ResponseTokens, settings: AlgorithmSettings) -> LossAndMetrics:
    """min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) of each token (PPO, arXiv 1707.06347, equation 7; separate
    bounds as in DAPO, 2503.14476). With ``dual_clip`` c, where A < 0: max(that, c * A) (1912.09729).

    ``ratio_level`` selects the ratio r, see ``log_ratios``. Log-ratios are held within +-log_ratio_clamp, which
    keeps exp finite; a held one has no gradient.
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
    """
    ratio, clipped, low, high = _clipped(tokens, settings)
    terms = clipped.detach() * tokens.advantages * tokens.policy_logprobs
    counts = tokens.advantages != 0
    return weighted_sum(tokens, terms), _ratio_metrics(tokens, settings, ratio, low & counts, high & counts)


def nll(tokens: ResponseTokens, settings: AlgorithmSettings) -> LossAndMetrics:
    """-policy_logprob of each token: the cross-entropy of supervised training."""
    return weighted_sum(tokens, tokens.policy_logprobs), {NLL: -tokens.policy_logprobs.detach().sum()}


def preference(tokens: ResponseTokens, settings: PreferenceSettings) -> LossAndMetrics:
    """DPO of pairs: of h = log(policy / reference)(chosen) - log(policy / reference)(rejected) the mean over pairs.

    ``sigmoid``: -log sigmoid(beta * h) (DPO, arXiv 2305.18290, equation 7). ``ipo``: (h - 1 / (2 * beta))^2 with h of
    means over tokens (IPO, 2310.12036, equation 17, normalised by length as in its authors' experiments).

    Args:
        tokens: chosen and rejected response of each pair in turn, one weight for all; ``behaviour_logprobs`` are those
            of the reference.
    """
    differences = tokens.policy_logprobs - tokens.behaviour_logprobs.detach()
    sums = response_sums(differences, tokens.lengths)
    lengths = torch.tensor(tokens.lengths, dtype=torch.float32).to(sums.device, non_blocking=True)
    pairs = (sums / lengths if settings.loss == "ipo" else sums).view(-1, 2)
    weights = (response_sums(tokens.weights, tokens.lengths) / lengths).view(-1, 2).sum(1)
    margins = pairs[:, 0] - pairs[:, 1]
    if settings.loss == "ipo":
        losses = (margins - 1 / (2 * settings.beta)).square()
    else:
        losses = -torch.nn.functional.logsigmoid(settings.beta * margins)
    rewards = settings.beta * sums.detach().view(-1, 2)
    found = {
        PAIRS_RIGHT: (rewards[:, 0] > rewards[:, 1]).float(),
        MARGIN: rewards[:, 0] - rewards[:, 1],
        CHOSEN_REWARD: rewards[:, 0],
        REJECTED_REWARD: rewards[:, 1],
    }
    return (weights * losses).sum(), {metric: (weights * values).sum() for metric, values in found.items()}


def no_loss(tokens: ResponseTokens) -> LossAndMetrics:
    """Zero: training on a further term alone."""
    return tokens.policy_logprobs.sum() * 0.0, {}


def divergence_term(
    policy_logprobs: torch.Tensor, teacher_logprobs: torch.Tensor, weights: torch.Tensor, settings: DistillationSettings
) -> tuple[torch.Tensor, dict[Metric, torch.Tensor]]:
    """coef * sum(weights * divergence) of policy and teacher, and the sum of the divergences.

    Tokens beyond the teacher's k are one outcome, which exists where the k are not the whole vocabulary.

    Args:
        policy_logprobs: [R_total, k] of the teacher's tokens, carries the graph.
        teacher_logprobs: [R_total, k] of the same.
        weights: [R_total].
    """
    policy, teacher = policy_logprobs, teacher_logprobs.detach()
    if settings.top_k:
        policy, teacher = _with_rest(policy), _with_rest(teacher)
    if settings.divergence == "reverse_kl":
        values = _kl(policy, teacher)
    elif settings.divergence == "forward_kl":
        values = _kl(teacher, policy)
    else:
        of_teacher = settings.jsd_weight
        both = torch.logaddexp(teacher + math.log(of_teacher), policy + math.log(1 - of_teacher))
        values = of_teacher * _kl(teacher, both) + (1 - of_teacher) * _kl(policy, both)
    return settings.coef * (weights * values).sum(), {DIVERGENCE: values.detach().sum()}


def _with_rest(logprobs: torch.Tensor) -> torch.Tensor:
    """[n, k + 1]: the last is the logarithm of what the others leave, at least about 1e-7."""
    rest = torch.log1p(-logprobs.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-7))
    return torch.cat([logprobs, rest], -1)


def _kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """KL(first || second) of log-probabilities over the last dimension; an outcome of probability 0 adds none."""
    return torch.nn.functional.kl_div(second, first, reduction="none", log_target=True).sum(-1)


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


def kl_penalty(
    policy_logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: KlEstimator, clamp: float = LOG_RATIO_CLAMP
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

    Returns:
        [R_total] estimates in nats.
    """
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


def response_token_weights(
    lengths: Sequence[int],
    average: LossAverage,
    total_tokens: int,
    total_sequences: int,
    max_new_tokens: int,
    kept: Sequence[float] | None = None,
) -> list[float]:
    """Weight that each token of each response gets, fixed for the whole optimizer batch before micro-batches are cut.

    ``token_mean``: 1 / total_tokens (every token counts the same). ``sequence_mean``: 1 / (length * total_sequences)
    (every response counts the same). ``sequence_sum``: 1 / total_sequences. ``constant_length``: 1 / (max_new_tokens *
    total_sequences) (Dr. GRPO, arXiv 2503.20783: a token counts the same in long and in short responses, and from step
    to step). Summed over all tokens of the optimizer batch the first two give 1.

        lengths = [2, 3], totals 5 and 2, at most 10 tokens:
        token_mean -> [1/5, 1/5]   sequence_mean -> [1/4, 1/6]   sequence_sum -> [1/2, 1/2]
        constant_length -> [1/20, 1/20]

    The totals count what trains: the responses, on all ranks, whose ``kept`` is not 0. So a masked response is as if
    it had not been sampled, and of pruned ones the kept count for more. Where ``kept`` holds inverse probabilities of
    having been kept (``prune`` with correction), the totals count the dropped ones too: the inverse probabilities
    already make up for them.

    Args:
        lengths: response tokens of each sequence held here (this rank, this micro-batch), each at least 1.
        total_tokens, total_sequences: of the whole optimizer batch on all ranks.
        max_new_tokens: most tokens a response may have.
        kept: factor of each sequence, at least 0; 0 for one that does not train; None: 1 for all.

    Returns:
        One weight per sequence; 0.0 where ``kept`` is 0.

    Raises:
        ValueError: a length below 1, or totals smaller than what the sequences that train add up to.
    """
    factors = [1.0] * len(lengths) if kept is None else list(kept)
    if any(length < 1 for length in lengths):
        raise ValueError(
            f"Response lengths are {list(lengths)}. Each must be at least 1 token. Leave empty responses out."
        )
    training = [length for length, factor in zip(lengths, factors, strict=True) if factor > 0]
    if total_tokens < sum(training) or total_sequences < len(training):
        raise ValueError(
            f"Totals are {total_tokens} tokens and {total_sequences} sequences. They must cover at least the "
            f"{sum(training)} tokens and {len(training)} sequences given that train. Pass the totals of the whole "
            "optimizer batch, summed over all ranks."
        )
    divisors: dict[LossAverage, list[int]] = {
        "token_mean": [total_tokens] * len(lengths),
        "sequence_mean": [length * total_sequences for length in lengths],
        "sequence_sum": [total_sequences] * len(lengths),
        "constant_length": [max_new_tokens * total_sequences] * len(lengths),
    }
    return [factor / divisor if factor > 0 else 0.0 for factor, divisor in zip(factors, divisors[average], strict=True)]
