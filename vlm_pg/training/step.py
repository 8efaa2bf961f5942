"""One optimizer step: loss weights from the whole batch, micro-batches under a budget, one update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import torch

from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.algorithms.weights import response_token_weights
from vlm_pg.batching.plan import plan_micro_batches, tree_tokens
from vlm_pg.distributed import max_over_ranks, sum_over_ranks
from vlm_pg.models.packing import repeated_tokens
from vlm_pg.models.policy import Policy
from vlm_pg.models.prompt_tree import shared_tokens
from vlm_pg.training.behaviour import LogprobsSource, behaviour_logprobs, mismatch_metrics
from vlm_pg.training.calls import agreed_places
from vlm_pg.training.engines import Engine
from vlm_pg.training.passes import Passes, StepSums
from vlm_pg.training.vision_leaves import VisionLeaves
from vlm_pg.types import Prompt, RolloutGroup

T = TypeVar("T")


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
    policy.differentiable_entropies = algorithm.entropy_coef > 0
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
    metrics = _metrics(passes.sums, trained, in_one_tree, policy.device)
    # Of the sum over ranks, so that all of them stop here or none.
    _check_finite(metrics["loss"])
    grad_norm = engine.step(learning_rate)
    return metrics | {
        "grad_norm": grad_norm,
        "lr": learning_rate,
        "micro_batches": float(len(order)),
        "backward_calls": float(sum(place.backward_calls for place in order)),
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


def _metrics(
    sums: StepSums, groups: Sequence[RolloutGroup], in_one_tree: int, device: torch.device
) -> dict[str, float]:
    """Means over the response tokens of all ranks, and what sharing saved.

    ``in_one_tree``: tokens this rank would compute if all its groups fitted in one pass.
    """
    lengths = [[len(rollout.token_ids) for rollout in group.rollouts] for group in groups]
    prompts = [group.prompt.num_tokens for group in groups]
    local = {
        "repeated": sum(map(repeated_tokens, prompts, lengths)),
        "in_one_tree": in_one_tree,
        "groups": len(groups),
        "rollouts": sum(map(len, lengths)),
        "prompt_tokens": sum(prompts),
    }
    names = ("loss", "entropy", "kl", "tokens", "clipped_low", "clipped_high", "ratio_sum", "behaviour_kl_sum")
    weighed = ("importance_sum",)
    counted = ("tokens_computed", "tokens_shared", "sharing_groups", "groups_chunked")
    compared = ("mismatch_tokens", "mismatch_kl", "mismatch_abs", "mismatch_exp_abs")
    sums_here, largest_here = sums.read()
    totals = sum_over_ranks(
        {name: sums_here.get(name, 0.0) for name in (*names, *weighed, *counted, *compared)}
        | {name: float(count) for name, count in local.items()},
        device,
    )
    # Probability ratios are above 0, so what a rank without tokens says here never counts.
    none = {"ratio_max": 0.0, "negative_ratio_min": -math.inf, "mismatch_abs_max": 0.0}
    largest = max_over_ranks(none | {name: largest_here[name] for name in none if name in largest_here}, device)
    tokens = max(1.0, totals["tokens"])
    return {
        "loss": totals["loss"],
        "entropy": totals["entropy"] / tokens,
        "kl": totals["kl"] / tokens,
        "clip_low": totals["clipped_low"] / tokens,
        "clip_high": totals["clipped_high"] / tokens,
        "ratio_mean": totals["ratio_sum"] / tokens,
        "ratio_max": largest["ratio_max"],
        "ratio_min": -largest["negative_ratio_min"],
        "behaviour_kl": totals["behaviour_kl_sum"] / tokens,
        "response_tokens": totals["tokens"],
        "prompt_tokens_mean": totals["prompt_tokens"] / max(1.0, totals["groups"]),
        "generations_mean": totals["rollouts"] / max(1.0, totals["groups"]),
        "tokens_computed": totals["tokens_computed"],
        "tokens_repeated": totals["repeated"],
        "tokens_shared_across_questions": totals["tokens_shared"],
        "questions_sharing": totals["sharing_groups"],
        "groups_chunked": totals["groups_chunked"],
        "sharing_ratio": totals["repeated"] / max(1.0, totals["tokens_computed"]),
        "sharing_ratio_bound": totals["repeated"] / max(1.0, totals["in_one_tree"]),
        **({"importance_mean": totals["importance_sum"] / tokens} if totals["importance_sum"] else {}),
    } | mismatch_metrics(totals, largest["mismatch_abs_max"])
