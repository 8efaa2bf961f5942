"""Log-probabilities of chosen tokens without ever holding all logits.

A 150k vocabulary in fp32 is 0.6 MB a token. Rows go through the output head in chunks whose logits are thrown away
and computed again in backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint


def token_logprobs(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    chunk_rows: int,
    least_chunks: int = 1,
    entropy_graph: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of each distribution.

    Args:
        head: maps [rows, D] to [rows, V]; calls the module, so that its hooks run.
        hidden: [R, D].
        targets: int64 [R].
        temperature: divides the logits.
        chunk_rows: rows whose logits are held at one time.
        least_chunks: calls of the head at least, with empty ones behind the others; where weights are scattered over
            ranks every call is a collective, so all ranks must make equally many.
        entropy_graph: leave the entropies on the graph, for an entropy bonus.

    Returns:
        fp32 log-probabilities [R] (differentiable) and entropies in nats [R] (detached unless asked for).
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0 (1.0 leaves logits as they are).")
    pieces = list(zip(hidden.split(chunk_rows), targets.split(chunk_rows), strict=True))
    pieces += [(hidden[:0], targets[:0])] * (least_chunks - len(pieces))
    if len(pieces) == 1 or not torch.is_grad_enabled():
        parts = [_chunk(head, h, t, temperature, entropy_graph) for h, t in pieces]
    else:
        parts = [checkpoint(_chunk, head, h, t, temperature, entropy_graph, use_reentrant=False) for h, t in pieces]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    entropy_graph: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = head(hidden).float()
    if temperature != 1.0:
        logits = logits / temperature
    log_total = logits.logsumexp(-1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - log_total
    with torch.set_grad_enabled(entropy_graph and torch.is_grad_enabled()):
        entropies = log_total - ((logits - log_total[:, None]).exp() * logits).sum(-1)
    return logprobs, entropies
