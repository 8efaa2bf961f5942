"""Response tokens of a pass, laid end to end ([R_total]), and the probability ratios of two policies on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vlm_pg.algorithms.settings import RatioLevel


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
    if any(length < 1 for length in lengths) or sum(lengths) != policy_logprobs.numel():
        raise ValueError(
            f"Response lengths are {list(lengths)}, for {policy_logprobs.numel()} tokens. Each must be at least 1 and "
            "their sum the number of tokens. Leave empty responses out."
        )
    difference = policy_logprobs - behaviour_logprobs.detach()
    if level == "sequence":
        # Neither direction adds with atomics on CUDA, so that gradients are the same in every run.
        counts = torch.tensor(lengths, dtype=torch.long)
        owners = torch.repeat_interleave(torch.arange(len(lengths)), counts).to(difference.device, non_blocking=True)
        counts = counts.to(difference.device, non_blocking=True)
        # unsafe: the lengths have been checked; checking them on the device would make the host wait for it.
        difference = torch.segment_reduce(difference, "mean", lengths=counts, unsafe=True)[owners]
    return difference.clamp(-clamp, clamp)


def importance_weights(
    trainer_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, cap: float, clamp: float = LOG_RATIO_CLAMP
) -> torch.Tensor:
    """Truncated importance weights min(p_trainer / p_rollout, cap) of tokens that another engine has sampled.

    They correct what generation and training compute differently with the same weights; the cap bounds their variance
    (truncated importance sampling, Ionides 2008).

    Args:
        trainer_logprobs: [R_total] log-probabilities as training computes them, under the weights that sampled.
        rollout_logprobs: [R_total] log-probabilities as generation recorded them.

    Returns:
        [R_total] factors without graph.
    """
    difference = trainer_logprobs.detach() - rollout_logprobs.detach()
    return difference.clamp(-clamp, clamp).exp().clamp(max=cap)
