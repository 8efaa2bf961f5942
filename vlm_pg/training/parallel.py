"""What several processes do together in a step. A run of one process has none of it: ``Engine.parallel`` is None.

A data rank is one process or several, its sequence ranks. Each process loads, samples and rewards questions of its own.
Sequence ranks need the same questions for the vision tower, whose frames they divide, and for scoring and updates,
whose streams they divide.

Before an update rollouts stay where they were sampled, or are dealt anew so that all data ranks have equal work
(``training.balance``). All sequence ranks of a data rank get the same ones. Rewards and advantages are complete before,
and loss weights count over all ranks: which rank computes what does not change the gradient.

Ranks that reduce gradients (ZeRO-2) or gather weights (ZeRO-3) together must run the same sequence of forward and
backward passes, or their collectives meet the wrong partners. A rank with less to do runs passes of weight zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch

from vlm_pg.batching.balance import Assignment, assign_groups
from vlm_pg.batching.cost import CostModel, GroupWork
from vlm_pg.batching.plan import MicroBatch
from vlm_pg.distributed import RankLayout, SequenceGroup, exchange_objects, gather_objects, max_over_ranks
from vlm_pg.errors import ConfigError
from vlm_pg.metrics import Metric
from vlm_pg.models.micro_batches import Slot
from vlm_pg.models.policy import Policy
from vlm_pg.models.reference import ScoringPolicy
from vlm_pg.rollout.contracts import Sampler, Scorer
from vlm_pg.rollout.engine import RolloutEngine, stop_token_ids
from vlm_pg.rollout.scoring import PolicyScorer
from vlm_pg.training.groups import Update, trains
from vlm_pg.training.step_features import FeatureRoute, Passage, StepFeatures
from vlm_pg.types import Prompt, ResponseGroup, Rollout, RolloutGroup

# Number of a group over all ranks, and some of its rollouts.
Place = tuple[int, tuple[int, ...]]


class Engine(Protocol):
    """What is needed of ``engines.Engine``, which makes the object below."""

    policy: Policy
    ranks: RankLayout
    sequence: SequenceGroup
    everyone: SequenceGroup
    parallel: Parallel | None

    def gathered_parameters(self) -> AbstractContextManager[None]: ...


class Parallel:
    """The processes of a run.

    ``prompts``: by sample id, those of the step on all sequence ranks.

    Args:
        costs: what work over data ranks is balanced by; None: every data rank trains on the groups it sampled.
    """

    def __init__(self, engine: Engine, costs: CostModel | None = None):
        self.engine, self.costs = engine, costs
        self.prompts: dict[str, Prompt] = {}
        self._own = slice(0)

    def balance_work(self) -> None:
        """From now on updates deal rollouts over data ranks by the estimated cost of training on them."""
        if self.engine.ranks.data_size > 1:
            from vlm_pg.models.memory_sizes import LanguageShape
            from vlm_pg.plan.flops import cost_model

            policy = self.engine.policy
            self.costs = cost_model(LanguageShape.of(policy.family, policy.model.config), policy.checkpointing)

    def gather_prompts(self, own: Sequence[Prompt]) -> list[Prompt]:
        """The prompts of all sequence ranks, in their order, pixels included."""
        of_ranks = self.engine.sequence.gather(list(own))
        first = sum(map(len, of_ranks[: self.engine.sequence.rank]))
        self._own = slice(first, first + len(own))
        return [prompt for of_rank in of_ranks for prompt in of_rank]

    def own(self, gathered: Sequence[Prompt]) -> Sequence[Prompt]:
        """This process's of the prompts gathered last."""
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
        places = range(len(gathered))[self._own]
        return [tuple(rollout for of_rank in everywhere for rollout in of_rank[place]) for place in places]

    def score(self, scorer: Scorer, groups: Sequence[ResponseGroup], temperature: float) -> list[list[torch.Tensor]]:
        """Log-probabilities of this process's groups, as ``Scorer.score``, from streams that sequence ranks share.

        Args:
            groups: of prompts in ``prompts``; a rank may have none.
        """
        sequence = self.engine.sequence
        # Where weights are gathered in turns, no rank may wait for another one.
        if sequence.size == 1 or self.engine.policy.lockstep is not None or not isinstance(scorer, PolicyScorer):
            return scorer.score(groups, temperature)
        here = {group.prompt.sample_id: group.prompt for group in groups} | self.prompts
        of_ranks = sequence.gather([(group.prompt.sample_id, group.responses) for group in groups])
        everybody = [ResponseGroup(here[name], responses) for of_rank in of_ranks for name, responses in of_rank]
        scored = scorer.score(everybody, temperature, sequence)
        first = sum(map(len, of_ranks[: sequence.rank]))
        return scored[first : first + len(groups)]

    def slots(self, micro_batches: Sequence[MicroBatch]) -> list[Slot]:
        """The order of micro-batches that all ranks follow, as ``agreed_slots``."""
        return agreed_slots(micro_batches, self.engine.policy.device)

    def shares(self, reference: ScoringPolicy | None, token_budget: int, again: bool) -> StepShares:
        """As ``StepShares``."""
        return StepShares(self.engine, reference, token_budget, again)

    @property
    def filler(self) -> ResponseGroup:
        """What a rank without work of its own runs: two tokens of text and a response of two; its loss counts zero."""
        token = torch.tensor([stop_token_ids(self.engine.policy)[0]] * 2)
        types, positions_3P = torch.zeros(2, dtype=torch.int64), torch.arange(2).expand(3, -1)
        return ResponseGroup(Prompt("filler", token, types, positions_3P), (token,))


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
    # Where weights are gathered in turns, a rank that waited for another one's prompt would hold up its weights.
    possible = policy.lockstep is None and policy.settings.share_prefix
    possible &= settings.num_generations >= sequence.size
    if settings.divide_prefix == "always" and not possible:
        raise ConfigError(
            "rollout.divide_prefix is always, but under ZeRO-3 all weights do not fit (rollout.gather), so they are "
            "gathered layer by layer, and processes that take turns cannot sample one prompt together. Set "
            "rollout.divide_prefix=never, or make room for rollout.gather=all."
        )
    if not possible:
        return False
    together = split == "prompts" or settings.divide_prefix == "always" or len(prompts) < sequence.size
    return together or sampler.too_long_for_one(prompts, sequence)


