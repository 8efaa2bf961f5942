"""The optimizer updates of a step: mini-batches of its groups; each weighted, packed, run forward and backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from vlm_pg.algorithms.losses import KL, TokenLoss, nll, no_loss, preference, response_token_weights
from vlm_pg.algorithms.settings import AlgorithmSettings, DistillationSettings
from vlm_pg.algorithms.tokens import IMPORTANCE, IMPORTANCE_ESS, IMPORTANCE_SQUARE
from vlm_pg.batching.plan import MicroBatch, Piece
from vlm_pg.config import RunConfig
from vlm_pg.distributed import check_stop, forbid_stop, gather_objects, sum_over_ranks
from vlm_pg.errors import NotFiniteError
from vlm_pg.metrics import NORM_CHART, Chart, Metric
from vlm_pg.models.micro_batches import pack_micro_batch, pass_logprobs, plan_groups, run_micro_batch
from vlm_pg.models.packing import repeated_tokens
from vlm_pg.models.reference import ScoringPolicy
from vlm_pg.models.settings import VISION_PARTS
from vlm_pg.rollout.scoring import PolicyScorer
from vlm_pg.tally import Tally, over_updates
from vlm_pg.training.engines import Engine
from vlm_pg.training.groups import Update, step_order, trains
from vlm_pg.training.loss import LOSS, GroupLoss, LogprobsSource, behaviour_logprobs
from vlm_pg.training.parallel import StepShares
from vlm_pg.training.step_features import StepFeatures
from vlm_pg.types import RolloutGroup

T = TypeVar("T")

TOKENS_CHART = Chart("Tokens per step", 19)
TOKENS_COMPUTED = Metric("tokens_computed", "tokens", "sum", TOKENS_CHART)
TOKENS_REPEATED = Metric("tokens_repeated", "tokens", "sum", TOKENS_CHART)
TOKENS_RECORDED = Metric("tokens_recorded", "tokens whose forward was that of sampling", "sum")
TOKENS_SHARED = Metric("tokens_shared_across_questions", "tokens", "sum")
QUESTIONS_SHARING = Metric("questions_sharing", "questions", "sum")
GROUPS_CHUNKED = Metric("groups_chunked", "groups", "sum")
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
UPDATES = Metric("updates", "of the optimizer", "same")

# Chunks of an idle rank.
FILLER = MicroBatch(((Piece(0, (0,)),),))


@dataclass(frozen=True)
class UpdateSettings:
    """What all updates of a run have in common.

    Attributes:
        micro_batch_tokens: token budget of one forward and backward, in which a shared prefix counts once.
        logprobs: the denominator of the loss's ratio, see ``behaviour_logprobs``.
        max_new_tokens: the length that ``loss_average=constant_length`` divides by.
        objective_loss: of another objective than rl, in place of ``algorithm.loss``.
        distillation: groups have a teacher's tokens.
    """

    algorithm: AlgorithmSettings
    micro_batch_tokens: int
    temperature: float = 1.0
    logprobs: LogprobsSource = "reuse"
    max_new_tokens: int | None = None
    objective_loss: TokenLoss | None = None
    distillation: DistillationSettings | None = None

    @classmethod
    def of(cls, config: RunConfig) -> UpdateSettings:
        """Those of a run's configuration."""
        rollout, algorithm = config.rollout, config.algorithm
        loss: TokenLoss | None = None
        if config.training.objective == "sft":
            loss = partial(nll, settings=algorithm)
        elif config.training.objective == "dpo":
            algorithm = algorithm.model_copy(update={"loss_average": "sequence_sum"})  # a pair counts as one
            loss = partial(preference, settings=config.preference)
        elif config.training.objective == "distill":
            loss = no_loss
        teacher = config.distillation if config.distillation.teacher else None
        budget = config.training.micro_batch_tokens
        return cls(algorithm, budget, rollout.temperature, rollout.logprobs, rollout.max_new_tokens, loss, teacher)


