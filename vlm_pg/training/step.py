"""One optimizer step: loss weights from the whole batch, micro-batches under a budget, one update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

from vlm_pg.algorithms.losses import KL, response_token_weights
from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.batching.cost import CostModel
from vlm_pg.config import RunConfig
from vlm_pg.distributed import agree_to_go_on, no_way_back
from vlm_pg.errors import NotFiniteError
from vlm_pg.metrics import NORM_CHART, Chart, Metric
from vlm_pg.models.micro_batches import plan_groups
from vlm_pg.models.packing import repeated_tokens
from vlm_pg.models.reference import ScoringPolicy
from vlm_pg.tally import Tally
from vlm_pg.training.behaviour import LogprobsSource, behaviour_logprobs
from vlm_pg.training.calls import agreed_slots
from vlm_pg.training.engines import Engine
from vlm_pg.training.passes import GROUPS_CHUNKED, LOSS, TOKENS_CHART, TOKENS_COMPUTED, Passes
from vlm_pg.training.step_features import StepFeatures
from vlm_pg.types import Prompt, RolloutGroup

T = TypeVar("T")

TOKENS_REPEATED = Metric("tokens_repeated", "tokens", "sum", TOKENS_CHART)
SHARING_RATIO = Metric("sharing_ratio", "tokens repeated / computed")
SHARING_RATIO_BOUND = Metric("sharing_ratio_bound", "tokens repeated / computed")
PROMPT_TOKENS = Metric("prompt_tokens_mean", "tokens")
GENERATIONS = Metric("generations_mean", "rollouts per group")
GRAD_NORM = Metric("grad_norm", "L2, before clipping", "same", NORM_CHART)
LEARNING_RATE = Metric("lr", how="same", chart=Chart("Learning rate", 11, smooth=False))
PART_GRAD_NORM = Metric("grad_norm/", "L2, before clipping", "same", NORM_CHART)
PART_LEARNING_RATE = Metric("lr/", how="same", chart=Chart("Learning rate by part", 12, smooth=False))
MICRO_BATCHES = Metric("micro_batches", how="same", over_updates="sum")
BACKWARD_CALLS = Metric("backward_calls", how="same", over_updates="sum")


@dataclass(frozen=True)
class UpdateSettings:
    """What all updates of a run have in common.

    Attributes:
        micro_batch_tokens: token budget of one forward and backward, in which a shared prefix counts once.
        logprobs: what the loss's ratio is taken to, see ``behaviour_logprobs``.
        max_new_tokens: the length that ``loss_average=constant_length`` divides by.
    """

    algorithm: AlgorithmSettings
    micro_batch_tokens: int
    temperature: float = 1.0
    logprobs: LogprobsSource = "reuse"
    max_new_tokens: int | None = None

    @classmethod
    def of(cls, config: RunConfig) -> UpdateSettings:
        """Those of a run's configuration."""
        rollout, tokens = config.rollout, config.training.micro_batch_tokens
        return cls(config.algorithm, tokens, rollout.temperature, rollout.logprobs, rollout.max_new_tokens)


@dataclass(frozen=True)
class Update:
    """What one update, or all updates of a step, work on.

    Attributes:
        groups: this data rank's share of the complete groups; its sequence ranks have the same.
        vision: visual features of the prompts of all groups that train, where they have been made already.
        measure_mismatch: add ``mismatch/...``: how the recorded log-probabilities differ from the training forward's,
            over the rollouts that the weights as they are now sampled. The same on all ranks.
        prompts: by sample id, those of the groups of the other sequence ranks.
        costs: what work over data ranks is balanced by; None: every rank trains on the groups it has.
        may_stop: it may be given up between two backward calls, for the step has made no other update yet.
        waiting: made anew around the place where ranks whose passes are over wait for the others.
        reference_vision: as ``vision``, of a reference with a tower of its own.
    """

    groups: Sequence[RolloutGroup]
    learning_rate: float
    vision: StepFeatures | None = None
    measure_mismatch: bool = False
    prompts: Mapping[str, Prompt] = field(default_factory=dict)
    costs: CostModel | None = None
    may_stop: bool = False
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    reference_vision: StepFeatures | None = None


