"""Log-probabilities of the policy that sampled: whose the loss takes, and how far generation's lie from training's.

Generation and training run the same weights through different kernels and shapes, so that they round differently. Small
differences are normal; a large one means that the two do not compute the same thing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from vlm_pg.errors import ConfigError
from vlm_pg.metrics import Metric
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.types import RolloutGroup

LogprobsSource = Literal["reuse", "recompute"]

# k3 estimate of KL(rollout || trainer) from d = trainer - rollout: exp(d) - 1 - d (joschu.net/blog/kl-approx).
MISMATCH_KL = Metric("mismatch/kl", "nat per token")
MISMATCH_ABS = Metric("mismatch/abs_mean", "nat")
MISMATCH_MAX = Metric("mismatch/abs_max", "nat", "largest")
MISMATCH_EXP_ABS = Metric("mismatch/exp_abs_mean", "ratio of probabilities")

# Rounding stays below these bounds, in bf16 too. Where other trainers measured more, they found a defect.
HEALTHY = {MISMATCH_KL: 0.01, MISMATCH_EXP_ABS: 1.05}


def behaviour_logprobs(
    groups: Sequence[RolloutGroup], source: LogprobsSource, weights_version: int
) -> list[list[torch.Tensor]] | None:
    """What the loss divides by: fp32 [R] of each rollout of each group, or None for those of the update's own forward.

    ``reuse``: as recorded at generation. They stay right however often the weights have changed since.

    ``recompute``: those of the training forward. Where the step has one update, it starts from the weights that
    sampled, so what its own forward computes, detached, is what a scoring pass before it would compute (None). Before
    several updates there is such a pass, and the groups carry what it found.

    Args:
        weights_version: the policy's, now.

    Raises:
        ConfigError: ``recompute`` with rollouts that other weights sampled and nobody scored under them.
    """
    if source == "reuse":
        return [[rollout.rollout_logprobs for rollout in group.rollouts] for group in groups]
    if all(group.trainer_logprobs for group in groups):
        return [list(group.trainer_logprobs) for group in groups] or None
    for group in groups:
        if group.policy_version != weights_version:
            raise ConfigError(
                f"rollout.logprobs is recompute, but the rollouts of {group.sample.sample_id!r} were sampled at "
                f"version {group.policy_version} of the weights, which are now at {weights_version}. Only the weights "
                "that sampled can recompute their log-probabilities. Set rollout.logprobs=reuse, which takes the "
                "recorded ones."
            )
    return None


def mismatch_due(settings: RolloutSettings, step: int) -> bool:
    """Whether optimizer step ``step``, counted from 1, compares generation's log-probabilities with training's."""
    every = settings.mismatch_every
    return settings.logprobs == "recompute" or (every > 0 and (step == 1 or step % every == 0))


def mismatch_sums(
    trainer_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, log_ratio_clamp: float
) -> dict[Metric, torch.Tensor]:
    """Sums over response tokens of the difference d = trainer - rollout, in nats, and the largest |d|, as fp64 scalars.

    They say how generation and training differ only where both ran under the same weights.

    Args:
        trainer_logprobs: [R_total] of the sampled tokens under the training forward, detached.
        rollout_logprobs: [R_total] as recorded at generation.
        log_ratio_clamp: d is held within +- this where it is exponentiated.
    """
    # In fp32 exp(d) - 1 - d of a small d is mostly rounding.
    difference = trainer_logprobs.double() - rollout_logprobs.double()
    held = difference.clamp(-log_ratio_clamp, log_ratio_clamp)
    return {
        MISMATCH_KL: (torch.expm1(held) - held).sum(),
        MISMATCH_ABS: difference.abs().sum(),
        MISMATCH_MAX: difference.abs().max(),
        MISMATCH_EXP_ABS: held.abs().exp().sum(),
    }


def mismatch_warning(metrics: Mapping[str, float | None]) -> str | None:
    """A line for people where ``metrics`` hold a mismatch beyond rounding, else None."""
    high = [
        f"{name} is {value:.3g}, above {bound}"
        for name, bound in HEALTHY.items()
        if (value := metrics.get(name)) is not None and not value <= bound
    ]
    if not high:
        return None
    return (
        f"{' and '.join(high)} (largest difference {metrics['mismatch/abs_max']:.3g} nats): generation and training "
        "compute different log-probabilities for the same tokens and weights. Look at the check of the attention "
        "kernel printed at start, and run a step with model.dtype=fp32: rounding all but disappears there, a defect "
        "stays. rollout.logprobs=recompute keeps the difference out of the loss's ratio, but not out of what was "
        "sampled."
    )
