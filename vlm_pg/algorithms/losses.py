"""The clipped policy loss and the KL term, as weighted sums over response tokens.

Shape letters: R_total response tokens of a batch, laid end to end. All log-probabilities are natural logarithms and
should be float32 or wider.
"""

from __future__ import annotations

import torch

LOG_RATIO_CLAMP = 20.0


def policy_loss(
    policy_logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    log_ratio_clamp: float = LOG_RATIO_CLAMP,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped surrogate loss (PPO, arXiv 1707.06347, equation 7; separate bounds as in DAPO, 2503.14476).

        ratio = exp(clamp(policy - behaviour, +-log_ratio_clamp))
        loss  = -sum(weights * min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A))

    The clamp keeps exp finite; beyond it the ratio is constant and the token has no gradient.

    Args:
        policy_logprobs: [R_total] log-probability of each token under the policy being trained; carries the graph.
        behaviour_logprobs: [R_total] the same under the policy that sampled; no gradient flows into it.
        advantages: [R_total] advantage of the response each token belongs to.
        weights: [R_total] loss weight of each token, see ``response_token_weights``.
        clip_low: lower clip distance.
        clip_high: upper clip distance.
        log_ratio_clamp: bound on the absolute log-ratio.

    Returns:
        The scalar loss, and detached float32 scalars beside it. To combine micro-batches add all of them up, except
        ``ratio_max``, of which the largest counts: ``tokens``; ``clipped_low`` and ``clipped_high`` (tokens whose
        gradient the clip removed); ``ratio_sum``; ``ratio_max``; ``behaviour_kl_sum`` (k3 estimate of
        KL(behaviour || policy), in nats).

    Raises:
        ValueError: the tensors are not one-dimensional and of one length.
    """
    _require_same_length(
        policy_logprobs=policy_logprobs, behaviour_logprobs=behaviour_logprobs, advantages=advantages, weights=weights
    )
    log_ratio = (policy_logprobs - behaviour_logprobs.detach()).clamp(-log_ratio_clamp, log_ratio_clamp)
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -(weights * torch.minimum(ratio * advantages, clipped_ratio * advantages)).sum()

    with torch.no_grad():
        metrics = {
            "tokens": torch.tensor(float(ratio.numel()), device=ratio.device),
            "clipped_low": ((ratio < 1.0 - clip_low) & (advantages < 0)).sum().float(),
            "clipped_high": ((ratio > 1.0 + clip_high) & (advantages > 0)).sum().float(),
            "ratio_sum": ratio.sum().float(),
            "ratio_max": ratio.max().float() if ratio.numel() else torch.zeros((), device=ratio.device),
            "behaviour_kl_sum": (torch.expm1(log_ratio) - log_ratio).sum().float(),
        }
    return loss, metrics


def kl_k3(
    policy_logprobs: torch.Tensor, ref_logprobs: torch.Tensor, *, log_ratio_clamp: float = LOG_RATIO_CLAMP
) -> torch.Tensor:
    """Per-token estimate of KL(policy || ref): exp(-d) - 1 + d with d = policy - ref (k3, joschu.net/blog/kl-approx).

    Never negative, and 0 only where the two agree. d is held at -log_ratio_clamp from below, where exp(-d) would
    overflow; such tokens have no gradient. Upwards the formula is nearly linear and needs no bound.

    Args:
        policy_logprobs: [R_total], carries the graph.
        ref_logprobs: [R_total], no gradient flows into it.
        log_ratio_clamp: the lower bound on d is minus this.

    Returns:
        [R_total] estimates in nats; the KL term of the loss is ``kl_coef * sum(weights * kl_k3(...))``.

    Raises:
        ValueError: the tensors are not one-dimensional and of one length.
    """
    _require_same_length(policy_logprobs=policy_logprobs, ref_logprobs=ref_logprobs)
    log_ratio = (policy_logprobs - ref_logprobs.detach()).clamp(min=-log_ratio_clamp)
    return torch.expm1(-log_ratio) + log_ratio


def _require_same_length(**tensors: torch.Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != 1 for shape in shapes.values()):
        described = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ValueError(
            f"Shapes are {described}. All must be [R_total], one entry per response token. "
            "Repeat what belongs to a whole response for each of its tokens."
        )