def run_updates(engine: Engine, reference: ScoringPolicy | None, step: Update, config: RunConfig) -> dict[str, float]:
    """``algorithm.num_iterations`` passes over the step's groups, ``algorithm.minibatches`` updates each.

    Mini-batches are runs of the step's groups in their order (``RolloutGroup.order``), equally long over all ranks as
    far as possible; their loss weights are their own. Where there are fewer groups than mini-batches there are fewer
    updates. Where log-probabilities are recomputed and there are several updates, they are scored before the first one.

    Args:
        reference: what a KL term of the loss measures from; None without one.
        step: this process's groups of the step; ``vision`` and ``measure_mismatch`` are for the first update.

    Returns:
        The step's metrics, equal on all ranks.
    """
    algorithm, settings, parallel = config.algorithm, UpdateSettings.of(config), engine.parallel
    vision_trains, groups = engine.policy.vision.trains, step.groups
    if settings.logprobs == "recompute" and algorithm.updates > 1:
        groups = _scored(engine, groups, config)
    numbers = step_order(gather_objects([group.order for group in groups]))
    total = sum(map(len, numbers))
    parts = [number * algorithm.minibatches // total for number in numbers[engine.ranks.rank]]
    shares, reuse = None, algorithm.num_iterations > 1
    if parallel is not None:
        shares = StepShares(engine, reference, settings.micro_batch_tokens, reuse)
    values: list[dict[str, float]] = []
    for number in [*range(algorithm.minibatches)] * algorithm.num_iterations:
        chosen = [group for group, part in zip(groups, parts, strict=True) if part == number]
        here = float(sum(map(trains, chosen)))
        if not sum_over_ranks({"groups": here}, engine.policy.device)["groups"]:
            continue
        first = not values
        update = replace(
            step,
            groups=chosen,
            # After the first update, weights and a trained tower's features have changed.
            vision=step.vision if first or not vision_trains else None,
            measure_mismatch=step.measure_mismatch and first,
            may_stop=first,
        )
        of_balance: dict[Metric, float] = {}
        if shares is not None:
            update, of_balance = shares.of(number, update)
        values.append(update_policy(engine, reference, update, settings) | of_balance)
    found = over_updates(values) | {UPDATES: float(len(values))}
    if shares is None or not shares.are_balanced:
        return found
    tally = Tally()  # a split group counts once
    for group in groups:
        if kept := sum(map(bool, group.rollout_weights)):
            tally.add(PROMPT_TOKENS, group.prompt.num_tokens)
            tally.add(GENERATIONS, kept)
    return found | tally.reduced()


def _scored(engine: Engine, groups: Sequence[RolloutGroup], config: RunConfig) -> list[RolloutGroup]:
    """The groups with log-probabilities of the training forward under the weights that sampled; empty for pruned
    rollouts."""
    scored_groups = [group.only_kept().response_group for group in groups if trains(group)]
    with engine.gathered_parameters():
        scorer = PolicyScorer(engine.policy, config.rollout.prefill_tokens)
        score = scorer.score if engine.parallel is None else partial(engine.parallel.score, scorer)
        found = iter(score(scored_groups, config.rollout.temperature))
    scored = []
    for group in groups:
        of_kept = iter(next(found) if trains(group) else ())
        logprobs = tuple(next(of_kept) if weight else torch.empty(0) for weight in group.rollout_weights)
        scored.append(replace(group, trainer_logprobs=logprobs))
    return scored


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
            returned something else than a loss.
        NotFiniteError: loss or gradient is not finite, and the weights are untouched; or the updated weights are not.
            Engine and policy must be loaded anew before training goes on.
    """
    policy, parallel = engine.policy, engine.parallel
    for group in update.groups:
        if group.policy_version != policy.weights_version:
            group.release_forwards()
    trained = [group.only_kept() for group in update.groups if trains(group)]
    loss, vision = _weighted(engine, update, trained, settings)
    plan = plan_groups(loss.groups, settings.micro_batch_tokens, policy.settings.share_prefix)
    slots = plan.slots
    if parallel is not None:
        recorded = {m for m in plan.micro_batches if all(loss.groups[g].response_group.forwards for g in m.groups)}
        slots = parallel.slots(plan.micro_batches, recorded)
    backward = _Backward(engine, sum(slot.backward_calls for slot in slots), update.may_stop)
    for slot in slots:
        if slot is slots[-1]:
            backward.into_tower = vision.connect()
        micro = slot.micro or FILLER
        groups = [loss.groups[group] for group in micro.groups] if slot.micro else []
        responses = [group.response_group for group in groups] if parallel is None or groups else [parallel.filler]
        has_record = bool(responses[0].forwards)
        if not slot.recorded:
            responses = [replace(response, forwards=()) for response in responses]
        streams = pack_micro_batch(policy, responses, micro, slot.chunks if slot.chunks > 1 else 0, engine.sequence)
        if settings.distillation is not None and groups:
            streams = streams.reading([loss.teacher_tokens(chunk) for chunk in micro.chunks])
        # The reference's passes come before those of the policy take their memory. It runs on idle ranks too: its
        # weights may be sharded.
        ref_logprobs: list[torch.Tensor] | None = None
        if reference is not None:
            ref_features = _reference_features(engine, reference, groups) if groups else None
            ref_logprobs = pass_logprobs(reference, streams, ref_features, settings.temperature)
        if groups:
            loss.tally.add(TOKENS_COMPUTED, streams.num_tokens(len(micro.chunks)))
            loss.tally.add(TOKENS_RECORDED, streams.num_recorded if has_record else 0)
            loss.tally.add(TOKENS_SHARED, streams.prompts.tokens_shared)
            loss.tally.add(QUESTIONS_SHARING, streams.prompts.num_sharing)
            if streams.prefixes:
                loss.tally.add(GROUPS_CHUNKED, len(groups))
        run_micro_batch(
            engine.module,
            streams,
            policy.join_features(responses, [vision.connected(group.prompt.features) for group in responses]),
            partial(loss.of_pass, micro.chunks if groups else (), ref_logprobs),
            backward,
            settings.temperature,
            loss_scale=engine.loss_scale,
            every_weight=engine.needs_every_weight,
            entropy_graph=settings.algorithm.entropy_coef > 0,
        )
        del streams
        for group in groups if has_record else ():
            group.release_forwards()
    _count_sharing(loss.tally, trained, plan.in_one_tree)
    with update.waiting():
        metrics = loss.tally.reduced(engine.ranks)
    if not math.isfinite(loss_sum := metrics[LOSS]):  # over all ranks, so all of them stop here or none
        raise NotFiniteError(
            f"The loss is {loss_sum}; the step was not taken and no checkpoint was written. Resume from the last "
            "checkpoint with a lower training.learning_rate, or look at the last rollouts for what went wrong."
        )
    if IMPORTANCE_SQUARE in metrics:
        square = metrics.pop(IMPORTANCE_SQUARE)
        metrics[IMPORTANCE_ESS] = metrics[IMPORTANCE] ** 2 / square if square else 0.0
    forbid_stop()  # the weights of the step before are about to change
    grad_norm = engine.step(update.learning_rate)
    rates = engine.rates.of_parts(update.learning_rate)
    of_parts: dict[str, float] = {PART_LEARNING_RATE.of(part): rate for part, rate in rates.items()}
    return {
        **metrics,
        GRAD_NORM: grad_norm,
        LEARNING_RATE: update.learning_rate,
        MICRO_BATCHES: float(len(slots)),
        BACKWARD_CALLS: float(backward.calls),
        **{PART_GRAD_NORM.of(part): norm for part, norm in engine.part_norms().items()},
        **(of_parts if len(set(of_parts.values())) > 1 else {}),
    }


def _weighted(
    engine: Engine, update: Update, groups: list[RolloutGroup], settings: UpdateSettings
) -> tuple[GroupLoss, StepFeatures]:
    """The loss of groups that train, weights computed over all ranks before any split; and their features."""
    algorithm, policy = settings.algorithm, engine.policy
    corrected = algorithm.importance_cap is not None
    behaviour = behaviour_logprobs(groups, settings.logprobs, policy.weights_version, corrected)
    # With prune correction, normalize by all sampled groups.
    counted = update.groups if algorithm.prune_correction else groups
    weights = _token_weights(groups, counted, settings, engine)
    vision = update.vision
    if not policy.settings.share_prefix:
        groups = [group.only([index]) for group in groups for index in range(len(group.rollouts))]
        weights, behaviour = _one_each(weights), None if behaviour is None else _one_each(behaviour)
        vision = None
    if vision is None:
        # Each rank enters a frozen tower as often as its own prompts need.
        with nullcontext() if policy.vision.trains else engine.gathered_parameters():
            vision = StepFeatures(policy, [group.prompt for group in groups], engine.sequence)
        groups = [replace(group, prompt=prompt) for group, prompt in zip(groups, vision.prompts, strict=True)]
    further = update.measure_mismatch, settings.objective_loss, settings.distillation
    return GroupLoss(policy, groups, weights, algorithm, behaviour, *further), vision


def _one_each(by_group: Sequence[Sequence[T]]) -> list[list[T]]:
    """Values of the rollouts of each group, each rollout a group of its own."""
    return [[of_rollout] for of_group in by_group for of_rollout in of_group]


def _reference_features(
    engine: Engine, reference: ScoringPolicy, groups: Sequence[RolloutGroup]
) -> torch.Tensor | None:
    """A frozen tower is shared with the reference."""
    responses = [group.response_group for group in groups]
    if not engine.policy.vision.trains:
        return engine.policy.join_features(responses, [group.prompt.features for group in groups])
    features = [group.reference_features for group in groups]
    if None in features:
        features = [*reference.vision.encode([group.prompt for group in groups], sequence=engine.sequence)]
    return reference.join_features(responses, features)


@dataclass
class _Backward:
    """The backward calls of one update: ``calls`` on every rank, ``made`` so far.

    Where the engine needs it, the first and the last reach every trained weight; with a frozen language model all do,
    because ZeRO-1 and 2 require a backward that reaches some. ``into_tower``: zero whose backward enters the trained
    tower, added to the last loss.
    """

    engine: Engine
    calls: int
    may_stop: bool
    made: int = 0
    into_tower: torch.Tensor | None = None

    def __call__(self, loss: torch.Tensor) -> None:
        engine, self.made = self.engine, self.made + 1
        if self.made == self.calls:
            engine.backward(loss if self.into_tower is None else loss + self.into_tower, True)
            return
        parts = engine.rates.parts
        reaching = self.made == 1 or "language" not in parts
        if reaching and engine.needs_every_weight and any(part in parts for part in VISION_PARTS):
            loss = loss + engine.policy.idle_vision_loss()
        engine.backward(loss, False)
        if self.may_stop:
            check_stop()


def _token_weights(
    groups: Sequence[RolloutGroup], counted: Sequence[RolloutGroup], settings: UpdateSettings, engine: Engine
) -> list[list[float]]:
    """Loss weight of each token of each rollout of each group.

    Args:
        counted: the groups over which the loss averages.
    """
    average, max_new_tokens = settings.algorithm.loss_average, settings.max_new_tokens
    if max_new_tokens is None:
        if average == "constant_length":
            raise ValueError("loss_average=constant_length divides by max_new_tokens; pass rollout.max_new_tokens.")
        max_new_tokens = 1  # no other average reads it
    of_batch = [rollout.num_trained for group in counted for rollout in group.rollouts]
    here = {"tokens": float(sum(of_batch)), "sequences": float(len(of_batch))}
    totals = engine.ranks.sum_over_data_ranks(here, engine.policy.device)
    weights = iter(
        response_token_weights(
            [rollout.num_trained for group in groups for rollout in group.rollouts],
            average,
            int(totals["tokens"]),
            int(totals["sequences"]),
            max_new_tokens,
            [weight for group in groups for weight in group.rollout_weights],
        )
    )
    return [[next(weights) for _ in group.rollouts] for group in groups]


def _count_sharing(tally: Tally, groups: Sequence[RolloutGroup], in_one_tree: int) -> None:
    """What sharing saved.

    Args:
        in_one_tree: tokens this rank would compute if all its groups fitted in one pass.
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
