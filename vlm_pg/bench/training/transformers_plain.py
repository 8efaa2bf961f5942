"""transformers' own forward with the prefix repeated for every response."""

from __future__ import annotations

import torch

from vlm_pg.bench.case import best_attention, set_attention
from vlm_pg.bench.training.case import TrainingCase, target_logprobs


def batch(case: TrainingCase) -> float:
    """All sequences at once, padded on the right."""
    set_attention(case, best_attention(case))
    responses, _ = case.padded_responses()
    prefixes = case.prefix.expand(len(responses), -1)
    logits = _logits(case, torch.cat([prefixes, responses], 1), responses.shape[1])
    logprobs = target_logprobs(logits, responses)
    loss = case.loss([row[:length] for row, length in zip(logprobs, case.lengths, strict=True)])
    loss.backward()
    return loss.item()


def sequential(case: TrainingCase) -> float:
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