def update_policy(
    engine: Engine, reference: ScoringPolicy | None, update: Update, settings: UpdateSettings
) -> dict[str, float]:
    """One optimizer update on complete groups (this rank's share); its metrics, equal on all ranks.

    Pruned rollouts take part in nothing here, neither in the reference's forward nor in the policy's. Where nothing is
    shared (``model.share_prefix``) every rollout is a group of its own once its loss weight is known.

    Args:
        reference: what a KL term of the loss measures from; None without one.

    Raises:
        ConfigError: ``logprobs`` is recompute and other weights sampled these rollouts; or a loss of the user's own
            gave what is no loss.
        NotFiniteError: loss or gradient is not finite, and the weights are untouched; or the updated weights are not.
            Engine and policy must be loaded anew before training goes on.
    """
    policy = engine.policy
    passes, trained = _passes(engine, reference, update, settings)
    plan = plan_groups(passes.groups, settings.micro_batch_tokens, policy.settings.share_prefix)
    order = agreed_slots(plan.micro_batches, policy.device)
    for loss, last in passes.losses(order):
        engine.backward(loss, last)
        if update.may_stop and not last:
            agree_to_go_on()
    _count_sharing(passes.tally, trained, plan.in_one_tree)
    with update.waiting():
        metrics = passes.tally.reduced(engine.ranks)
    # Of the sum over ranks, so that all of them stop here or none.
    _check_finite(metrics[LOSS])
    no_way_back()  # to the weights of the step before
    grad_norm = engine.step(update.learning_rate)
    said: dict[str, float] = {
        GRAD_NORM: grad_norm,
        LEARNING_RATE: update.learning_rate,
        MICRO_BATCHES: float(len(order)),
        BACKWARD_CALLS: float(sum(place.backward_calls for place in order)),
    }
    said |= {PART_GRAD_NORM.of(part): norm for part, norm in engine.part_norms().items()}
    return metrics | said | _part_rates(engine, update.learning_rate)


def _part_rates(engine: Engine, learning_rate: float) -> dict[str, float]:
    """Where parts have rates of their own."""
    found = engine.rates.of_parts(learning_rate)
    return {PART_LEARNING_RATE.of(part): rate for part, rate in found.items()} if len(set(found.values())) > 1 else {}


def _passes(
    engine: Engine, reference: ScoringPolicy | None, update: Update, settings: UpdateSettings
) -> tuple[Passes, list[RolloutGroup]]:
    """The passes over what trains, every loss weight fixed; and its groups as they were before they were taken apart
    where nothing is shared."""
    algorithm, policy = settings.algorithm, engine.policy
    places = [place for place, group in enumerate(update.groups) if any(group.kept or (1.0,))]
    groups = trained = [_what_trains(update.groups[place]) for place in places]
    share = policy.settings.share_prefix
    prompts = [group.prompt for group in groups]
    vision = update.vision.of_prompts(prompts) if update.vision is not None and share else None
    behaviour = behaviour_logprobs(groups, settings.logprobs, policy.weights_version)
    # Corrected for pruning, a batch counts as what was sampled, of which what is left is an estimate.
    counted = update.groups if algorithm.prune_correction else groups
    weights = _sequence_weights(groups, counted, algorithm, settings.max_new_tokens, engine)
    if not share:
        groups = [group.only([index]) for group in groups for index in range(len(group.rollouts))]
        weights, behaviour = _one_each(weights), None if behaviour is None else _one_each(behaviour)
    vision = vision or _vision(engine, [group.prompt for group in groups])
    of_reference = update.reference_vision.of_prompts(prompts) if update.reference_vision is not None else None
    passes = Passes(
        engine,
        reference,
        groups,
        vision,
        weights,
        algorithm,
        settings.temperature,
        behaviour,
        update.measure_mismatch,
        of_reference,
    )
    return passes, trained


