"""Micro-batches of groups: planned by what their prompts share, packed, and run: forward, loss, backward.

A micro-batch is one pass, or its prompts once and chunks of responses behind them. Training, the library and bench all
come through ``run_micro_batch``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from vlm_pg.batching.plan import MicroBatch, Piece, chunk_responses, plan_micro_batches, tree_tokens
from vlm_pg.distributed import SINGLE_SP_RANK, SequenceGroup
from vlm_pg.models.packing import ChunkBatch, PackedBatch, PrefixBatch, pack_chunk, pack_prefixes, stream_share
from vlm_pg.models.policy import Policy
from vlm_pg.models.prompt_tree import shared_tokens
from vlm_pg.models.stream_share import Division, StreamShare
from vlm_pg.types import ResponseGroup, RolloutGroup, VisualFeatures

# Loss of one pass: its number, log-probabilities and entropies of its response tokens, fp32 [R].
PassLoss = Callable[[int, Tensor, Tensor], Tensor]
# The same by response. Per group, per chosen response: its index in the group, and the log-probabilities of its tokens.
ChunkLoss = Callable[[list[list[tuple[int, Tensor]]]], Tensor]
BatchT = TypeVar("BatchT", PackedBatch, PrefixBatch, ChunkBatch)


class Slot(NamedTuple):
    """One slot in the order of micro-batches, which is the same on all ranks.

    ``micro``: what this rank computes in it, None for nothing of its own. ``chunks``: that every rank runs in it, 1 for
    a single pass. ``recorded``: whether it starts from recorded forwards, where this rank has them.
    """

    micro: MicroBatch | None
    chunks: int
    recorded: bool = True

    @property
    def backward_calls(self) -> int:
        """One for a single pass; else one per chunk and one through the prompts."""
        return 1 if self.chunks == 1 else self.chunks + 1


@dataclass(frozen=True)
class Plan:
    """``micro_batches``: every response of every group once, those with most chunks first. ``in_one_tree``: tokens a
    single pass would compute."""

    micro_batches: list[MicroBatch]
    in_one_tree: int

    @property
    def slots(self) -> list[Slot]:
        """The order of one rank alone."""
        return [Slot(micro, len(micro.chunks)) for micro in self.micro_batches]


def plan_groups(groups: Sequence[RolloutGroup], token_budget: int, share: bool) -> Plan:
    """Groups in micro-batches of at most ``token_budget`` tokens at a time, see ``plan_micro_batches``.

    A response's last token is predicted and never read, so it is no part of a stream.

    Args:
        share: whether prompts that begin alike are computed once.

    Raises:
        ValueError: a prompt with a single response exceeds the budget.
    """
    common = shared_tokens([group.prompt for group in groups], share=share)

    def shared(i: int, j: int) -> int:
        return common[i][j]

    prompts = [group.prompt.num_tokens for group in groups]
    units = [group.units for group in groups]
    responses = [
        [sum(len(group.rollouts[index].token_ids) - 1 for index in unit) for unit in of_group]
        for group, of_group in zip(groups, units, strict=True)
    ]
    plan: list[MicroBatch] = []
    are_recorded = [all(one.forward is not None and one.forward.prompt for one in group.rollouts) for group in groups]
    # A stream starts from recorded forwards as a whole or not at all.
    for recorded in (True, False):
        part = [i for i, is_recorded in enumerate(are_recorded) if is_recorded is recorded]
        sizes = [(prompts[i], responses[i]) for i in part]
        found = plan_micro_batches(sizes, token_budget, lambda i, j: shared(part[i], part[j]))  # noqa: B023
        plan += [micro.renumbered(part).of_units(units) for micro in found]
    in_one_tree = tree_tokens(prompts, range(len(groups)), shared) + sum(map(sum, responses))
    return Plan(sorted(plan, key=lambda micro: -len(micro.chunks)), in_one_tree)


@dataclass(frozen=True)
class Streams:
    """One micro-batch, packed. Without ``prefixes`` a single pass; else chunks of responses behind those prompts."""

    passes: tuple[PackedBatch, ...] | tuple[ChunkBatch, ...]
    prefixes: PrefixBatch | None = None

    @property
    def prompts(self) -> PackedBatch | PrefixBatch:
        """The stream that holds the prompts."""
        return self.prefixes or cast("PackedBatch", self.passes[0])

    @property
    def num_recorded(self) -> int:
        """Tokens whose forward was recorded when they were sampled."""
        batches = self.passes if self.prefixes is None else (self.prefixes, *self.passes)
        return sum(batch.num_tokens for batch in batches if batch.recorded is not None)

    def reading(self, token_ids: Sequence[Tensor]) -> Streams:
        """The same streams, of whose first passes log-probabilities of further tokens [R, k] are read at every target;
        these passes compute their forward."""
        passes: list[Any] = list(self.passes)
        for number, ids in enumerate(token_ids):
            targets = torch.cat([passes[number].targets[:, None], ids], 1)
            passes[number] = replace(passes[number], targets=targets, recorded=None)
        return replace(self, passes=tuple(passes))

    def num_tokens(self, passes: int) -> int:
        """Tokens computed for the prompts and the first ``passes`` passes."""
        prefixes = 0 if self.prefixes is None else self.prefixes.num_tokens
        return prefixes + sum(batch.num_tokens for batch in self.passes[:passes])


def pack_micro_batch(
    policy: Policy,
    groups: Sequence[ResponseGroup],
    micro: MicroBatch | None = None,
    chunks: int = 0,
    sequence: SequenceGroup = SINGLE_SP_RANK,
) -> Streams:
    """The streams of a micro-batch, of which this sequence rank computes its share.

    Args:
        groups: those of ``micro``, in order.
        micro: needed for chunks.
        chunks: to run, 0 for a single pass; those beyond the micro-batch's own repeat a response of another one.
    """
    if not chunks:
        return share_streams(Streams((policy.pack(groups),)), sequence, policy)
    # A group of one response fits or is refused, so without shared prefixes there are no chunks.
    assert policy.settings.share_prefix and micro is not None
    for group in groups:
        policy.check_group(group)
    prefixes = pack_prefixes(groups, policy.device)
    missing = max(0, chunks - len(micro.chunks))
    idle = [_idle_chunk(groups, micro)] * missing if missing else []
    chosen = [{piece.group: piece.responses for piece in chunk} for chunk in (*micro.chunks, *idle)]
    passes = tuple(
        pack_chunk(prefixes, groups, [responses.get(group, ()) for group in micro.groups], policy.device)
        for responses in chosen
    )
    return share_streams(Streams(passes, prefixes), sequence, policy)


def share_streams(streams: Streams, sequence: SequenceGroup, policy: Policy | None = None) -> Streams:
    """The same streams, of which this sequence rank computes its share.

    Args:
        policy: needed for recorded forwards; without it they are left out.
    """
    if sequence.size == 1:
        return streams

    def shared(batch: BatchT, share: StreamShare, read: Division) -> BatchT:
        recorded = None
        if policy is not None and batch.recorded is not None:
            recorded = batch.recorded.over_ranks(share.rows, read, policy.recorded_kinds(), policy.device)
        return replace(batch, share=share, recorded=recorded)

    if streams.prefixes is None:
        whole = cast("tuple[PackedBatch, ...]", streams.passes)
        shares = [stream_share(batch, sequence) for batch in whole]
        return Streams(tuple(shared(batch, share, share.read) for batch, share in zip(whole, shares, strict=True)))
    share = stream_share(streams.prefixes, sequence)
    chunks = cast("tuple[ChunkBatch, ...]", streams.passes)
    behind = [StreamShare.behind(share, one.num_tokens) for one in chunks]
    return Streams(
        tuple(shared(one, of_chunk, of_chunk.rows) for one, of_chunk in zip(chunks, behind, strict=True)),
        shared(streams.prefixes, share, share.read),
    )


def _idle_chunk(groups: Sequence[ResponseGroup], micro: MicroBatch) -> tuple[Piece, ...]:
    """The shortest response with a token of its own, which a chunked micro-batch always has: it touches every weight
    that a real chunk touches."""
    _, group, index = min(
        (len(response), group, index)
        for group, member in zip(micro.groups, groups, strict=True)
        for index, response in enumerate(member.responses)
        if len(response) > 1
    )
    return (Piece(group, (index,)),)


def run_micro_batch(
    module: Callable[..., Any],
    streams: Streams,
    features: Tensor | None,
    loss_of: PassLoss,
    backward: Callable[[Tensor], None],
    temperature: float = 1.0,
    *,
    loss_scale: float = 1.0,
    every_weight: bool = False,
    entropy_graph: bool = False,
) -> None:
    """Forward, loss and backward of each pass; behind chunks a backward of a zero loss goes on through the prompts.

    Args:
        module: the policy, or an engine's wrapper around it; called as ``Policy.forward``.
        features: joined, as ``Policy.join_features`` returns them.
        backward: of one loss; called once for a single pass, once more than there are chunks else.
        entropy_graph: leave the entropies that ``loss_of`` gets on the graph, for an entropy bonus.
        loss_scale, every_weight: as ``Policy.prefix_loss`` takes them.
    """
    if streams.prefixes is None:
        (batch,) = streams.passes
        loss = loss_of(0, *module(Policy.stream_logprobs, batch, features, temperature, entropy_graph))
        del features  # not held while backward runs
        backward(loss)
        return
    states = module(Policy.prefix_states, streams.prefixes, features)
    del features
    for number, chunk in enumerate(streams.passes):
        backward(loss_of(number, *module(Policy.chunk_logprobs, chunk, states, temperature, entropy_graph)))
    # Through ``module`` as every pass: DeepSpeed counts what comes between two forwards as one backward.
    backward(module(Policy.prefix_loss, states, loss_scale, every_weight))


@torch.no_grad()
def pass_logprobs(
    module: Callable[..., Any], streams: Streams, features: Tensor | None, temperature: float
) -> list[Tensor]:
    """Log-probabilities fp32 [R] of each pass, without gradient."""
    if streams.prefixes is None:
        return [module(Policy.stream_logprobs, batch, features, temperature)[0] for batch in streams.passes]
    states = module(Policy.prefix_states, streams.prefixes, features)
    return [module(Policy.chunk_logprobs, chunk, states, temperature)[0] for chunk in streams.passes]


def backward_in_chunks(
    policy: Policy,
    groups: Sequence[ResponseGroup],
    loss_of: ChunkLoss,
    chunk_tokens: int | None,
    features: Sequence[VisualFeatures] | None = None,
    temperature: float = 1.0,
    sequence: SequenceGroup = SINGLE_SP_RANK,
) -> Tensor:
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
        streams = pack_micro_batch(policy, groups, sequence=sequence)
    else:
        chunks = chunk_responses(lengths, range(len(groups)), chunk_tokens)
        streams = pack_micro_batch(policy, groups, MicroBatch(tuple(chunks)), len(chunks), sequence)
    if features is None:
        prompts = [group.prompt for group in groups]
        features = policy.vision.encode(prompts, with_graph=policy.vision.trains, sequence=sequence)

    def of_pass(number: int, logprobs: Tensor, _: Tensor) -> Tensor:
        chosen = {piece.group: piece.responses for piece in chunks[number]}
        by_group = enumerate(streams.passes[number].split(logprobs))
        return loss_of([list(zip(chosen.get(group, ()), values, strict=True)) for group, values in by_group])

    total = torch.zeros((), device=policy.device)

    def backward(loss: Tensor) -> None:
        nonlocal total
        loss.backward()
        total += loss.detach()

    run_micro_batch(policy, streams, policy.join_features(groups, features), of_pass, backward, temperature)
    return total