def agreed_slots(own: Sequence[MicroBatch], device: torch.device) -> list[Slot]:
    """The common order: chunked micro-batches, most chunks first, then single passes. A collective.

    Args:
        own: this rank's micro-batches in that order.
    """
    chunked, plain = ([m for m in own if (len(m.chunks) > 1) == is_chunked] for is_chunked in (True, False))
    counts = max_over_ranks({"chunked": float(len(chunked)), "plain": float(len(plain))}, device)
    chunked_slots, plain_slots = int(counts["chunked"]), int(counts["plain"])
    lengths = [float(len(micro.chunks)) for micro in chunked] + [0.0] * (chunked_slots - len(chunked))
    most = {f"place {place:06d}": length for place, length in enumerate(lengths)}
    if most:
        most = max_over_ranks(most, device)
    slots = [
        Slot(chunked[place] if place < len(chunked) else None, int(most[f"place {place:06d}"]))
        for place in range(chunked_slots)
    ]
    return slots + [Slot(plain[place] if place < len(plain) else None, 1) for place in range(plain_slots)]


@dataclass(frozen=True)
class Share:
    """What this data rank trains on in an update, ``vision`` as in ``Update``; ``metrics`` say how even the deal is.

    ``made_here``: prompts whose media this data rank encodes for itself and for others, which get them by ``route``; it
    is None where rollouts stay where they are.
    """

    groups: Sequence[RolloutGroup]
    vision: StepFeatures | None
    metrics: dict[Metric, float] = field(default_factory=dict)
    made_here: Sequence[Prompt] = ()
    route: FeatureRoute | None = None

    def encoded_anew(self, engine: Engine) -> Share:
        """With visual features under weights that have changed since. A collective.

        Without a route the update makes them, for it has the prompts with their pixels.
        """
        if self.route is None:
            return replace(self, vision=None)
        made = StepFeatures(engine.policy, self.made_here, engine.sequence, engine.everyone)
        return replace(self, groups=_dealt(self.groups, made, self.route), vision=made)


