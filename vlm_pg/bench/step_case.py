"""``vlm-pg bench step``: one group on one model, and the contestants, each a function from a case to its loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch

from vlm_pg.attention.registration import ATTENTION_NAME
from vlm_pg.bench.case import SPECIAL_IDS, ModelCase, Spec, best_attention, random_policy, set_attention, text_prompt
from vlm_pg.bench.work import CHUNK_TOKENS
from vlm_pg.models.micro_batches import backward_in_chunks
from vlm_pg.models.policy import Policy
from vlm_pg.types import ResponseGroup

# Largest relative difference of loss and gradient norm between contestants. In bf16 each of them rounds differently.
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}


@dataclass(frozen=True)
class TrainingCase(ModelCase):
    """``prefix`` int64 [P]; ``responses`` int64 [R_g] each; ``weights``: one positive factor per response, in the place
    of an advantage.

    A contestant adds to the gradients of ``model`` and returns the loss.
    """

    prefix: torch.Tensor
    responses: tuple[torch.Tensor, ...]
    weights: tuple[float, ...]

    @classmethod
    def build(cls, spec: Spec) -> TrainingCase:
        return cls.random(random_policy(spec), spec["prefix"], spec["lengths"])

    @classmethod
    def random(cls, policy: Policy, prefix: int, lengths: Sequence[int], seed: int = 0) -> Self:
        """A group of random tokens. Text stands in for visual tokens: past the tower the language model treats them
        alike.

        Weights run from 0.5 to 1.5, so that responses that are swapped change the loss.
        """
        generator = torch.Generator().manual_seed(seed)
        below = policy.vocab_size - SPECIAL_IDS
        sizes = (prefix, *lengths)
        draw = [torch.randint(0, below, (size,), generator=generator).to(policy.device) for size in sizes]
        steps = max(1, len(lengths) - 1)
        return cls(policy, draw[0], tuple(draw[1:]), tuple(0.5 + index / steps for index in range(len(lengths))))

    def tiny(self) -> Self:
        return self.random(self.policy, 16, (2, 3))

    def run(self, contestant: Callable[[TrainingCase], float]) -> float:
        self.forget()
        return contestant(self)

    def outcome(self, result: float) -> dict[str, float]:
        return {"loss": result, "gradient_norm": gradient_norm(self)}

    def time(self, contestant: Callable[[TrainingCase], float]) -> dict[str, float]:
        self.forget()
        return self.timed(partial(contestant, self))

    def agreement(self, outcomes: Mapping[str, Any], dtype: str) -> dict[str, dict[str, Any]]:
        check_agreement(outcomes, TOLERANCE[dtype])
        return dict(outcomes)

    @property
    def lengths(self) -> list[int]:
        return [len(response) for response in self.responses]

    def padded_responses(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Responses padded on the right with token 0, int64 [G, R], and where they are real, bool [G, R]."""
        ids = torch.nn.utils.rnn.pad_sequence(list(self.responses), batch_first=True)
        lengths = torch.tensor(self.lengths, device=self.device)
        return ids, torch.arange(ids.shape[1], device=self.device) < lengths[:, None]

    def loss(self, logprobs: Sequence[torch.Tensor], responses: Sequence[int] | None = None) -> torch.Tensor:
        """Weighted sum over responses (all, or these) of the mean log-probability of their tokens."""
        weights = self.weights if responses is None else [self.weights[index] for index in responses]
        lengths = [len(values) for values in logprobs]
        means = np.array([weight / length for weight, length in zip(weights, lengths, strict=True)], dtype=np.float32)
        of_tokens = torch.from_numpy(means.repeat(lengths)).to(logprobs[0].device, non_blocking=True)
        return (torch.cat(list(logprobs)) * of_tokens).sum()


def check_agreement(outcomes: Mapping[str, dict[str, float]], tolerance: float) -> None:
    """Raise RuntimeError unless all contestants found the same loss and the same gradient norm."""
    names = list(outcomes)
    for name in names[1:]:
        for key in ("loss", "gradient_norm"):
            expected, came = outcomes[names[0]][key], outcomes[name][key]
            if not math.isclose(came, expected, rel_tol=tolerance):
                raise RuntimeError(
                    f"The contestants disagree: {key} is {expected!r} for {names[0]} and {came!r} for {name}; "
                    f"{tolerance:g} relative is allowed. Nothing was timed: they do not compute the same thing."
                )


def target_logprobs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """fp32 log-probabilities [...] of ``targets`` [...] under ``logits`` [..., V]."""
    logits = logits.float()
    return logits.gather(-1, targets[..., None])[..., 0] - logits.logsumexp(-1)


def gradient_norm(case: ModelCase) -> float:
    """Euclidean norm over the gradients of all weights, added up in fp64."""
    squares = [p.grad.double().pow(2).sum() for p in case.model.parameters() if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt())


def _step(case: TrainingCase, chunk_tokens: int | None) -> float:
    set_attention(case, ATTENTION_NAME)

    def loss_of(chunk: list[list[tuple[int, torch.Tensor]]]) -> torch.Tensor:
        indexes, logprobs = zip(*chunk[0], strict=True)
        return case.loss(logprobs, indexes)

    group = ResponseGroup(text_prompt("bench", case.prefix.cpu()), tuple(r.cpu() for r in case.responses))
    return backward_in_chunks(case.policy, [group], loss_of, chunk_tokens).item()


grouped, grouped_chunked = partial(_step, chunk_tokens=None), partial(_step, chunk_tokens=CHUNK_TOKENS)


def transformers_batch(case: TrainingCase) -> float:
    """All sequences at once, padded on the right."""
    set_attention(case, best_attention(case))
    responses, _ = case.padded_responses()
    prefixes = case.prefix.expand(len(responses), -1)
    logits = _logits(case, torch.cat([prefixes, responses], 1), responses.shape[1])
    logprobs = target_logprobs(logits, responses)
    loss = case.loss([row[:length] for row, length in zip(logprobs, case.lengths, strict=True)])
    loss.backward()
    return loss.item()


def transformers_sequential(case: TrainingCase) -> float:
    """One sequence after the other."""
    set_attention(case, best_attention(case))
    total = 0.0
    for response, weight in zip(case.responses, case.weights, strict=True):
        logits = _logits(case, torch.cat([case.prefix, response])[None], len(response))[0]
        loss = weight * target_logprobs(logits, response).mean()
        loss.backward()
        total += loss.item()
        del logits, loss
    return total


def _logits(case: TrainingCase, input_ids: torch.Tensor, response: int) -> torch.Tensor:
    """Logits [rows, response, V] that predict the responses; their last tokens are not read."""
    # Right padding behind causal attention needs no mask, and without one sdpa takes its fast path.
    return case.model(input_ids=input_ids[:, :-1], logits_to_keep=response, use_cache=False).logits
