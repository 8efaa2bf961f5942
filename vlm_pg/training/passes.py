"""The losses of one step's micro-batches, one for each backward call, in the order in which all ranks make them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from vlm_pg.algorithms.losses import entropy_bonus, kl_term
from vlm_pg.algorithms.own import load_loss
from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.algorithms.tokens import ResponseTokens, importance_weights
from vlm_pg.batching.plan import MicroBatch, Piece
from vlm_pg.metrics import ENTROPY_CHART, Chart, Metric
from vlm_pg.models.chunked import Streams, micro_batch_losses, pack_chunks, pack_whole, pass_logprobs, shared_out
from vlm_pg.models.packing import PackedBatch, PrefixBatch
from vlm_pg.models.policy import Policy
from vlm_pg.models.reference import ScoringPolicy
from vlm_pg.models.settings import VISION_PARTS
from vlm_pg.tally import Tally
from vlm_pg.training.behaviour import mismatch_sums
from vlm_pg.training.calls import PassSlot
from vlm_pg.training.engines import Engine
from vlm_pg.training.filler import filler_group
from vlm_pg.training.step_features import StepFeatures
from vlm_pg.types import ResponseGroup, RolloutGroup, VisualFeatures

# What a rank without work of its own computes in chunks.
FILLER = MicroBatch(((Piece(0, (0,)),),))

LOSS = Metric("loss", how="sum", chart=Chart("Loss", 10), over_updates="mean")
ENTROPY = Metric("entropy", "nat per token", chart=ENTROPY_CHART)
IMPORTANCE = Metric("importance_mean", "factor of a token's term")
RESPONSE_TOKENS = Metric("response_tokens", "tokens", "sum")
TOKENS_CHART = Chart("Tokens per step", 19)
TOKENS_COMPUTED = Metric("tokens_computed", "tokens", "sum", TOKENS_CHART)
TOKENS_SHARED = Metric("tokens_shared_across_questions", "tokens", "sum")
QUESTIONS_SHARING = Metric("questions_sharing", "questions", "sum")
GROUPS_CHUNKED = Metric("groups_chunked", "groups", "sum")


@dataclass
class Passes:
    """Runs the policy over micro-batches and turns its log-probabilities into losses.

    Args:
        reference: the policy that the KL term measures from; None without one.
        weights: loss weight of each token of each rollout of each group.
        behaviour_logprobs: fp32 [R] of each rollout of each group, what the loss's ratio is taken to; None for those of
            the same forward, where the ratio is 1.
        measure_mismatch: sum up how the recorded log-probabilities differ from those of the forward.
        reference_vision: features of a reference's own tower, where they are made already.
        tally: the step's metrics; filled on the way.
    """

    engine: Engine
    reference: ScoringPolicy | None
    groups: Sequence[RolloutGroup]
    vision: StepFeatures
    weights: Sequence[Sequence[float]]
    algorithm: AlgorithmSettings
    temperature: float
    behaviour_logprobs: Sequence[Sequence[torch.Tensor]] | None
    measure_mismatch: bool = False
    reference_vision: StepFeatures | None = None
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self.policy_loss = load_loss(self.algorithm)

    def losses(self, places: Sequence[PassSlot]) -> Iterator[tuple[torch.Tensor, bool]]:
        """One loss per backward call, and whether it is the last one.

        Each must have been backpropagated before the next one is asked for. A trained tower's own backward is part of
        the last one. Where the engine needs it, the first and the last backward reach every trained weight; with a
        frozen language model all do, for ZeRO-1 and 2 are not made for a backward that reaches none.
        """
        calls = sum(place.backward_calls for place in places)
        parts = self.engine.rates.parts
        vision_trains = any(part in parts for part in VISION_PARTS)
        for call, (loss, tower) in enumerate(self._losses(places), start=1):
            if call < calls:
                reaching = call == 1 or "language" not in parts
                if reaching and vision_trains and self.engine.needs_every_weight:
                    loss = loss + self.policy.idle_vision_loss()
                yield loss, False
            else:
                yield loss if tower is None else loss + tower, True

    def _losses(self, places: Sequence[PassSlot]) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Each loss, and of the last place the zero through which backward enters the tower."""
        features, tower = self.vision.features, None
        for number, place in enumerate(places, start=1):
            if number == len(places):
                features, tower = self.vision.joined()
            for loss in self._micro_batch(place, features):
                yield loss, tower

    @property
    def policy(self) -> Policy:
        return self.engine.policy

    def _micro_batch(self, place: PassSlot, features: Sequence[VisualFeatures]) -> Iterator[torch.Tensor]:
        """A loss per backward call of one place; without work of its own this rank makes passes worth nothing."""
        micro = place.micro
        members = [filler_group(self.policy)] if micro is None else [self._responses(group) for group in micro.groups]
        if place.chunks == 1:
            streams = pack_whole(self.policy, members)
        else:
            # A group of one fits or is refused, so where nothing is shared there are no chunks.
            assert self.policy.settings.share_prefix
            streams = pack_chunks(self.policy, members, micro or FILLER, place.chunks)
        streams = shared_out(streams, self.engine.sequence)
        # All passes of the reference come before those of the policy take their memory. It runs where there is nothing
        # to do, too: its weights may be scattered over the ranks as well.
        ref_logprobs: list[torch.Tensor] | None = None
        if self.reference is not None:
            of_reference = None if micro is None else self._reference_features(micro, members)
            ref_logprobs = pass_logprobs(self.reference, streams, of_reference, self.temperature)
        pieces = () if micro is None else micro.chunks
        if micro is not None:
            self._count(streams, len(members), len(pieces))

        def loss_of(number: int, logprobs: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
            if number >= len(pieces):
                return _nothing(logprobs, entropies)
            ref = None if ref_logprobs is None else ref_logprobs[number]
            return self._loss(pieces[number], logprobs, entropies, ref)

        yield from micro_batch_losses(
            self.engine.forward,
            streams,
            None if micro is None else self._features(micro, members, features),
            loss_of,
            self.temperature,
            loss_scale=self.engine.loss_scale,
            every_weight=self.engine.needs_every_weight,
            entropy_graph=self.algorithm.entropy_coef > 0,
        )

    def _count(self, streams: Streams, groups: int, own: int) -> None:
        """Tokens of the prompts and of the passes that are this rank's own."""
        prompts = streams.prefixes or streams.passes[0]
        assert isinstance(prompts, PackedBatch | PrefixBatch)
        self.tally.add(TOKENS_COMPUTED, sum(batch.num_tokens for batch in streams.passes[:own]))
        self.tally.add(TOKENS_SHARED, prompts.tokens_shared)
        self.tally.add(QUESTIONS_SHARING, prompts.num_sharing)
        if streams.prefixes:
            self.tally.add(TOKENS_COMPUTED, streams.prefixes.num_tokens)
            self.tally.add(GROUPS_CHUNKED, groups)

    def _responses(self, group: int) -> ResponseGroup:
        chosen = self.groups[group]
        return ResponseGroup(chosen.prompt, tuple(rollout.token_ids for rollout in chosen.rollouts))

    def _features(
        self, micro: MicroBatch, members: Sequence[ResponseGroup], features: Sequence[VisualFeatures]
    ) -> torch.Tensor | None:
        return self.policy.join_features(members, [features[group] for group in micro.groups])

    def _reference_features(self, micro: MicroBatch, members: Sequence[ResponseGroup]) -> torch.Tensor | None:
        """Where the tower is frozen it is the reference's tower too."""
        assert self.reference is not None
        if not self.policy.vision.trains:
            return self._features(micro, members, self.vision.features)
        if self.reference_vision is not None:
            features = [self.reference_vision.features[group] for group in micro.groups]
        else:
            prompts = [member.prompt for member in members]
            features = self.reference.vision.encode(prompts, sequence=self.engine.sequence)
        return self.reference.join_features(members, features)

    def _loss(
        self,
        pieces: Sequence[Piece],
        logprobs: torch.Tensor,
        entropies: torch.Tensor,
        ref_logprobs: torch.Tensor | None,
    ) -> torch.Tensor:
        tokens = self._tokens(pieces, logprobs, entropies, ref_logprobs)
        loss, metrics = self.policy_loss(tokens)
        if ref_logprobs is not None:
            term, of_term = kl_term(tokens, self.algorithm)
            loss = loss + term
            self.tally.add_all(of_term, len(logprobs))
        if self.algorithm.entropy_coef:
            loss = loss + entropy_bonus(tokens, self.algorithm)[0]
        self.tally.add(LOSS, loss.detach())
        self.tally.add(RESPONSE_TOKENS, len(logprobs))
        self.tally.add_all({ENTROPY: entropies.detach().sum(), **metrics}, len(logprobs))
        if self.measure_mismatch:
            self._sum_mismatch(pieces, logprobs.detach())
        return loss

    def _tokens(
        self,
        pieces: Sequence[Piece],
        logprobs: torch.Tensor,
        entropies: torch.Tensor,
        ref_logprobs: torch.Tensor | None,
    ) -> ResponseTokens:
        """What the loss of a pass is made of."""
        algorithm = self.algorithm
        lengths, per_token = self._per_token(pieces)
        behaviour = per_token.pop("behaviour_logprobs", logprobs.detach())
        importance = None
        if algorithm.importance_cap is not None:
            importance = importance_weights(
                behaviour, self._recorded(pieces), algorithm.importance_cap, algorithm.log_ratio_clamp
            )
            self.tally.add(IMPORTANCE, importance.sum(), len(logprobs))
        return ResponseTokens(
            logprobs,
            behaviour,
            **per_token,
            lengths=lengths,
            importance=importance,
            entropies=entropies,
            ref_logprobs=ref_logprobs,
        )

    def _recorded(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """fp32 [R]: log-probabilities as recorded at generation."""
        return self._to_device(
            torch.cat([self.groups[group].rollouts[i].rollout_logprobs for group, i in _rollouts_of(pieces)])
        )

    def _sum_mismatch(self, pieces: Sequence[Piece], logprobs: torch.Tensor) -> None:
        """Only over what these weights sampled: elsewhere the difference is that between the weights."""
        members = [(self.groups[group], i) for group, i in _rollouts_of(pieces)]
        trained = logprobs.split([len(group.rollouts[i].token_ids) for group, i in members])
        pairs = [
            (group.rollouts[i].rollout_logprobs, own)
            for (group, i), own in zip(members, trained, strict=True)
            if group.policy_version == self.policy.weights_version
        ]
        if not pairs:
            return
        recorded = self._to_device(torch.cat([sampled for sampled, _ in pairs]))
        sums = mismatch_sums(torch.cat([own for _, own in pairs]), recorded, self.algorithm.log_ratio_clamp)
        self.tally.add_all(sums, len(recorded))

    def _per_token(self, pieces: Sequence[Piece]) -> tuple[list[int], dict[str, torch.Tensor]]:
        """Tokens of each response; advantages, loss weights and, where given, behaviour log-probabilities, fp32 [R]."""
        members = _rollouts_of(pieces)
        lengths = [len(self.groups[group].rollouts[i].token_ids) for group, i in members]
        repeats = torch.tensor(lengths)
        advantages = torch.cat([self._advantages(group, i) for group, i in members])
        weights = torch.tensor([self.weights[group][i] for group, i in members], dtype=torch.float32)
        values = {"advantages": advantages, "weights": weights.repeat_interleave(repeats)}
        if self.behaviour_logprobs is not None:
            values["behaviour_logprobs"] = torch.cat([self.behaviour_logprobs[group][i] for group, i in members])
        return lengths, {name: self._to_device(value) for name, value in values.items()}

    def _advantages(self, group: int, index: int) -> torch.Tensor:
        """fp32 [R] of one rollout."""
        chosen = self.groups[group]
        if chosen.token_advantages:
            return chosen.token_advantages[index]
        return torch.full((len(chosen.rollouts[index].token_ids),), chosen.advantages[index], dtype=torch.float32)

    def _to_device(self, values: torch.Tensor) -> torch.Tensor:
        """Without waiting for what the device has to do before."""
        return values.to(self.policy.device, non_blocking=True)


def _rollouts_of(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """Group and place in it of each response, in the order in which they are packed."""
    return [(piece.group, i) for piece in pieces for i in piece.responses]


def _nothing(logprobs: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
    """Zero, through whatever of a pass carries a graph: on a rank that has work the loss reads the same of it."""
    return (logprobs.sum() + entropies.sum()) * 0.0
