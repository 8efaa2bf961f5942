"""What all contestants share: one model, one group, one loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vlm_pg.models.policy import Policy


@dataclass(frozen=True)
class ModelCase:
    """``policy.model`` is the transformers model every contestant runs, with the same weights."""

    policy: Policy

    @property
    def model(self) -> Any:
        return self.policy.model

    @property
    def device(self) -> torch.device:
        return self.policy.device


@dataclass(frozen=True)
class Case(ModelCase):
    """One group on one model.

    ``prefix`` int64 [P]; ``responses`` int64 [R_g] each; ``weights``: one positive factor per response, in the place
    of an advantage.
    """

    prefix: torch.Tensor
    responses: tuple[torch.Tensor, ...]
    weights: tuple[float, ...]

    @property
    def lengths(self) -> list[int]:
        return [len(response) for response in self.responses]

    def padded_responses(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Responses padded on the right with token 0, int64 [G, R], and where they are real, bool [G, R]."""
        ids = torch.nn.utils.rnn.pad_sequence(list(self.responses), batch_first=True)
        lengths = torch.tensor(self.lengths, device=self.device)
        return ids, torch.arange(ids.shape[1], device=self.device) < lengths[:, None]

    def loss(self, logprobs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Weighted sum over responses of the mean log-probability of their tokens."""
        terms = [weight * values.mean() for weight, values in zip(self.weights, logprobs, strict=True)]
        return torch.stack(terms).sum()


class Contestant(Protocol):
    """One way to compute the loss of a case and its gradient."""

    name: str

    def unavailable_because(self, device: torch.device) -> str | None:
        """Why it cannot run here, or None."""
        ...

    def step(self, case: Case) -> float:
        """Forward and backward; adds to the gradients of ``case.model`` and returns the loss."""
        ...


def make_case(policy: Policy, prefix: int, lengths: Sequence[int], seed: int = 0) -> Case:
    """A group of random tokens. Text stands in for visual tokens: past the tower the language model treats them alike.

    Weights run from 0.5 to 1.5, so that responses that change places change the loss.
    """
    generator = torch.Generator().manual_seed(seed)
    # Vision tokens have the last ids; the policy refuses them in a response.
    below = policy.vocab_size - 16
    device = policy.device
    draw = [torch.randint(0, below, (length,), generator=generator).to(device) for length in (prefix, *lengths)]
    steps = max(1, len(lengths) - 1)
    weights = tuple(0.5 + index / steps for index in range(len(lengths)))
    return Case(policy, draw[0], tuple(draw[1:]), weights)


def set_attention(case: ModelCase, name: str) -> None:
    """The attention implementation that the language model's layers look up."""
    text = case.model.config.get_text_config()
    if text._attn_implementation != name:
        case.model.set_attn_implementation({"text_config": name})


def best_attention(case: ModelCase) -> str:
    """The fastest attention of transformers' own for sequences without padding."""
    return "flash_attention_2" if can_use_flash_attention_2(case) else "sdpa"


def can_use_flash_attention_2(case: ModelCase) -> bool:
    """Whether the package flash-attn is there, and takes this device and dtype."""
    from transformers.utils.import_utils import is_flash_attn_2_available

    half = case.policy.dtype in (torch.bfloat16, torch.float16)
    return case.device.type == "cuda" and half and bool(is_flash_attn_2_available())


def target_logprobs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """fp32 log-probabilities [...] of ``targets`` [...] under ``logits`` [..., V]."""
    logits = logits.float()
    return logits.gather(-1, targets[..., None])[..., 0] - logits.logsumexp(-1)


def gradient_norm(case: Case) -> float:
    """Euclidean norm over the gradients of all weights, added up in fp64."""
    squares = [p.grad.double().pow(2).sum() for p in case.model.parameters() if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt())
