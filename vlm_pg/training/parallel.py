"""Collective work of a step's processes; ``Engine.parallel`` is None in a run of one process.

A data rank is one process or several (its sequence ranks). Each process loads, samples and rewards its own questions.
Sequence ranks need the same questions for the vision tower, whose frames they divide, and for scoring and updates,
whose streams they divide.

Before an update, rollouts stay where they were sampled, or are assigned to data ranks so that all have equal work
(``training.balance``). All sequence ranks of a data rank get the same ones. Rewards and advantages are complete by
then, and loss weights count over all ranks, so the assignment does not change the gradient.

Ranks that reduce gradients (ZeRO-2) or gather weights (ZeRO-3) together must run the same sequence of forward and
backward passes, or their collectives do not match. A rank with less work runs passes of weight zero.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal, Protocol

import torch

from vlm_pg.batching.balance import Assignment, assign_groups
from vlm_pg.batching.cost import CostModel, GroupWork
from vlm_pg.batching.plan import MicroBatch
from vlm_pg.distributed import (
    RankLayout,
    SequenceGroup,
    exchange_objects,
    gather_objects,
    max_over_ranks,
    min_over_ranks,
)
from vlm_pg.errors import ConfigError
from vlm_pg.metrics import Metric
from vlm_pg.models.micro_batches import Slot
from vlm_pg.models.policy import Policy
from vlm_pg.models.reference import ScoringPolicy
from vlm_pg.rollout.contracts import Sampler, Scorer
from vlm_pg.rollout.engine import RolloutEngine, stop_token_ids
from vlm_pg.rollout.scoring import PolicyScorer
from vlm_pg.training.groups import Update, trains
from vlm_pg.training.step_features import FeatureExchange, FeatureTransfer, StepFeatures
from vlm_pg.types import Prompt, RecordedForward, RecordedRows, ResponseGroup, Rollout, RolloutGroup

# Number of a group over all ranks, and indices of some of its rollouts.
GroupPart = tuple[int, tuple[int, ...]]


class Engine(Protocol):
    """The part of ``engines.Engine`` used here."""

    policy: Policy
    ranks: RankLayout
    sequence: SequenceGroup
    everyone: SequenceGroup
    parallel: Parallel | None

    def gathered_parameters(self) -> AbstractContextManager[None]: ...


class Parallel:
    """The processes of a run.

    ``prompts``: the step's prompts on all sequence ranks, by sample id. ``costs``: cost model that balances work over
    data ranks; None: every data rank trains on the groups it sampled.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.costs: CostModel | None = None
        self.prompts: dict[str, Prompt] = {}
        self._own = slice(0)

    def balance_work(self) -> None:
        """Assign rollouts to data ranks by estimated training cost in all following updates."""
        if self.engine.ranks.data_size > 1:
            from vlm_pg.models.memory_sizes import LanguageShape
            from vlm_pg.plan.flops import cost_model

            policy = self.engine.policy
            self.costs = cost_model(LanguageShape.of(policy.family, policy.model.config), policy.checkpointing)

    def gather_prompts(self, own: Sequence[Prompt]) -> list[Prompt]:
        """The prompts of all sequence ranks, in rank order, pixels included."""
        of_ranks = self.engine.sequence.gather(list(own))
        first = sum(map(len, of_ranks[: self.engine.sequence.rank]))
        self._own = slice(first, first + len(own))
        return [prompt for of_rank in of_ranks for prompt in of_rank]

    def own(self, gathered: Sequence[Prompt]) -> Sequence[Prompt]:
        """This process's share of the prompts gathered last."""
        return gathered[self._own]

    def generate(
        self,
        sampler: Sampler,
        gathered: Sequence[Prompt],
        step: int | str,
        split: Literal["auto", "questions", "prompts"],
    ) -> list[tuple[Rollout, ...]]:
        """Rollouts of this process's prompts, sampled by all sequence ranks together where that is better."""
        sequence = self.engine.sequence
        if not (isinstance(sampler, RolloutEngine) and sample_together(sequence, sampler, gathered, split)):
            return sampler.generate(self.own(gathered), step)
        everywhere = sequence.gather(sampler.generate(gathered, step, sequence))
        own = range(len(gathered))[self._own]
        return [tuple(rollout for of_rank in everywhere for rollout in of_rank[index]) for index in own]

    def score(self, scorer: Scorer, groups: Sequence[ResponseGroup], temperature: float) -> list[list[torch.Tensor]]:
        """``Scorer.score`` of this process's groups, on streams that sequence ranks share.

        Args:
            groups: of prompts in ``prompts``; may be empty on some ranks.
        """
        sequence = self.engine.sequence
        # Where weights are gathered in lockstep, no rank may wait for another one.
        if sequence.size == 1 or self.engine.policy.lockstep is not None or not isinstance(scorer, PolicyScorer):
            return scorer.score(groups, temperature)
        here = {group.prompt.sample_id: group.prompt for group in groups} | self.prompts
        of_ranks = sequence.gather([(group.prompt.sample_id, group.responses) for group in groups])
        everything = [ResponseGroup(here[name], responses) for of_rank in of_ranks for name, responses in of_rank]
        scored = scorer.score(everything, temperature, sequence)
        first = sum(map(len, of_ranks[: sequence.rank]))
        return scored[first : first + len(groups)]

    def slots(self, micro_batches: Sequence[MicroBatch], recorded: Collection[MicroBatch]) -> list[Slot]:
        """The common order: chunked micro-batches, most chunks first, then single passes. A collective.

        Args:
            micro_batches: this rank's, in that order.
            recorded: those of recorded forwards, from which all ranks start in a slot, or none; first of their kind.
        """
        device = self.engine.policy.device
        sooner = sorted(micro_batches, key=lambda micro: micro not in recorded)
        chunked, plain = ([m for m in sooner if (len(m.chunks) > 1) is cut] for cut in (True, False))
        counts = max_over_ranks({"chunked": float(len(chunked)), "plain": float(len(plain))}, device)
        lengths = {f"slot {index:06d}": 0.0 for index in range(int(counts["chunked"]))}
        lengths |= {f"slot {index:06d}": float(len(micro.chunks)) for index, micro in enumerate(chunked)}
        most = max_over_ranks(lengths, device) if lengths else {}
        idle: list[MicroBatch | None] = [None]
        own_chunked = chunked + idle * (len(most) - len(chunked))
        own_plain = plain + idle * (int(counts["plain"]) - len(plain))
        slots = [Slot(micro, int(most[f"slot {index:06d}"])) for index, micro in enumerate(own_chunked)]
        slots += [Slot(micro, 1) for micro in own_plain]
        here = {f"slot {index:06d}": float(one.micro in (None, *recorded)) for index, one in enumerate(slots)}
        everywhere = min_over_ranks(here, device) if here else {}
        return [slot._replace(recorded=bool(of_all)) for slot, of_all in zip(slots, everywhere.values(), strict=True)]

    @property
    def filler(self) -> ResponseGroup:
        """Work of an idle rank: two tokens of text and a response of two, of weight zero, its forward made up."""
        policy = self.engine.policy
        token = torch.tensor([stop_token_ids(policy)[0]] * 2)
        types, positions_3P = torch.zeros(2, dtype=torch.int64), torch.arange(2).expand(3, -1)
        logprobs = torch.zeros(2, device=policy.device)
        prompt, own = (
            RecordedRows(
                rows,
                {
                    kind: logprobs.new_zeros(rows, *shape, dtype=dtype)
                    for kind, (shape, dtype) in policy.recorded_kinds().items()
                },
            )
            for rows in (2, 1)
        )
        forward = RecordedForward([prompt], [own], logprobs, logprobs)
        return ResponseGroup(Prompt("filler", token, types, positions_3P), (token,), (forward,))