class StepShares:
    """What this data rank trains on in each mini-batch of a step: dealt before the first update on it, then the same.

    ``are_dealt``: groups may have changed ranks.

    Args:
        token_budget, reference: as in ``deal_update``.
        again: every mini-batch will be trained on more than once.
    """

    def __init__(self, engine: Engine, reference: ScoringPolicy | None, token_budget: int, again: bool):
        self._engine, self._reference, self._token_budget, self._again = engine, reference, token_budget, again
        self._shares: dict[int, Share] = {}
        self.are_dealt = False

    def of(self, number: int, own: Update) -> tuple[Update, dict[Metric, float]]:
        """The update on mini-batch ``number``, of which ``own`` has this process's groups; and metrics of the deal."""
        vision_trains = self._engine.policy.vision.trains
        share = self._shares.get(number)
        if share is None:
            share = deal_update(self._engine, own, self._token_budget, self._reference)
            self.are_dealt |= bool(share.metrics)
            if self._again:
                kept = share
                if vision_trains:  # of a trained tower's features none is kept over an update
                    groups = [group.without_features() for group in share.groups]
                    kept = replace(share, groups=groups, vision=None)
                self._shares[number] = kept
        elif vision_trains:
            share = share.encoded_anew(self._engine)
        return replace(own, groups=share.groups, vision=share.vision), share.metrics


@dataclass(frozen=True)
class _Known:
    """What every rank knows of a group: ``work`` of the rollouts that train, whose places are ``trained``.

    ``visual_tokens``: how long the part of the prompt is at least that prompts with equal media share.
    """

    sample_id: str
    work: GroupWork
    trained: tuple[int, ...]
    untrained: tuple[int, ...]
    visual_tokens: int


@dataclass(frozen=True)
class _Parcel:
    """Some rollouts of group ``number`` (over all ranks) on their way; without its prompt where the receiver has it."""

    number: int
    group: RolloutGroup


def deal_update(engine: Engine, own: Update, token_budget: int, reference: ScoringPolicy | None = None) -> Share:
    """The groups of an update that this data rank trains on. A collective.

    Prompts leave without pixels: their features are made where they were sampled, and go from there; a trained tower's
    get their gradients back. Where nothing is shared a prompt is encoded wherever it is used: there rollouts stay with
    the data rank that sampled them.

    Args:
        own: this process's groups; ``Parallel.prompts`` has the prompts of all its sequence ranks.
        token_budget: most tokens of a pass.
        reference: what a KL term of the loss measures from.
    """
    ranks, policy, parallel = engine.ranks, engine.policy, engine.parallel
    assert parallel is not None
    known = gather_objects([_known(group, ranks.data_rank) for group in own.groups])
    first = sum(map(len, known[: ranks.rank]))
    everything = [group for of_rank in known for group in of_rank]
    deal = None
    if parallel.costs is not None and ranks.data_size > 1 and policy.settings.share_prefix:
        deal = _deal(everything, ranks.data_size, token_budget, parallel.costs)
    places = _places(everything, deal, ranks.data_size)
    parcels = _parcels(engine, own, first, places)
    received = sorted((p for of_rank in exchange_objects(parcels) for p in of_rank), key=lambda p: p.number)
    here = {group.sample.sample_id: group.prompt for group in own.groups} | parallel.prompts
    groups = [replace(p.group, prompt=p.group.prompt or here[p.group.sample.sample_id]) for p in received]
    if deal is None:
        return Share(groups, own.vision)
    trained_here = [known.sample_id for known in everything if known.trained and known.work.rank == ranks.data_rank]
    made_here = [here[sample_id] for sample_id in trained_here]
    route = FeatureRoute(ranks, _passages(everything, places))
    vision = own.vision or _encoded(engine, made_here)
    groups = _dealt(groups, vision, route)
    if isinstance(reference, Policy) and policy.vision.trains:
        of_reference = _dealt(groups, StepFeatures(reference, made_here, engine.sequence), route)
        groups = [
            replace(group, reference_features=other.prompt.features)
            for group, other in zip(groups, of_reference, strict=True)
        ]
    return Share(groups, vision, deal.metrics(), made_here, route)


def _known(group: RolloutGroup, rank: int) -> _Known:
    trained = tuple(place for place, weight in enumerate(group.rollout_weights) if weight)
    untrained = tuple(place for place, weight in enumerate(group.rollout_weights) if not weight)
    prompt = group.prompt
    responses = tuple(len(group.rollouts[place].token_ids) - 1 for place in trained)
    work = GroupWork(prompt.num_tokens, responses, media_key=prompt.content_key, rank=rank)
    return _Known(prompt.sample_id, work, trained, untrained, prompt.num_visual_tokens)


