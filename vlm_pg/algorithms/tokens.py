"""Response tokens of a pass, laid end to end ([R_total]), and the probability ratios of two policies on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vlm_pg.algorithms.settings import AlgorithmSettings, RatioLevel
from vlm_pg.metrics import Chart, Metric

_BEYOND = Chart("Importance ratios beyond the bounds", 14, as_percent=True)
_EXTREMES = Chart("Extreme importance ratios", 15)
# Of the weights as the loss uses them. Effective sample size: (sum w)^2 / (n * sum w^2), 1 for equal weights.
IMPORTANCE = Metric("importance_mean", "factor of a token's term")
IMPORTANCE_SQUARE = Metric("importance_square", "squared factor of a token's term")
IMPORTANCE_ESS = Metric("importance_ess", "effective / all response tokens", "same")
# Of the tokens' ratios at ``importance_level``, before they are bounded.
IMPORTANCE_LOW = Metric("importance_low", "share of response tokens", chart=_BEYOND)
IMPORTANCE_HIGH = Metric("importance_high", "share of response tokens", chart=_BEYOND)
IMPORTANCE_MIN = Metric("importance_min", "trainer / rollout probability", "smallest", _EXTREMES)
IMPORTANCE_MAX = Metric("importance_max", "trainer / rollout probability", "largest", _EXTREMES)


@dataclass(frozen=True)
class ResponseTokens:
    """R_total response tokens of a pass. Log-probabilities are natural logarithms, float32 or wider.

    Only ``policy_logprobs`` and, with ``algorithm.entropy_coef`` above 0, ``entropies`` carry a graph.

    Attributes:
        policy_logprobs: [R_total] log-probability of each token under the policy being trained.
        behaviour_logprobs: [R_total] the same under the policy that sampled.
        advantages: [R_total] advantage of each token.
        weights: [R_total] loss weight of each token, see ``response_token_weights``.
        lengths: tokens of each response, in order; they add up to R_total.
        importance: [R_total] factor of each token's term, see ``importance_weights``; None: 1 for all.
        entropies: [R_total] entropy of what each token was drawn from, in nats.
        ref_logprobs: [R_total] log-probabilities under the reference, where the loss has a KL term.

    Raises:
        ValueError: the tensors are not one-dimensional and of one length.
    """

    policy_logprobs: torch.Tensor
    behaviour_logprobs: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    lengths: Sequence[int]
    importance: torch.Tensor | None = None
    entropies: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None

    def __post_init__(self) -> None:
        shapes = {name: list(value.shape) for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        if any(len(shape) != 1 or shape != shapes["policy_logprobs"] for shape in shapes.values()):
            described = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise ValueError(
                f"Shapes are {described}. All must be [R_total], one entry per response token. "
                "Repeat what belongs to a whole response for each of its tokens."
            )


LOG_RATIO_CLAMP = 20.0


def log_ratios(
    policy_logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    lengths: Sequence[int],
    level: RatioLevel,
    clamp: float = LOG_RATIO_CLAMP,
) -> torch.Tensor:
    """Log-ratio that each token counts with, held within +-clamp; one that is held has no gradient.

    ``token``: policy - behaviour. ``sequence``: its mean over the response, the same for all tokens of it: the log of
    the geometric mean of the ratios (GSPO, arXiv 2507.18071, equation 7). What is held is the mean, not its terms.

    Args:
        policy_logprobs: [R_total], carries the graph.
        behaviour_logprobs: [R_total], no gradient flows into it.
        lengths: tokens of each response, in order, each at least 1.

    Raises:
        ValueError: the lengths do not fit.
    """
    difference = policy_logprobs - behaviour_logprobs.detach()
    return _of_responses(difference, lengths, "mean" if level == "sequence" else None).clamp(-clamp, clamp)


@torch.no_grad()
def importance_weights(
    trainer_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, lengths: Sequence[int], settings: AlgorithmSettings
) -> tuple[torch.Tensor, dict[Metric, torch.Tensor]]:
    """Factors of the tokens' terms, which correct the mismatch of generation and training under the same weights.

    With d = trainer - rollout log-probability, ``importance_level`` selects the ratio r. ``token``: exp(d).
    ``sequence``: exp(sum of d over the response), the ratio of the whole responses' probabilities. ``geometric``:
    exp(mean of d), the geometric mean. The exponent is held within +-log_ratio_clamp: a sum as a whole.

    ``importance_mode`` makes the factor from it, with C = importance_cap and F = importance_floor (None: 0):

    - ``truncate``: max(F, min(r, C)). TIS: Ionides 2008; token: Yao et al. 2025, fengyao.notion.site/off-policy-rl.
      In TRL vllm_importance_sampling_mode token_truncate, sequence_truncate, with clip_max C and clip_min F. In verl
      rollout_is token, sequence, with rollout_is_threshold C; no floor.
    - ``mask``: r where F <= r <= C, else 0. MIS: token: IcePop, arXiv 2510.18855; sequence: Liu, Li et al. 2025,
      richardli.xyz/rl-collapse. In TRL token_mask, sequence_mask. In verl rollout_is_threshold "F_C".
    - ``reject``: 1 where F <= r <= C, else 0. In verl rollout_is null and rollout_rs token_k1, seq_sum_k1, seq_mean_k1
      (geometric), with rollout_rs_threshold "1/C_1/F", the bounds of 1/r. There rejected tokens leave the response
      mask, and with it the loss's denominator and KL term.

    Loss weights stay as they are, as in TRL: a token with factor 0 counts in the denominator.

    Args:
        trainer_logprobs: [R_total] log-probabilities as training computes them, under the weights that sampled.
        rollout_logprobs: [R_total] log-probabilities as generation recorded them.
        lengths: tokens of each response, in order, each at least 1.

    Returns:
        [R_total] factors without graph; sums over the tokens, and extremes.

    Raises:
        ValueError: the lengths do not fit.
    """
    cap, floor, mode = settings.importance_cap, settings.importance_floor or 0.0, settings.importance_mode
    assert cap is not None
    reduction = {"token": None, "sequence": "sum", "geometric": "mean"}[settings.importance_level]
    difference = _of_responses(trainer_logprobs - rollout_logprobs, lengths, reduction)
    ratio = difference.clamp(-settings.log_ratio_clamp, settings.log_ratio_clamp).exp()
    low, high = ratio < floor, ratio > cap
    if mode == "truncate":
        weights = ratio.clamp(floor, cap)
    else:
        weights = (ratio if mode == "mask" else torch.ones_like(ratio)).masked_fill(low | high, 0.0)
    return weights, {
        IMPORTANCE: weights.sum(),
        IMPORTANCE_SQUARE: weights.square().sum(),
        IMPORTANCE_LOW: low.sum(),
        IMPORTANCE_HIGH: high.sum(),
        IMPORTANCE_MIN: ratio.min(),
        IMPORTANCE_MAX: ratio.max(),
    }


def response_sums(values: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Sum of ``values`` [R_total] over each response, [responses]; without atomics on CUDA, in either direction."""
    counts = torch.tensor(lengths, dtype=torch.long).to(values.device, non_blocking=True)
    # unsafe: checking the lengths on the device would make the host wait for it.
    return torch.segment_reduce(values, "sum", lengths=counts, unsafe=True)


def _of_responses(values: torch.Tensor, lengths: Sequence[int], reduction: str | None) -> torch.Tensor:
    """[R_total] sum or mean of ``values`` over each token's response; None: ``values``."""
    if any(length < 1 for length in lengths) or sum(lengths) != values.numel():
        raise ValueError(
            f"Response lengths are {list(lengths)}, for {values.numel()} tokens. Each must be at least 1 and "
            "their sum the number of tokens. Leave empty responses out."
        )
    if reduction is None:
        return values
    # Neither direction adds with atomics on CUDA, so that gradients are the same in every run.
    counts = torch.tensor(lengths, dtype=torch.long)
    owners = torch.repeat_interleave(torch.arange(len(lengths)), counts).to(values.device, non_blocking=True)
    counts = counts.to(values.device, non_blocking=True)
    # unsafe: the lengths have been checked; checking them on the device would make the host wait for it.
    return torch.segment_reduce(values, reduction, lengths=counts, unsafe=True)[owners]
