"""transformers' own forward with the prefix repeated for every response."""

from __future__ import annotations

import torch

from vlm_pg.bench.contestants.base import Case, best_attention, set_attention, target_logprobs


def _logits(case: Case, input_ids: torch.Tensor, response: int) -> torch.Tensor:
    """Logits [rows, response, V] that predict the responses; their last tokens are not read."""
    # Right padding behind causal attention needs no mask, and without one sdpa takes its fast path.
    return case.model(input_ids=input_ids[:, :-1], logits_to_keep=response, use_cache=False).logits


class TransformersBatch:
    name = "transformers-batch"

    def unavailable_because(self, device: torch.device) -> str | None:
        return None

    def step(self, case: Case) -> float:
        set_attention(case, best_attention(case))
        responses, _ = case.padded_responses()
        prefixes = case.prefix.expand(len(responses), -1)
        logits = _logits(case, torch.cat([prefixes, responses], 1), responses.shape[1])
        logprobs = target_logprobs(logits, responses)
        loss = case.loss([row[:length] for row, length in zip(logprobs, case.lengths, strict=True)])
        loss.backward()
        return loss.item()


class TransformersSequential:
    name = "transformers-sequential"

    def unavailable_because(self, device: torch.device) -> str | None:
        return None

    def step(self, case: Case) -> float:
        set_attention(case, best_attention(case))
        total = 0.0
        for response, weight in zip(case.responses, case.weights, strict=True):
            logits = _logits(case, torch.cat([case.prefix, response])[None], len(response))[0]
            loss = weight * target_logprobs(logits, response).mean()
            loss.backward()
            total += loss.item()
            del logits, loss
        return total