def sample_together(
    sequence: SequenceGroup,
    sampler: RolloutEngine,
    prompts: Sequence[Prompt],
    split: Literal["auto", "questions", "prompts"],
) -> bool:
    """Whether all sequence ranks sample every prompt together; the same answer on all of them.

    Raises:
        ConfigError: prompts are to be divided, and cannot be.
    """
    if sequence.size == 1 or split == "questions":
        return False
    policy, settings = sampler.policy, sampler.settings
    # In lockstep, a rank that waits for another one's prompt holds up its weights.
    possible = policy.lockstep is None and policy.settings.share_prefix
    possible &= settings.num_generations >= sequence.size
    if settings.divide_prefix == "always" and not possible:
        raise ConfigError(
            "rollout.divide_prefix is always, but under ZeRO-3 all weights do not fit (rollout.gather), so they are "
            "gathered layer by layer, and processes in lockstep cannot sample one prompt together. Set "
            "rollout.divide_prefix=never, or make room for rollout.gather=all."
        )
    if not possible:
        return False
    together = split == "prompts" or settings.divide_prefix == "always" or len(prompts) < sequence.size
    return together or sampler.too_long_for_one(prompts, sequence)


@dataclass(frozen=True)
class Share:
    """What this data rank trains on in an update, ``vision`` as in ``Update``; ``metrics`` of the balance.

    ``encoded_here``: prompts whose media this data rank encodes, for itself and for others, which get the features by
    ``exchange``; None where rollouts stay where they were sampled.
    """

    groups: Sequence[RolloutGroup]
    vision: StepFeatures | None
    metrics: dict[Metric, float] = field(default_factory=dict)
    encoded_here: Sequence[Prompt] = ()
    exchange: FeatureExchange | None = None

    def encoded_again(self, engine: Engine) -> Share:
        """With visual features under the present weights. A collective.

        Without an exchange the update encodes the prompts, which have their pixels.
        """
        if self.exchange is None:
            return replace(self, vision=None)
        vision = StepFeatures(engine.policy, self.encoded_here, engine.sequence, engine.everyone)
        return replace(self, groups=_with_features(self.groups, vision, self.exchange), vision=vision)