def _one_each(by_group: Sequence[Sequence[T]]) -> list[list[T]]:
    """What belongs to the rollouts of each group, each rollout a group of its own."""
    return [[of_rollout] for of_group in by_group for of_rollout in of_group]


def _vision(engine: Engine, prompts: Sequence[Prompt]) -> StepFeatures:
    if engine.policy.vision.trains:
        return StepFeatures(engine.policy, prompts, engine.sequence)
    # Each rank enters a frozen tower as often as its own prompts need.
    with engine.weights_at_hand():
        return StepFeatures(engine.policy, prompts, engine.sequence)


def _check_finite(loss: float) -> None:
    if not math.isfinite(loss):
        raise NotFiniteError(
            f"The loss is {loss}; the step was not taken and no checkpoint was written. Resume from the last "
            "checkpoint with a lower training.learning_rate, or look at the last rollouts for what went wrong."
        )


def _what_trains(group: RolloutGroup) -> RolloutGroup:
    """The group without what was pruned."""
    if not group.kept or all(group.kept):
        return group
    return group.only([index for index, weight in enumerate(group.kept) if weight])


def _sequence_weights(
    groups: Sequence[RolloutGroup],
    counted: Sequence[RolloutGroup],
    algorithm: AlgorithmSettings,
    max_new_tokens: int | None,
    engine: Engine,
) -> list[list[float]]:
    """Weight of each token of each rollout of each group: fixed here, over all ranks, before anything is cut.

    ``counted``: the groups over which the loss averages.
    """
    if max_new_tokens is None:
        if algorithm.loss_average == "constant_length":
            raise ValueError("loss_average=constant_length divides by max_new_tokens; pass rollout.max_new_tokens.")
        max_new_tokens = 1  # nobody else reads it
    of_batch = [len(rollout.token_ids) for group in counted for rollout in group.rollouts]
    here = {"tokens": float(sum(of_batch)), "sequences": float(len(of_batch))}
    totals = engine.ranks.sum_over_data_ranks(here, engine.policy.device)
    weights = iter(
        response_token_weights(
            [len(rollout.token_ids) for group in groups for rollout in group.rollouts],
            algorithm.loss_average,
            int(totals["tokens"]),
            int(totals["sequences"]),
            max_new_tokens,
            [weight for group in groups for weight in group.kept or (1.0,) * len(group.rollouts)],
        )
    )
    return [[next(weights) for _ in group.rollouts] for group in groups]


def group_sizes(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Means over the groups of all processes, of what trains of them. A collective."""
    tally = Tally()
    for group in groups:
        kept = sum(bool(weight) for weight in group.kept or (1.0,) * len(group.rollouts))
        if kept:
            tally.add(PROMPT_TOKENS, group.prompt.num_tokens)
            tally.add(GENERATIONS, kept)
    return tally.reduced()


def _count_sharing(tally: Tally, groups: Sequence[RolloutGroup], in_one_tree: int) -> None:
    """What sharing saved.

    ``in_one_tree``: tokens this rank would compute if all its groups fitted in one pass.
    """
    lengths = [[len(rollout.token_ids) for rollout in group.rollouts] for group in groups]
    prompts = [group.prompt.num_tokens for group in groups]
    repeated = sum(map(repeated_tokens, prompts, lengths))
    tally.add(TOKENS_REPEATED, repeated)
    tally.add(SHARING_RATIO, repeated, tally.total(TOKENS_COMPUTED))
    tally.add(SHARING_RATIO_BOUND, repeated, in_one_tree)
    tally.add(PROMPT_TOKENS, sum(prompts), len(groups))
    tally.add(GENERATIONS, sum(map(len, lengths)), len(groups))
    tally.add_all({LOSS: 0, GROUPS_CHUNKED: 0, KL: 0}, 0)  # known where there are none, too
