"""The losses of one step's micro-batches, one for each backward call, in the order in which all ranks make them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vlm_pg.algorithms.losses import kl_k3, policy_loss
from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.batching.plan import MicroBatch, Piece
from vlm_pg.models.packing import ChunkBatch, PackedBatch, PrefixBatch, pack_chunk, pack_prefixes
from vlm_pg.models.policy import Policy
from vlm_pg.training.calls import Place
from vlm_pg.training.engines import Engine
from vlm_pg.training.filler import filler_group
from vlm_pg.training.vision_leaves import VisionLeaves
from vlm_pg.types import ResponseGroup, RolloutGroup


@dataclass
class StepSums:
    """Sums over this rank's micro-batches; ``largest`` holds maxima."""

    totals: dict[str, float] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)

    def add(self, **values: float | torch.Tensor) -> None:
        for name, value in values.items():
            self.totals[name] = self.totals.get(name, 0.0) + float(value)


@dataclass
class Passes:
    """Runs the policy over micro-batches and turns its log-probabilities into losses.

    Args:
        reference: the policy that the KL term measures from; None without one.
        weights: loss weight of each token of each rollout of each group.
        sums: what the step's metrics are made of; filled on the way.
    """

    engine: Engine
    reference: Policy | None
    groups: Sequence[RolloutGroup]
    leaves: VisionLeaves
    weights: Sequence[Sequence[float]]
    algorithm: AlgorithmSettings
    temperature: float
    sums: StepSums = field(default_factory=StepSums)

    def losses(self, places: Sequence[Place]) -> Iterator[torch.Tensor]:
        """One loss per backward call. Each must have been backpropagated before the next one is asked for.

        Raises:
            FloatingPointError: a loss is not finite.
        """
        for place in places:
            if place.chunks > 1:
                yield from self._chunked(place)
            elif place.micro is None:
                yield self._idle()
            else:
                yield self._single(place.micro)

    @property
    def policy(self) -> Policy:
        return self.engine.policy

    def _idle(self) -> torch.Tensor:
        """A single pass worth nothing. The reference runs too: its weights may be scattered over the ranks as well."""
        batch = self.policy.pack([filler_group(self.policy)])
        if self.reference is not None:
            self._score_reference(batch, None)
        logprobs, _ = self.engine.forward(batch, None, self.temperature)
        return logprobs.sum() * 0.0

    def _single(self, micro: MicroBatch) -> torch.Tensor:
        (pieces,) = micro.chunks
        members = [self._responses(group) for group in micro.groups]
        batch = self.policy.pack(members)
        ref_logprobs = None
        if self.reference is not None:
            ref_logprobs = self._score_reference(batch, self._reference_features(micro, members))
        logprobs, entropies = self.engine.forward(batch, self._features(micro, members), self.temperature)
        self.sums.add(
            tokens_computed=batch.num_tokens, tokens_shared=batch.tokens_shared, sharing_groups=batch.num_sharing
        )
        return self._loss(pieces, logprobs, entropies, ref_logprobs)

    def _chunked(self, place: Place) -> Iterator[torch.Tensor]:
        """The prompts once, a loss per chunk of responses behind them, then one that runs through the prompts."""
        micro = place.micro
        members = [filler_group(self.policy)] if micro is None else [self._responses(group) for group in micro.groups]
        for member in members:
            self.policy.check_group(member)
        prefixes = pack_prefixes(members, self.policy.device)
        pieces = () if micro is None else micro.chunks
        chunks = [] if micro is None else [self._pack_chunk(prefixes, members, micro, chunk) for chunk in micro.chunks]
        while len(chunks) < place.chunks:
            chunks.append(_idle_chunk(prefixes, members, self.policy.device))
        # All chunks under the reference come before the policy's prefixes take their memory.
        ref_logprobs = self._score_reference_chunks(micro, members, prefixes, chunks)
        # DeepSpeed's engine hands on what the policy returns, here PrefixStates.
        states: Any = self.engine.forward(prefixes, None if micro is None else self._features(micro, members))
        for number, (chunk, ref) in enumerate(zip(chunks, ref_logprobs, strict=True)):
            logprobs, entropies = self.engine.forward(chunk, states, self.temperature)
            if number < len(pieces):
                self.sums.add(tokens_computed=chunk.num_tokens)
                yield self._loss(pieces[number], logprobs, entropies, ref)
            else:
                yield logprobs.sum() * 0.0
        if micro is not None:
            self.sums.add(
                tokens_computed=prefixes.num_tokens,
                tokens_shared=prefixes.tokens_shared,
                sharing_groups=prefixes.num_sharing,
                groups_chunked=len(members),
            )
        yield states.surrogate_loss(self.engine.loss_scale)

    def _pack_chunk(
        self, prefixes: PrefixBatch, members: Sequence[ResponseGroup], micro: MicroBatch, pieces: Sequence[Piece]
    ) -> ChunkBatch:
        of_group = {piece.group: piece.responses for piece in pieces}
        return pack_chunk(prefixes, members, [of_group.get(group, ()) for group in micro.groups], self.policy.device)

    @torch.no_grad()
    def _score_reference(self, batch: PackedBatch, features: torch.Tensor | None) -> torch.Tensor:
        assert self.reference is not None
        return self.reference(batch, features, self.temperature)[0]

    @torch.no_grad()
    def _score_reference_chunks(
        self,
        micro: MicroBatch | None,
        members: Sequence[ResponseGroup],
        prefixes: PrefixBatch,
        chunks: Sequence[ChunkBatch],
    ) -> list[torch.Tensor | None]:
        if self.reference is None:
            return [None] * len(chunks)
        states = self.reference(prefixes, None if micro is None else self._reference_features(micro, members))
        return [self.reference(chunk, states, self.temperature)[0] for chunk in chunks]

    def _responses(self, group: int) -> ResponseGroup:
        chosen = self.groups[group]
        return ResponseGroup(chosen.prompt, tuple(rollout.token_ids for rollout in chosen.rollouts))

    def _features(self, micro: MicroBatch, members: Sequence[ResponseGroup]) -> torch.Tensor | None:
        return self.policy.join_features(members, [self.leaves.features[group] for group in micro.groups])

    def _reference_features(self, micro: MicroBatch, members: Sequence[ResponseGroup]) -> torch.Tensor | None:
        """Where the tower is frozen it is the reference's tower too."""
        assert self.reference is not None
        if not self.policy.vision.trains:
            return self._features(micro, members)
        features = self.reference.vision.encode([member.prompt for member in members])
        return self.reference.join_features(members, features)

    def _loss(
        self,
        pieces: Sequence[Piece],
        logprobs: torch.Tensor,
        entropies: torch.Tensor,
        ref_logprobs: torch.Tensor | None,
    ) -> torch.Tensor:
        per_token = self._per_token(pieces)
        loss, metrics = policy_loss(
            logprobs,
            per_token["rollout_logprobs"],
            per_token["advantages"],
            per_token["weights"],
            clip_low=self.algorithm.clip_low,
            clip_high=self.algorithm.clip_high,
            log_ratio_clamp=self.algorithm.log_ratio_clamp,
        )
        if ref_logprobs is not None:
            kl = kl_k3(logprobs, ref_logprobs, log_ratio_clamp=self.algorithm.log_ratio_clamp)
            loss = loss + self.algorithm.kl_coef * (per_token["weights"] * kl).sum()
            self.sums.add(kl=kl.detach().sum())
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"The loss is {loss.item()}; the step was not taken and no checkpoint was written. Resume from the "
                "last checkpoint with a lower training.learning_rate, or look at the last rollouts for what went wrong."
            )
        largest = self.sums.largest
        largest["ratio_max"] = max(largest.get("ratio_max", 0.0), float(metrics.pop("ratio_max")))
        self.sums.add(loss=loss.detach(), entropy=entropies.sum(), **metrics)
        return loss

    def _per_token(self, pieces: Sequence[Piece]) -> dict[str, torch.Tensor]:
        """Sampled log-probabilities, advantages and loss weights, each fp32 [R]."""
        logprobs, advantages, token_weights = [], [], []
        for piece in pieces:
            group = self.groups[piece.group]
            for i in piece.responses:
                sampled = group.rollouts[i].rollout_logprobs
                logprobs.append(sampled)
                advantages.append(torch.full_like(sampled, group.advantages[i]))
                token_weights.append(torch.full_like(sampled, self.weights[piece.group][i]))
        return {
            name: torch.cat(parts).to(self.policy.device)
            for name, parts in (("rollout_logprobs", logprobs), ("advantages", advantages), ("weights", token_weights))
        }


def _idle_chunk(prefixes: PrefixBatch, groups: Sequence[ResponseGroup], device: torch.device) -> ChunkBatch:
    """The shortest response with a token of its own: it touches every weight that a real chunk touches.

    A chunked micro-batch always has one, for single tokens take no room.
    """
    _, group, index = min(
        (len(response), group, index)
        for group, member in enumerate(groups)
        for index, response in enumerate(member.responses)
        if len(response) > 1
    )
    chosen = [(index,) if member == group else () for member in range(len(groups))]
    return pack_chunk(prefixes, groups, chosen, device)