class StepShares:
    """This data rank's share of each mini-batch of a step: assigned before the first update on it, then the same.

    ``are_balanced``: groups may have changed ranks.

    Args:
        token_budget, reference: as in ``assign_update``.
        reuse: every mini-batch is trained on more than once.
    """

    def __init__(self, engine: Engine, reference: ScoringPolicy | None, token_budget: int, reuse: bool):
        self._engine, self._reference, self._token_budget, self._reuse = engine, reference, token_budget, reuse
        self._shares: dict[int, Share] = {}
        self.are_balanced = False

    def of(self, number: int, own: Update) -> tuple[Update, dict[Metric, float]]:
        """The update on mini-batch ``number``, of which ``own`` has this process's groups; metrics of the balance."""
        vision_trains = self._engine.policy.vision.trains
        share = self._shares.get(number)
        if share is None:
            share = assign_update(self._engine, own, self._token_budget, self._reference)
            self.are_balanced |= bool(share.metrics)
            if self._reuse:
                # Features of a trained tower are stale after an update.
                groups = [group.without_features() for group in share.groups]
                self._shares[number] = replace(share, groups=groups, vision=None) if vision_trains else share
        elif vision_trains:
            share = share.encoded_again(self._engine)
        return replace(own, groups=share.groups, vision=share.vision), share.metrics


