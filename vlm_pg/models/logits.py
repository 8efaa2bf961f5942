"""Log-probabilities of chosen tokens without ever holding all logits.

A 150k vocabulary in fp32 is 0.6 MB a token. Rows go through the output head in chunks whose logits are thrown away
and computed again in backward. What was found of a chunk is kept: the second time only the product of the head runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
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
    chunk = _chunk_with_entropy_graph if entropy_graph else _chunk
    if len(pieces) == 1 or not torch.is_grad_enabled():
        parts = [chunk(head, h, t, temperature) for h, t in pieces]
    else:
        parts = [
            checkpoint(chunk, head, h, t, temperature, _Found(), use_reentrant=False, preserve_rng_state=False)
            for h, t in pieces
        ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


class _Found:
    """Log-probabilities and entropies of a chunk, from its forward to its recomputation, which wants but the graph."""

    def __init__(self) -> None:
        self.values: tuple[torch.Tensor, torch.Tensor] | None = None


def _chunk(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    found: _Found | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _TargetLogprobs.apply(head(hidden), targets, temperature, found)


class _TargetLogprobs(torch.autograd.Function):
    """Logits [rows, V] -> fp32 log-probabilities of the targets [rows], and entropies [rows] without a gradient.

    Of z = logits / temperature the log-probability of target y is log p_y with p = softmax(z). Its gradient is
    d log p_y / d logits_j = ((j = y) - p_j) / temperature: one softmax, and one product, rounded once.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float, found: _Found | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if found is not None and found.values is not None:
            logprobs, entropies = found.values
            found.values = None
        else:
            logprobs, entropies = _values(logits, targets, temperature)
            if found is not None:
                # Views of their own: what autograd marks as outputs of this call must not be given to another one.
                found.values = logprobs.detach(), entropies.detach()
        ctx.save_for_backward(logits, targets, logprobs)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[torch.Tensor | None, ...]:
        logits, targets, logprobs = ctx.saved_tensors
        upstream = (grad_outputs[0].float() / ctx.temperature)[:, None]
        grad = torch.empty_like(logits)
        torch.mul(_scaled(logits, ctx.temperature).softmax(-1), -upstream, out=grad)
        # 1 - p of a target that is nearly certain would be lost in half precision.
        grad.scatter_(1, targets[:, None], (-logprobs.expm1()[:, None] * upstream).to(grad.dtype))
        return grad, None, None, None


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """fp32 [rows, V]."""
    if temperature == 1.0:
        return logits.float()
    # Beside a number the quotient would be rounded to the logits' dtype; beside an fp32 tensor it comes in fp32.
    return (logits / torch.full((1,), temperature, dtype=torch.float32, device=logits.device)).float()


def _values(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = _scaled(logits, temperature).log_softmax(-1)
    entropies = -logprobs.exp().mul_(logprobs).sum(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], entropies


def _chunk_with_entropy_graph(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    found: _Found | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """By autograd: entropies are differentiated too, so logits are needed in fp32 again, and nothing is remembered."""
    logprobs = _scaled(head(hidden), temperature).log_softmax(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)
