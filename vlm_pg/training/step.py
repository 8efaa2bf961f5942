"""One optimizer step: loss weights from the whole batch, micro-batches under a budget, one update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import torch

from vlm_pg.algorithms.kl import KL
from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.algorithms.weights import response_token_weights
from vlm_pg.batching.plan import plan_micro_batches, tree_tokens
from vlm_pg.distributed import sum_over_ranks
from vlm_pg.metrics import NORM_CHART, Chart, Metric
from vlm_pg.models.packing import repeated_tokens
from vlm_pg.models.policy import Policy
from vlm_pg.models.prompt_tree import shared_tokens
from vlm_pg.training.behaviour import LogprobsSource, behaviour_logprobs
from vlm_pg.training.calls import agreed_places
from vlm_pg.training.engines import Engine
from vlm_pg.training.passes import GROUPS_CHUNKED, LOSS, TOKENS_CHART, TOKENS_COMPUTED, Passes
from vlm_pg.training.tally import Tally
from vlm_pg.training.vision_leaves import VisionLeaves
from vlm_pg.types import Prompt, RolloutGroup

T = TypeVar("T")

TOKENS_REPEATED = Metric("tokens_repeated", "tokens", "sum", TOKENS_CHART)
SHARING_RATIO = Metric("sharing_ratio", "tokens repeated / computed")
SHARING_RATIO_BOUND = Metric("sharing_ratio_bound", "tokens repeated / computed")
PROMPT_TOKENS = Metric("prompt_tokens_mean", "tokens")
GENERATIONS = Metric("generations_mean", "rollouts per group")
GRAD_NORM = Metric("grad_norm", "L2, before clipping", "same", NORM_CHART)
LEARNING_RATE = Metric("lr", how="same", chart=Chart("Learning rate", 11, smooth=False))
MICRO_BATCHES = Metric("micro_batches", how="same", over_updates="sum")
BACKWARD_CALLS = Metric("backward_calls", how="same", over_updates="sum")


def update_policy(
    engine: Engine,
    reference: Policy | None,
    groups: Sequence[RolloutGroup],
    algorithm: AlgorithmSettings,
    micro_batch_tokens: int,
    temperature: float,
    learning_rate: float,
    leaves: VisionLeaves | None = None,
    *,
    logprobs: LogprobsSource = "reuse",
    measure_mismatch: bool = False,
    max_new_tokens: int | None = None,
) -> dict[str, float]:
    """One optimizer update on complete groups (this rank's share); its metrics, equal on all ranks.

    Pruned rollouts take part in nothing here, neither in the reference's forward nor in the policy's. Where nothing is
    shared (``model.share_prefix``) every rollout is a group of its own once its loss weight is known.

    Args:
        reference: what a KL term of the loss measures from; None without one.
        leaves: visual features of the groups' prompts, in order, where they were made before generation.
        logprobs: what the loss's ratio is taken to, see ``behaviour_logprobs``.
        measure_mismatch: add ``mismatch/...``: how the recorded log-probabilities differ from the training forward's,
            over the rollouts that the weights as they are now sampled. The same on all ranks.
        max_new_tokens: the length that ``loss_average=constant_length`` divides by.

    Raises:
        ConfigError: ``logprobs`` is recompute and other weights sampled these rollouts.
        FloatingPointError: loss or gradient is not finite; the weights are untouched, but engine and policy still hold
            the failed step's gradients: load them anew before training goes on.
    """
    policy = engine.policy
    sampled = groups
    places = [place for place, group in enumerate(sampled) if any(group.kept or (1.0,))]
    groups = [_what_trains(sampled[place]) for place in places]
    share = policy.settings.share_prefix
    leaves = leaves.of(places) if leaves is not None and share else None
    behaviour = behaviour_logprobs(groups, logprobs, policy.weights_version)
    # Corrected for pruning, a batch counts as what was sampled, of which what is left is an estimate.
    counted = sampled if algorithm.prune_correction else groups
    weights = _sequence_weights(groups, counted, algorithm, max_new_tokens, policy.device)
    trained = groups
    if not share:
        groups = [group.only([index]) for group in groups for index in range(len(group.rollouts))]
        weights, behaviour = _one_each(weights), None if behaviour is None else _one_each(behaviour)
    prompts = [group.prompt for group in groups]
    leaves = leaves or _leaves(engine, prompts)
    shared = shared_tokens(prompts, share=share)
    counts = [_token_counts(group) for group in groups]
    plan = plan_micro_batches(counts, micro_batch_tokens, lambda i, j: shared[i][j])
    order = agreed_places(plan, policy.device)
    passes = Passes(engine, reference, groups, leaves, weights, algorithm, temperature, behaviour, measure_mismatch)
    for loss, last in passes.losses(order):
        engine.backward(loss, last)
    in_one_tree = tree_tokens([prompt for prompt, _ in counts], range(len(groups)), lambda i, j: shared[i][j])
    in_one_tree += sum(sum(responses) for _, responses in counts)
    _count_sharing(passes.tally, trained, in_one_tree)
    metrics = passes.tally.reduced()
    # Of the sum over ranks, so that all of them stop here or none.
    _check_finite(metrics[LOSS])
    grad_norm = engine.step(learning_rate)
    return metrics | {
        GRAD_NORM: grad_norm,
        LEARNING_RATE: learning_rate,
        MICRO_BATCHES: float(len(order)),
        BACKWARD_CALLS: float(sum(place.backward_calls for place in order)),
    }


def _one_each(by_group: Sequence[Sequence[T]]) -> list[list[T]]:
    """What belongs to the rollouts of each group, each rollout a group of its own."""
    return [[of_rollout] for of_group in by_group for of_rollout in of_group]


def _leaves(engine: Engine, prompts: Sequence[Prompt]) -> VisionLeaves:
    if engine.policy.vision.trains:
        return VisionLeaves(engine.policy, prompts)
    # Each rank enters a frozen tower as often as its own prompts need.
    with engine.generation():
        return VisionLeaves(engine.policy, prompts)


def _check_finite(loss: float) -> None:
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"The loss is {loss}; the step was not taken and no checkpoint was written. Resume from the last "
            "checkpoint with a lower training.learning_rate, or look at the last rollouts for what went wrong."
        )


def _token_counts(group: RolloutGroup) -> tuple[int, list[int]]:
    return group.prompt.num_tokens, [len(rollout.token_ids) - 1 for rollout in group.rollouts]


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
    device: torch.device,
) -> list[list[float]]:
    """Weight of each token of each rollout of each group: fixed here, over all ranks, before anything is cut.

    ``counted``: the groups over which the loss averages.
    """
    if max_new_tokens is None:
        if algorithm.loss_average == "constant_length":
            raise ValueError("loss_average=constant_length divides by max_new_tokens; pass rollout.max_new_tokens.")
        max_new_tokens = 1  # nobody else reads it
    of_batch = [len(rollout.token_ids) for group in counted for rollout in group.rollouts]
    totals = sum_over_ranks({"tokens": float(sum(of_batch)), "sequences": float(len(of_batch))}, device)
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
    tally.add_all({GROUPS_CHUNKED: 0, KL: 0}, 0)  # known where there are none, too