@dataclass(frozen=True)
class _GroupInfo:
    """What every rank knows of a group: ``work`` of the rollouts that train, whose indices are ``trained``, in units
    that stay together.

    ``visual_tokens``: lower bound of the prefix that prompts with equal media share.
    """

    sample_id: str
    work: GroupWork
    trained: tuple[tuple[int, ...], ...]
    untrained: tuple[int, ...]
    visual_tokens: int

    @classmethod
    def of(cls, group: RolloutGroup, data_rank: int) -> _GroupInfo:
        weights, prompt = group.rollout_weights, group.prompt
        trained = tuple(unit for unit in group.units if all(weights[index] for index in unit))
        untrained = tuple(index for index, weight in enumerate(weights) if not weight)
        responses = tuple(sum(len(group.rollouts[index].token_ids) - 1 for index in unit) for unit in trained)
        work = GroupWork(prompt.num_tokens, responses, media_key=prompt.content_key, rank=data_rank)
        return cls(prompt.sample_id, work, trained, untrained, prompt.num_visual_tokens)


def assign_update(engine: Engine, own: Update, token_budget: int, reference: ScoringPolicy | None = None) -> Share:
    """The groups of an update that this data rank trains on. A collective.

    Prompts leave without pixels: their features are made where they were sampled, and sent; those of a trained tower
    get their gradients back. Without sharing, a prompt is encoded wherever it is used, and rollouts stay with the data
    rank that sampled them.

    Args:
        own: this process's groups; ``Parallel.prompts`` has the prompts of all its sequence ranks.
        token_budget: most tokens of a pass.
        reference: reference policy of a KL term in the loss.
    """
    ranks, policy, parallel = engine.ranks, engine.policy, engine.parallel
    assert parallel is not None
    of_ranks = gather_objects([_GroupInfo.of(group, ranks.data_rank) for group in own.groups])
    first = sum(map(len, of_ranks[: ranks.rank]))
    infos = [info for of_rank in of_ranks for info in of_rank]
    assignment = None
    if parallel.costs is not None and ranks.data_size > 1 and policy.settings.share_prefix:
        assignment = _assignment(infos, ranks.data_size, token_budget, parallel.costs)
    parts = _group_parts(infos, assignment, ranks.data_size)
    outgoing = _outgoing(engine, own, first, parts)
    received = sorted((item for of_rank in exchange_objects(outgoing) for item in of_rank), key=lambda item: item[0])
    here = {group.sample.sample_id: group.prompt for group in own.groups} | parallel.prompts
    groups = [replace(group, prompt=group.prompt or here[group.sample.sample_id]) for _, group in received]
    # Tensors of recorded forwards do not travel; those of rollouts that stay do not have to.
    stays = {
        number: own.groups[number - first].only(chosen)
        for number, chosen in parts[ranks.data_rank]
        if first <= number < first + len(own.groups)
    }
    groups = [
        replace(group, rollouts=stays[number].rollouts) if number in stays else group
        for (number, _), group in zip(received, groups, strict=True)
    ]
    if assignment is None:
        return Share(groups, own.vision)
    encoded_here = [here[info.sample_id] for info in infos if info.trained and info.work.rank == ranks.data_rank]
    exchange = FeatureExchange(ranks, _transfers(infos, parts))
    vision = own.vision
    if vision is None:
        # A trained tower is entered by all ranks together; a frozen one's features are cached since sampling.
        with nullcontext() if policy.vision.trains else engine.gathered_parameters():
            shared = (engine.sequence, engine.everyone) if policy.vision.trains else ()
            vision = StepFeatures(policy, encoded_here, *shared)
    groups = _with_features(groups, vision, exchange)
    if isinstance(reference, Policy) and policy.vision.trains:
        of_reference = _with_features(groups, StepFeatures(reference, encoded_here, engine.sequence), exchange)
        groups = [
            replace(group, reference_features=other.prompt.features)
            for group, other in zip(groups, of_reference, strict=True)
        ]
    return Share(groups, vision, assignment.metrics(), encoded_here, exchange)


