"""Loss and gradient of groups of any size, responses in chunks: the library form of what the training step does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from vlm_pg.models.packing import pack_chunk, pack_prefixes
from vlm_pg.models.policy import Policy
from vlm_pg.types import ResponseGroup, VisualFeatures

# Per group, per chosen response: its index in the group, and the log-probabilities [R] of its tokens.
ChunkLoss = Callable[[list[list[tuple[int, torch.Tensor]]]], torch.Tensor]


def backward_in_chunks(
    policy: Policy,
    groups: Sequence[ResponseGroup],
    loss_of: ChunkLoss,
    chunk_tokens: int,
    features: Sequence[VisualFeatures] | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Accumulate the gradient of a loss that is a sum over responses, without holding all responses at once.

    The prefixes run once with gradient; then chunks of about ``chunk_tokens`` response tokens run forward and backward;
    then one backward runs through the prefixes. Memory does not grow with the number of responses.

    Args:
        policy: gradients are added to its parameters' ``grad``.
        groups: prompts with all their responses.
        loss_of: loss of one chunk; the losses of all chunks must add up to the loss that is meant.
        chunk_tokens: response tokens computed at one time; a longer single response is a chunk of its own.
        features: as in ``Policy.logprobs``.
        temperature: divides the logits.

    Returns:
        The summed loss, detached.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; it must be at least 1.")
    if not policy.settings.share_prefix:
        raise ValueError(
            "model.share_prefix is false, but backward_in_chunks runs every prefix once. Set it to true, or use "
            "Policy.logprobs."
        )
    if features is None:
        features = policy.vision.encode([group.prompt for group in groups], with_graph=policy.vision.trains)
    for group in groups:
        policy.check_group(group)
    prefixes = pack_prefixes(groups, policy.device)
    states = policy(prefixes, policy.join_features(groups, features))
    total = torch.zeros((), device=policy.device)
    for chosen in _chunks(groups, chunk_tokens):
        batch = pack_chunk(prefixes, groups, chosen, policy.device)
        logprobs, _ = policy(batch, states, temperature)
        indexed = [list(zip(*pair, strict=True)) for pair in zip(chosen, batch.split(logprobs), strict=True)]
        loss = loss_of(indexed)
        loss.backward()
        total += loss.detach()
    states.surrogate_loss().backward()
    return total


def _chunks(groups: Sequence[ResponseGroup], chunk_tokens: int) -> list[list[list[int]]]:
    """Consecutive responses, at most ``chunk_tokens`` stream tokens together; per chunk and group the indices."""
    chunks: list[list[list[int]]] = []
    used = chunk_tokens + 1
    for number, group in enumerate(groups):
        for index, response in enumerate(group.responses):
            tokens = len(response) - 1
            if used + tokens > chunk_tokens:
                chunks.append([[] for _ in groups])
                used = 0
            chunks[-1][number].append(index)
            used += tokens
    return chunks
