"""The loss of one forward pass, and the mismatch of log-probabilities between generation and training.

Log-probabilities of the behaviour policy come from generation or from the training forward. Both run the same weights
through different kernels and shapes, so they round differently; a large difference means that they compute different
functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from vlm_pg.algorithms.losses import TokenLoss, divergence_term, entropy_bonus, kl_term
from vlm_pg.algorithms.own import load_loss
from vlm_pg.algorithms.settings import AlgorithmSettings, DistillationSettings
from vlm_pg.algorithms.tokens import ResponseTokens, importance_weights
from vlm_pg.batching.plan import Piece
from vlm_pg.errors import ConfigError
from vlm_pg.metrics import ENTROPY_CHART, Chart, Metric
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.tally import Tally
from vlm_pg.types import Rollout, RolloutGroup

LOSS = Metric("loss", how="sum", chart=Chart("Loss", 10), over_updates="mean")
ENTROPY = Metric("entropy", "nat per token", chart=ENTROPY_CHART)
RESPONSE_TOKENS = Metric("response_tokens", "tokens", "sum")

LogprobsSource = Literal["reuse", "recompute"]

# k3 estimate of KL(rollout || trainer) from d = trainer - rollout: exp(d) - 1 - d (joschu.net/blog/kl-approx).
MISMATCH_KL = Metric("mismatch/kl", "nat per token")
MISMATCH_ABS = Metric("mismatch/abs_mean", "nat")
MISMATCH_MAX = Metric("mismatch/abs_max", "nat", "largest")
MISMATCH_EXP_ABS = Metric("mismatch/exp_abs_mean", "ratio of probabilities")

# Rounding stays below these bounds, in bf16 too. Where other trainers measured more, they found a defect.
HEALTHY = {MISMATCH_KL: 0.01, MISMATCH_EXP_ABS: 1.05}


@dataclass
class GroupLoss:
    """Loss of passes over some rollouts, from their log-probabilities.

    Args:
        weights: loss weight of each token of each rollout of each group.
        behaviour_logprobs: fp32 [R] of each rollout of each group, the denominator of the loss's ratio; None for those
            of the same forward, where the ratio is 1.
        objective_loss: of another objective than rl, in place of ``algorithm.loss``.
        distillation: the groups have a teacher's tokens, whose divergence is added to the loss.
        measure_mismatch: add differences of the recorded log-probabilities from those of the forward.
        tally: metrics; updated by every call.
    """

    policy: Policy
    groups: Sequence[RolloutGroup]
    weights: Sequence[Sequence[float]]
    algorithm: AlgorithmSettings
    behaviour_logprobs: Sequence[Sequence[torch.Tensor]] | None
    measure_mismatch: bool = False
    objective_loss: TokenLoss | None = None
    distillation: DistillationSettings | None = None
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self._policy_loss = self.objective_loss or load_loss(self.algorithm)

    def of_pass(
        self,
        passes: Sequence[Sequence[Piece]],
        of_reference: Sequence[torch.Tensor] | None,
        number: int,
        logprobs: torch.Tensor,
        entropies: torch.Tensor,
    ) -> torch.Tensor:
        """The loss of pass ``number``.

        Args:
            passes: the rollouts of each pass, in the order of their tokens. Further passes, which other ranks need,
                have zero loss connected to all outputs, so every rank runs the same graph.
            of_reference: the reference's log-probabilities of each pass; None without a KL term.
            logprobs, entropies: fp32 [R] of the pass; with a teacher logprobs of the response's and of its tokens,
                [R, 1 + k].
        """
        if number >= len(passes):
            return (logprobs.sum() + entropies.sum()) * 0.0
        of_teacher: torch.Tensor | None = None
        if self.distillation is not None:
            logprobs, of_teacher = logprobs[:, 0], logprobs[:, 1:]
        pieces, ref_logprobs = passes[number], None if of_reference is None else of_reference[number]
        rollouts = [(piece.group, index) for piece in pieces for index in piece.responses]
        if (trained := self._trained_tokens(rollouts)) is not None:
            logprobs, entropies = logprobs[trained], entropies[trained]
            of_teacher = None if of_teacher is None else of_teacher[trained]
            ref_logprobs = None if ref_logprobs is None else ref_logprobs[trained]
        tokens = self._tokens(rollouts, logprobs, entropies, ref_logprobs)
        loss, metrics = self._policy_loss(tokens)
        if ref_logprobs is not None:
            term, of_term = kl_term(tokens, self.algorithm)
            loss = loss + term
            self.tally.add_all(of_term, len(logprobs))
        if self.distillation is not None and of_teacher is not None:
            taught = [self.groups[group].teacher[index].logprobs for group, index in rollouts]
            expected = torch.cat(taught).to(self.policy.device, non_blocking=True)
            expected = expected if trained is None else expected[trained]
            term, of_term = divergence_term(of_teacher, expected, tokens.weights, self.distillation)
            loss = loss + term
            self.tally.add_all(of_term, len(logprobs))
        if self.algorithm.entropy_coef:
            loss = loss + entropy_bonus(tokens, self.algorithm)[0]
        self.tally.add(LOSS, loss.detach())
        self.tally.add(RESPONSE_TOKENS, len(logprobs))
        self.tally.add_all({ENTROPY: entropies.detach().sum(), **metrics}, len(logprobs))
        if self.measure_mismatch:
            self._sum_mismatch(rollouts, logprobs.detach())
        return loss

    def teacher_tokens(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """int64 [R, k] of a pass over these rollouts: the teacher's tokens."""
        found = [self.groups[piece.group].teacher[index].token_ids for piece in pieces for index in piece.responses]
        return torch.cat(found).to(self.policy.device, non_blocking=True)

    def _trained_tokens(self, rollouts: Sequence[tuple[int, int]]) -> torch.Tensor | None:
        """int64 indices of the pass's tokens that have a loss; None: all."""
        members = [self.groups[group].rollouts[index] for group, index in rollouts]
        if all(rollout.loss_mask is None for rollout in members):
            return None
        everything = (torch.ones(len(rollout.token_ids), dtype=torch.bool) for rollout in members)
        masks = [all_ if r.loss_mask is None else r.loss_mask for r, all_ in zip(members, everything, strict=True)]
        return torch.cat(masks).nonzero()[:, 0].to(self.policy.device, non_blocking=True)

    def _tokens(
        self,
        rollouts: Sequence[tuple[int, int]],
        logprobs: torch.Tensor,
        entropies: torch.Tensor,
        ref_logprobs: torch.Tensor | None,
    ) -> ResponseTokens:
        """Inputs of the loss: advantages, weights and log-probabilities of each token that has one."""
        algorithm = self.algorithm
        members = [(self.groups[group], index) for group, index in rollouts]
        lengths = [group.rollouts[index].num_trained for group, index in members]
        weights = torch.tensor([self.weights[group][index] for group, index in rollouts], dtype=torch.float32)
        advantages = [_trained(group.rollouts[index], _advantages(group, index)) for group, index in members]
        behaviour = logprobs.detach()
        if self.behaviour_logprobs is not None:
            of_rollouts = [(self.groups[g].rollouts[i], self.behaviour_logprobs[g][i]) for g, i in rollouts]
            behaviour = self._on_device([_trained(rollout, values) for rollout, values in of_rollouts])
        importance = None
        if algorithm.importance_cap is not None:
            sampled = [group.rollouts[index] for group, index in members]
            recorded = self._on_device([_trained(rollout, rollout.rollout_logprobs) for rollout in sampled])
            importance, metrics = importance_weights(behaviour, recorded, lengths, algorithm)
            self.tally.add_all(metrics, len(logprobs))
        return ResponseTokens(
            logprobs,
            behaviour,
            advantages=self._on_device(advantages),
            weights=self._on_device([weights.repeat_interleave(torch.tensor(lengths))]),
            lengths=lengths,
            importance=importance,
            entropies=entropies,
            ref_logprobs=ref_logprobs,
        )

    def _sum_mismatch(self, rollouts: Sequence[tuple[int, int]], logprobs: torch.Tensor) -> None:
        """Over rollouts of the present weights alone: for others, weights differ too."""
        members = [(self.groups[group], index) for group, index in rollouts]
        trained = logprobs.split([group.rollouts[index].num_trained for group, index in members])
        pairs = [
            (_trained(group.rollouts[index], group.rollouts[index].rollout_logprobs), own)
            for (group, index), own in zip(members, trained, strict=True)
            if group.policy_version == self.policy.weights_version
        ]
        if pairs:
            recorded = self._on_device([sampled for sampled, _ in pairs])
            sums = mismatch_sums(torch.cat([own for _, own in pairs]), recorded, self.algorithm.log_ratio_clamp)
            self.tally.add_all(sums, len(recorded))

    def _on_device(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Joined, without a synchronization of the device."""
        return torch.cat(list(values)).to(self.policy.device, non_blocking=True)


def _trained(rollout: Rollout, values: torch.Tensor) -> torch.Tensor:
    """Those of ``values`` [R] whose tokens have a loss."""
    return values if rollout.loss_mask is None else values[rollout.loss_mask]


def _advantages(group: RolloutGroup, index: int) -> torch.Tensor:
    """fp32 [R] of one rollout."""
    if group.token_advantages:
        return group.token_advantages[index]
    return torch.full((len(group.rollouts[index].token_ids),), group.advantages[index], dtype=torch.float32)


def behaviour_logprobs(
    groups: Sequence[RolloutGroup], source: LogprobsSource, weights_version: int, corrected: bool = False
) -> list[list[torch.Tensor]] | None:
    """Denominator of the ratio: fp32 [R] of each rollout of each group, or None for those of the update's own forward.

    ``reuse``: as recorded at generation; valid however often the weights have changed since.

    ``recompute``: those of the training forward. A single update starts from the weights that sampled, so its own
    detached forward equals a scoring pass before it (None). Several updates need that pass; the groups carry its
    result.

    Args:
        weights_version: the policy's present one.
        corrected: importance weights correct for the weights that sampled (``importance_weights``). The ratio may then
            be to the weights before the update.

    Raises:
        ConfigError: ``recompute`` with rollouts of other weights that were not scored under those.
    """
    if source == "reuse":
        return [[rollout.rollout_logprobs for rollout in group.rollouts] for group in groups]
    if all(group.trainer_logprobs for group in groups):
        return [list(group.trainer_logprobs) for group in groups] or None
    for group in groups:
        if group.policy_version != weights_version and not corrected:
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
    """Sums over response tokens of functions of d = trainer - rollout, in nats, and the largest |d|, as fp64 scalars.

    Args:
        trainer_logprobs: [R_total] of the sampled tokens under the training forward and the same weights, detached.
        rollout_logprobs: [R_total] as recorded at generation.
        log_ratio_clamp: bound of |d| where it is exponentiated.
    """
    # In fp32 exp(d) - 1 - d of a small d is mostly rounding.
    difference = trainer_logprobs.double() - rollout_logprobs.double()
    clamped = difference.clamp(-log_ratio_clamp, log_ratio_clamp)
    return {
        MISMATCH_KL: (torch.expm1(clamped) - clamped).sum(),
        MISMATCH_ABS: difference.abs().sum(),
        MISMATCH_MAX: difference.abs().max(),
        MISMATCH_EXP_ABS: clamped.abs().exp().sum(),
    }


def mismatch_warning(metrics: Mapping[str, float | None]) -> str | None:
    """Warning of a mismatch beyond rounding in ``metrics``, else None."""
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