def _deal(everything: Sequence[_Known], data_ranks: int, token_budget: int, costs: CostModel) -> Assignment:
    """Of the groups that train, numbered among themselves."""
    train = [known for known in everything if known.trained]

    def shared(i: int, j: int) -> int:
        one, other = train[i], train[j]
        same = one.work.media_key and one.work.media_key == other.work.media_key
        return min(one.visual_tokens, other.visual_tokens) if same else 0

    works = [known.work for known in train]
    return assign_groups(works, data_ranks, token_budget, costs, shared)


def _places(everything: Sequence[_Known], deal: Assignment | None, data_ranks: int) -> list[list[Place]]:
    """For each data rank: number of a group, and which of its rollouts; every rollout once."""
    found: list[list[Place]] = [[] for _ in range(data_ranks)]
    if deal is None:
        for number, known in enumerate(everything):
            found[known.work.rank].append((number, tuple(sorted(known.trained + known.untrained))))
        return found
    numbers = [number for number, known in enumerate(everything) if known.trained]
    begun: set[int] = set()
    for rank, pieces in enumerate(deal.pieces):
        for piece in pieces:
            number = numbers[piece.group]
            known = everything[number]
            chosen = tuple(known.trained[place] for place in piece.responses)
            # Pruned rollouts do not train, and may count in the average: with the first part of their group.
            found[rank].append((number, chosen if number in begun else tuple(sorted(chosen + known.untrained))))
            begun.add(number)
    for number, known in enumerate(everything):
        if not known.trained:
            found[known.work.rank].append((number, known.untrained))
    return [sorted(of_rank) for of_rank in found]


def _passages(everything: Sequence[_Known], places: Sequence[Sequence[Place]]) -> Iterator[Passage]:
    """Of all media that a data rank trains on and has not encoded: from the first that has."""
    makers: dict[str, list[int]] = {}
    for known in everything:
        if known.trained and known.visual_tokens:
            makers.setdefault(known.work.media_key, []).append(known.work.rank)
    for data_rank, of_rank in enumerate(places):
        for known in (everything[number] for number, _ in of_rank):
            if known.trained and data_rank not in makers.get(known.work.media_key, [data_rank]):
                maker = min(makers[known.work.media_key])
                yield Passage(known.work.media_key, known.visual_tokens, maker, data_rank)


def _dealt(groups: Sequence[RolloutGroup], features: StepFeatures, route: FeatureRoute) -> list[RolloutGroup]:
    """The groups, those that train with visual features. A collective."""
    prompts = iter(features.deal([group.prompt for group in groups if trains(group)], route))
    return [replace(group, prompt=next(prompts)) if trains(group) else group for group in groups]


def _encoded(engine: Engine, prompts: Sequence[Prompt]) -> StepFeatures:
    """Features of the media that this data rank encodes."""
    if engine.policy.vision.trains:
        return StepFeatures(engine.policy, prompts, engine.sequence, engine.everyone)
    # Kept since the rollouts were sampled, by all processes of the data rank.
    with engine.gathered_parameters():
        return StepFeatures(engine.policy, prompts)


def _parcels(engine: Engine, own: Update, first: int, places: Sequence[Sequence[Place]]) -> list[list[_Parcel]]:
    """This process's groups, packed for each process that trains on them.

    Args:
        first: number of this process's first group.
    """
    parcels: list[list[_Parcel]] = []
    nothing: Any = None
    for data_rank, of_rank in enumerate(places):
        away = data_rank != engine.ranks.data_rank
        packed = []
        for number, chosen in of_rank:
            if not first <= number < first + len(own.groups):
                continue
            group = own.groups[number - first].only(chosen)
            packed.append(_Parcel(number, replace(group, prompt=_to_send(group.prompt) if away else nothing)))
        parcels += [packed] * engine.ranks.sequence_size
    return parcels


def _to_send(prompt: Prompt) -> Prompt:
    """Of pixels only their number: a rank that gets the features needs no more, and they are many times as large."""
    pixels = None if prompt.pixel_values is None else prompt.pixel_values.to("meta")
    return replace(prompt, pixel_values=pixels, features=None, preview=() if pixels is not None else prompt.preview)
