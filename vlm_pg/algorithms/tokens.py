"""What a loss is made of: the response tokens of one pass, laid end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vlm_pg.algorithms.ratios import require_same_length


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
        require_same_length(**{name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)})
