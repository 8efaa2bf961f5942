"""Which rollouts each data rank trains on, and how they get there.

Rollouts stay where they were sampled, or are dealt anew so that all data ranks have equal work (``training.balance``).
All sequence ranks of a data rank get the same ones. Rewards and advantages are complete before, and loss weights count
over all ranks: who computes what does not change the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vlm_pg.batching.balance import Deal, deal_groups
from vlm_pg.batching.cost import CostModel, GroupWork
from vlm_pg.distributed import exchange_objects, gather_objects
from vlm_pg.metrics import Metric
from vlm_pg.models.policy import Policy
from vlm_pg.models.reference import ScoringPolicy
from vlm_pg.training.engines import Engine
from vlm_pg.training.feature_route import FeatureRoute, Passage
from vlm_pg.training.group_advantages import trains
from vlm_pg.training.step import Update
from vlm_pg.training.step_features import StepFeatures
from vlm_pg.types import Prompt, RolloutGroup

# Number of a group over all ranks, and some of its rollouts.
Place = tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class Share:
    """What this data rank trains on in an update, ``vision`` as in ``Update``; ``metrics`` say how even the deal is.

    ``made_here``: prompts whose media this data rank encodes for itself and for others, which get them by ``route``; it
    is None where rollouts stay where they are. ``reference_vision``: of a reference with a tower of its own.
    """

    groups: Sequence[RolloutGroup]
    vision: StepFeatures | None
    reference_vision: StepFeatures | None = None
    metrics: dict[Metric, float] = field(default_factory=dict)
    made_here: Sequence[Prompt] = ()
    route: FeatureRoute | None = None

    def encoded_anew(self, engine: Engine) -> StepFeatures | None:
        """The visual features under weights that have changed since. A collective.

        None: the update makes them, for it has the prompts with their pixels.
        """
        if self.route is None:
            return None
        made = StepFeatures(engine.policy, self.made_here, engine.sequence, engine.everyone)
        return made.dealt(_that_train(self.groups), self.route)


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


def dealt(engine: Engine, own: Update, token_budget: int, reference: ScoringPolicy | None = None) -> Share:
    """The groups of an update that this data rank trains on. A collective.

    Prompts leave without pixels: their features are made where they were sampled, and go from there; a trained tower's
    get their gradients back. Where nothing is shared a prompt is encoded wherever it is used: there rollouts stay with
    the data rank that sampled them.

    Args:
        own: this process's groups, and ``prompts`` of all its sequence ranks.
        token_budget: most tokens of a pass.
        reference: what a KL term of the loss measures from.
    """
    ranks, policy = engine.ranks, engine.policy
    if ranks.world_size == 1:
        return Share(own.groups, own.vision)
    known = gather_objects([_known(group, ranks.data_rank) for group in own.groups])
    first = sum(map(len, known[: ranks.rank]))
    everything = [group for of_rank in known for group in of_rank]
    deal = None
    if own.costs is not None and ranks.data_size > 1 and policy.settings.share_prefix:
        deal = _deal(everything, ranks.data_size, token_budget, own.costs)
    places = _places(everything, deal, ranks.data_size)
    parcels = _parcels(engine, own, first, places)
    received = sorted((p for of_rank in exchange_objects(parcels) for p in of_rank), key=lambda p: p.number)
    here = {group.sample.sample_id: group.prompt for group in own.groups} | dict(own.prompts)
    groups = [replace(p.group, prompt=p.group.prompt or here[p.group.sample.sample_id]) for p in received]
    if deal is None:
        return Share(groups, None if own.vision is None else own.vision.of_everything([g.prompt for g in groups]))
    trained_here = [known.sample_id for known in everything if known.trained and known.work.rank == ranks.data_rank]
    made_here = [here[sample_id] for sample_id in trained_here]
    route = FeatureRoute(ranks, _passages(everything, places))
    trained = _that_train(groups)
    vision = _made(engine, own, made_here).dealt(trained, route)
    of_reference = None
    if isinstance(reference, Policy) and policy.vision.trains:
        of_reference = StepFeatures(reference, made_here, engine.sequence).dealt(trained, route)
    return Share(groups, vision, of_reference, deal.metrics(), made_here, route)


def _known(group: RolloutGroup, rank: int) -> _Known:
    weights = group.kept or (1.0,) * len(group.rollouts)
    trained = tuple(place for place, weight in enumerate(weights) if weight)
    untrained = tuple(place for place, weight in enumerate(weights) if not weight)
    prompt = group.prompt
    responses = tuple(len(group.rollouts[place].token_ids) - 1 for place in trained)
    work = GroupWork(prompt.num_tokens, responses, media_key=prompt.content_key, rank=rank)
    return _Known(prompt.sample_id, work, trained, untrained, prompt.num_visual_tokens)


def _deal(everything: Sequence[_Known], data_ranks: int, token_budget: int, costs: CostModel) -> Deal:
    """Of the groups that train, numbered among themselves."""
    train = [known for known in everything if known.trained]

    def shared(i: int, j: int) -> int:
        one, other = train[i], train[j]
        same = one.work.media_key and one.work.media_key == other.work.media_key
        return min(one.visual_tokens, other.visual_tokens) if same else 0

    works = [known.work for known in train]
    return deal_groups(works, data_ranks, token_budget, costs, shared)


def _places(
    everything: Sequence[_Known], deal: Deal | None, data_ranks: int
) -> list[list[tuple[int, tuple[int, ...]]]]:
    """For each data rank: number of a group, and which of its rollouts; every rollout once."""
    found: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(data_ranks)]
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
            # What was pruned trains nobody, and may count in the average: with the first part of its group.
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


def _that_train(groups: Sequence[RolloutGroup]) -> list[Prompt]:
    return [group.prompt for group in groups if trains(group)]


def _made(engine: Engine, own: Update, made_here: Sequence[Prompt]) -> StepFeatures:
    """Of the media that this data rank encodes."""
    if own.vision is not None:
        return own.vision
    if engine.policy.vision.trains:
        return StepFeatures(engine.policy, made_here, engine.sequence, engine.everyone)
    # Kept since the rollouts were sampled, by all processes of the data rank.
    with engine.weights_at_hand():
        return StepFeatures(engine.policy, made_here)


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
            prompt = _without_pixels(group.prompt) if away else nothing
            packed.append(_Parcel(number, replace(group, prompt=prompt)))
        parcels += [packed] * engine.ranks.sequence_size
    return parcels


def _without_pixels(prompt: Prompt) -> Prompt:
    """Their number alone: whoever gets the features needs no more, and they are many times as large."""
    pixels = prompt.pixel_values
    return prompt if pixels is None else replace(prompt, pixel_values=pixels.to("meta"), preview=())