def _assignment(infos: Sequence[_GroupInfo], data_ranks: int, token_budget: int, costs: CostModel) -> Assignment:
    """Of the groups that train, numbered among themselves."""
    train = [info for info in infos if info.trained]

    def shared(i: int, j: int) -> int:
        one, other = train[i], train[j]
        same = one.work.media_key and one.work.media_key == other.work.media_key
        return min(one.visual_tokens, other.visual_tokens) if same else 0

    return assign_groups([info.work for info in train], data_ranks, token_budget, costs, shared)


def _group_parts(infos: Sequence[_GroupInfo], assignment: Assignment | None, data_ranks: int) -> list[list[GroupPart]]:
    """For each data rank, the groups and rollouts it gets; every rollout once."""
    parts: list[list[GroupPart]] = [[] for _ in range(data_ranks)]
    if assignment is None:
        for number, info in enumerate(infos):
            parts[info.work.rank].append((number, tuple(sorted((*chain(*info.trained), *info.untrained)))))
        return parts
    numbers = [number for number, info in enumerate(infos) if info.trained]
    started: set[int] = set()
    for rank, pieces in enumerate(assignment.pieces):
        for piece in pieces:
            number = numbers[piece.group]
            info = infos[number]
            chosen = tuple(chain(*(info.trained[index] for index in piece.responses)))
            # Pruned rollouts do not train, and may count in the average: they go with the first part of their group.
            parts[rank].append((number, chosen if number in started else tuple(sorted(chosen + info.untrained))))
            started.add(number)
    for number, info in enumerate(infos):
        if not info.trained:
            parts[info.work.rank].append((number, info.untrained))
    return [sorted(of_rank) for of_rank in parts]


def _transfers(infos: Sequence[_GroupInfo], parts: Sequence[Sequence[GroupPart]]) -> Iterator[FeatureTransfer]:
    """Of all media that a data rank trains on and has not encoded: from the first that has."""
    encoders: dict[str, list[int]] = {}
    for info in infos:
        if info.trained and info.visual_tokens:
            encoders.setdefault(info.work.media_key, []).append(info.work.rank)
    for data_rank, of_rank in enumerate(parts):
        for info in (infos[number] for number, _ in of_rank):
            key = info.work.media_key
            if info.trained and data_rank not in encoders.get(key, [data_rank]):
                yield FeatureTransfer(key, info.visual_tokens, min(encoders[key]), data_rank)


def _with_features(
    groups: Sequence[RolloutGroup], features: StepFeatures, exchange: FeatureExchange
) -> list[RolloutGroup]:
    """The groups, those that train with visual features. A collective."""
    prompts = iter(features.exchanged([group.prompt for group in groups if trains(group)], exchange))
    return [replace(group, prompt=next(prompts)) if trains(group) else group for group in groups]


def _outgoing(
    engine: Engine, own: Update, first: int, parts: Sequence[Sequence[GroupPart]]
) -> list[list[tuple[int, RolloutGroup]]]:
    """This process's groups (the first has number ``first``) with their numbers, for each process that trains on them.

    Without the prompt where the receiver has it; else with the number of its pixels alone: a rank that gets the
    features does not need them, and they are many times as large.
    """
    outgoing: list[list[tuple[int, RolloutGroup]]] = []
    absent: Any = None
    for data_rank, of_rank in enumerate(parts):
        packed = []
        for number, chosen in of_rank:
            if not first <= number < first + len(own.groups):
                continue
            group, prompt = own.groups[number - first].only(chosen), absent
            if data_rank != engine.ranks.data_rank:
                pixels = None if group.prompt.pixel_values is None else group.prompt.pixel_values.to("meta")
                preview = group.prompt.preview if pixels is None else ()
                prompt = replace(group.prompt, pixel_values=pixels, features=None, preview=preview)
                group = replace(group, rollouts=tuple(replace(one, forward=None) for one in group.rollouts))
            packed.append((number, replace(group, prompt=prompt)))
        outgoing += [packed] * engine.ranks.sequence_size
    return outgoing
