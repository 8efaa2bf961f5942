"""The loop over a micro-batch, in training, library and bench: one pass, or prompts once and chunks behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from vlm_pg.batching.plan import MicroBatch, Piece, chunk_responses
from vlm_pg.distributed import BY_ITSELF, SequenceGroup
from vlm_pg.models.packing import ChunkBatch, PackedBatch, PrefixBatch, pack_chunk, pack_prefixes, stream_share
from vlm_pg.models.policy import Policy
from vlm_pg.models.stream_share import StreamShare
from vlm_pg.types import ResponseGroup, VisualFeatures

# Loss of one pass: its number, log-probabilities and entropies of its response tokens, fp32 [R].
PassLoss = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
# The same by response. Per group, per chosen response: its index in the group, and the log-probabilities of its tokens.
ChunkLoss = Callable[[list[list[tuple[int, torch.Tensor]]]], torch.Tensor]


@dataclass(frozen=True)
class Streams:
    """One micro-batch, packed. Without ``prefixes`` a single pass; else chunks of responses behind those prompts."""

    passes: tuple[PackedBatch, ...] | tuple[ChunkBatch, ...]
    prefixes: PrefixBatch | None = None


def pack_whole(policy: Policy, groups: Sequence[ResponseGroup]) -> Streams:
    """Prompts and responses in a single pass."""
    return Streams((policy.pack(groups),))


def pack_chunks(policy: Policy, groups: Sequence[ResponseGroup], micro: MicroBatch, at_least: int = 0) -> Streams:
    """The prompts, and the chunks of ``micro``, whose groups these are, in order.

    ``at_least``: so many chunks; those beyond the micro-batch's own hold a response that another one has too.
    """
    for group in groups:
        policy.check_group(group)
    prefixes = pack_prefixes(groups, policy.device)
    chunks = list(micro.chunks)
    while len(chunks) < at_least:
        chunks.append(_idle_chunk(groups, micro))
    chosen = [{piece.group: piece.responses for piece in chunk} for chunk in chunks]
    return Streams(
        tuple(
            pack_chunk(prefixes, groups, [responses.get(group, ()) for group in micro.groups], policy.device)
            for responses in chosen
        ),
        prefixes,
    )


def shared_out(streams: Streams, sequence: SequenceGroup) -> Streams:
    """The same streams, of which this sequence rank computes its share."""
    if sequence.size == 1:
        return streams
    if streams.prefixes is None:
        whole = cast("tuple[PackedBatch, ...]", streams.passes)
        return Streams(tuple(replace(batch, share=stream_share(batch, sequence)) for batch in whole))
    share = stream_share(streams.prefixes, sequence)
    chunks = cast("tuple[ChunkBatch, ...]", streams.passes)
    return Streams(
        tuple(replace(chunk, share=StreamShare.behind(share, chunk.num_tokens)) for chunk in chunks),
        replace(streams.prefixes, share=share),
    )


def micro_batch_losses(
    forward: Callable[..., Any],
    streams: Streams,
    features: torch.Tensor | None,
    loss_of: PassLoss,
    temperature: float = 1.0,
    *,
    loss_scale: float = 1.0,
    every_weight: bool = False,
    entropy_graph: bool = False,
) -> Iterator[torch.Tensor]:
    """One loss per backward call. Each must have been backpropagated before the next one is asked for.

    A single pass has one. Chunks have one each, and a last one, zero, whose backward goes on through the prompts.

    Args:
        forward: as ``Policy.forward``: the policy itself, or an engine around it.
        features: joined, as ``Policy.join_features`` gives them.
        entropy_graph: leave the entropies that ``loss_of`` gets on the graph, for an entropy bonus.
        loss_scale, every_weight: as ``Policy.forward`` of ``PrefixStates`` takes them.
    """
    if streams.prefixes is None:
        (batch,) = streams.passes
        loss = loss_of(0, *forward(batch, features, temperature, entropy_graph))
        del features  # not held while backward runs
        yield loss
        return
    states = forward(streams.prefixes, features)
    del features
    for number, chunk in enumerate(streams.passes):
        yield loss_of(number, *forward(chunk, states, temperature, entropy_graph))
    # Through ``forward`` as every pass: DeepSpeed counts what comes between two forwards as one backward.
    yield forward(states, loss_scale, every_weight)


@torch.no_grad()
def pass_logprobs(
    forward: Callable[..., Any], streams: Streams, features: torch.Tensor | None, temperature: float
) -> list[torch.Tensor]:
    """Log-probabilities fp32 [R] of each pass, without gradient."""
    losses = micro_batch_losses(forward, streams, features, lambda _, logprobs, __: logprobs, temperature)
    return [next(losses) for _ in streams.passes]


def backward_in_chunks(
    policy: Policy,
    groups: Sequence[ResponseGroup],
    loss_of: ChunkLoss,
    chunk_tokens: int | None,
    features: Sequence[VisualFeatures] | None = None,
    temperature: float = 1.0,
    sequence: SequenceGroup = BY_ITSELF,
) -> torch.Tensor:
    """Accumulate the gradient of a loss that is a sum over responses, without holding all responses at once.

    The prefixes run once with gradient; then chunks of about ``chunk_tokens`` response tokens run forward and backward;
    then one backward runs through the prefixes. Memory does not grow with the number of responses.

    Args:
        policy: gradients are added to its parameters' ``grad``.
        groups: prompts with all their responses.
        loss_of: loss of one chunk; the losses of all chunks must add up to the loss that is meant.
        chunk_tokens: response tokens computed at one time; a longer single response is a chunk of its own. None:
            everything in a single pass.
        features: as in ``Policy.logprobs``.
        temperature: divides the logits.
        sequence: processes that all make this call with the same groups. Each computes its share of the streams; the
            gradient is the sum of what all of them accumulate.

    Returns:
        The summed loss, detached; the whole one on each process.

    Raises:
        ValueError: ``chunk_tokens`` below 1, prefixes that are not shared, heads that so many processes cannot divide.
    """
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; it must be at least 1.")
    sizes = policy.family.sequence_sizes(policy.model.config)
    if sequence.size > 1 and sequence.size not in sizes:
        raise ValueError(
            f"backward_in_chunks was called for {sequence.size} processes, but the model's heads can be divided over "
            f"{', '.join(map(str, sizes))}. Call it on one of these numbers."
        )
    if not policy.settings.share_prefix:
        raise ValueError(
            "model.share_prefix is false, but backward_in_chunks runs every prefix once. Set it to true, or use "
            "Policy.logprobs."
        )
    lengths = [[len(response) - 1 for response in group.responses] for group in groups]
    everything = tuple(Piece(group, tuple(range(len(of_group)))) for group, of_group in enumerate(lengths))
    chunks: Sequence[tuple[Piece, ...]] = [everything]
    if chunk_tokens is None:
        streams = pack_whole(policy, groups)
    else:
        chunks = chunk_responses(lengths, range(len(groups)), chunk_tokens)
        streams = pack_chunks(policy, groups, MicroBatch(tuple(chunks)))
    streams = shared_out(streams, sequence)
    if features is None:
        prompts = [group.prompt for group in groups]
        features = policy.vision.encode(prompts, with_graph=policy.vision.trains, sequence=sequence)

    def of_pass(number: int, logprobs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        chosen = {piece.group: piece.responses for piece in chunks[number]}
        by_group = enumerate(streams.passes[number].split(logprobs))
        return loss_of([list(zip(chosen.get(group, ()), values, strict=True)) for group, values in by_group])

    total = torch.zeros((), device=policy.device)
    for loss in micro_batch_losses(policy, streams, policy.join_features(groups, features), of_pass, temperature):
        loss.backward()
        total += loss.detach()
    return total


def _idle_chunk(groups: Sequence[ResponseGroup], micro: MicroBatch) -> tuple[Piece, ...]:
    """The shortest response with a token of its own: it touches every weight that a real chunk touches.

    A chunked micro-batch always has one, for single tokens take no room.
    """
    _, group, index = min(
        (len(response), group, index)
        for group, member in zip(micro.groups, groups, strict=True)
        for index, response in enumerate(member.responses)
        if len(response) > 1
    )
    return (Piece(group, (index,)),)
