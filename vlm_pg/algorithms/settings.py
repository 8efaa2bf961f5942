"""Settings of the policy-gradient algorithm: one family, and named points in it (``presets``)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from vlm_pg.algorithms.registry import BASELINE_AND_SCALE, ESTIMATORS, LOSSES, PresetName, known_or_own, with_preset
from vlm_pg.settings import Settings

Baseline = Literal["group_mean", "leave_one_out", "none"]
AdvantageScale = Literal["std", "batch", "whiten", "none"]
# Statistics over the whole step; the others are those of one group, and may be made round by round.
OF_STEP: tuple[AdvantageScale, ...] = ("batch", "whiten")
RatioLevel = Literal["token", "sequence"]
ImportanceLevel = Literal["token", "sequence", "geometric"]
ImportanceMode = Literal["truncate", "mask", "reject"]
LossAverage = Literal["token_mean", "sequence_mean", "sequence_sum", "constant_length"]
KlEstimator = Literal["k1", "k2", "k3"]
KlPlace = Literal["loss", "reward", "token_reward"]
PruneScope = Literal["question", "rank"]
PruneMetric = Literal["smallest", "largest", "random"]


class AlgorithmSettings(Settings):
    """GRPO and its family. Every algorithm is a choice of these values; ``preset`` makes the choice of a paper."""

    preset: PresetName | None = Field(
        default=None,
        description="Start from a paper's values. Values that define the algorithm cannot be overridden; others can. "
        "docs/algorithms.md lists all values with their sources.",
    )

    # Rewards to advantages
    advantages: str = Field(
        default=BASELINE_AND_SCALE,
        description="Advantage estimator. baseline_and_scale: as set by baseline and scale_advantages. Or your own, as "
        "path/to/file.py:function or package.module:function.",
    )
    advantage_arguments: dict[str, Any] = Field(
        default_factory=dict, description="Further keyword arguments for your own estimator."
    )
    baseline: Baseline = Field(
        default="group_mean",
        description="What is subtracted from a reward. group_mean: mean of its group (GRPO). leave_one_out: mean of "
        "the other rewards of its group (RLOO). none: nothing (REINFORCE++, which whitens).",
    )
    scale_advantages: AdvantageScale = Field(
        default="std",
        description="What advantages are divided by. std: sample standard deviation of the group's rewards + 1e-4. "
        "batch: standard deviation of all rewards of the step + 1e-4. whiten: the step's advantages are normalised to "
        "mean 0 and standard deviation 1. none: nothing.",
    )
    normalise_parts: bool = Field(
        default=False,
        description="Compute advantages of each part of the reward separately (baseline and scale) and sum them with "
        "the parts' weights, instead of computing advantages of the total reward.",
    )
    overlong_share: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="Last share of rollout.max_new_tokens over which the reward falls linearly, by up to "
        "overlong_penalty (DAPO's soft overlong punishment); a truncated response loses all of it. 0: off.",
    )
    overlong_penalty: float = Field(default=1.0, gt=0.0, le=100.0, description="Penalty of the longest response.")
    temporal_bonus: float = Field(
        default=0.0,
        ge=0.0,
        le=100.0,
        description="T-GRPO: added to the reward of right answers to a video question if the group's mean accuracy is "
        "at least temporal_ratio times that of a control group, which sees the frames in random order. 0: off, no "
        "control group.",
    )
    temporal_ratio: float = Field(
        default=0.8, ge=0.0, le=10.0, description="Ratio of mean accuracies required by temporal_bonus."
    )
    length_bonus: float = Field(
        default=0.0,
        ge=0.0,
        le=100.0,
        description="Video-R1: added to the reward of right answers whose length is within length_bonus_tokens, in "
        "groups with more than one right answer. 0: off.",
    )
    length_bonus_tokens: tuple[int, int] = Field(
        default=(320, 512), description="Minimum and maximum length, in tokens, of a response that gets length_bonus."
    )
    right_above: float = Field(
        default=0.1,
        ge=0.0,
        lt=1.0,
        description="For temporal_bonus and length_bonus, an answer is right if its accuracy is above this.",
    )

    # Which rollouts train
    resample_rounds: int = Field(
        default=0,
        ge=0,
        le=100,
        description="DAPO's dynamic sampling: groups whose rewards are all equal are replaced by groups of further "
        "questions, in at most this many rounds per step. 0: off.",
    )
    mask_truncated: bool = Field(
        default=False,
        description="Exclude responses truncated at rollout.max_new_tokens from the loss; they still count in the "
        "group statistics.",
    )
    prune_rate: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="CPPO: share P of the rollouts that are not trained on; floor(G * (1 - P)) of each group are kept.",
    )
    prune_scope: PruneScope = Field(
        default="question",
        description="Which rollouts are compared for pruning. question: those of one group. rank: all that a rank has "
        "sampled (with prune_fill: in the same round).",
    )
    prune_metric: PruneMetric = Field(
        default="smallest",
        description="Which rollouts are dropped: those with the smallest |advantage| (CPPO), with the largest, or "
        "random ones (for ablations).",
    )
    prune_fill: bool = Field(
        default=True,
        description="CPPO's dynamic completion allocation: the tokens freed by pruning are used for further questions, "
        "which are pruned too, so that an update has as many tokens as without pruning.",
    )
    prune_correction: bool = Field(
        default=False,
        description="Draw the rollouts to keep with probabilities that increase with |advantage| (with "
        "prune_metric=random: equal probabilities) and weight them by the inverse, so that the expected gradient is "
        "the same as without pruning.",
    )

    # The loss
    loss: str = Field(
        default="clip",
        description="clip: PPO's clipped ratio times advantage. cispo: clipped and detached ratio times advantage "
        "times log-probability. Or your own, as path/to/file.py:function or package.module:function.",
    )
    loss_arguments: dict[str, Any] = Field(
        default_factory=dict, description="Further keyword arguments for your own loss."
    )
    ratio_level: RatioLevel = Field(
        default="token",
        description="token: probability ratio of each token. sequence: geometric mean of the ratios of a response's "
        "tokens (GSPO).",
    )
    clip_low: float = Field(
        default=0.2, ge=0.0, le=1.0, description="The probability ratio is clipped from below at 1 - clip_low."
    )
    clip_high: float = Field(
        default=0.2,
        ge=0.0,
        le=10.0,
        description="The probability ratio is clipped from above at 1 + clip_high. A value above clip_low is DAPO's "
        "clip-higher.",
    )
    dual_clip: float | None = Field(
        default=None,
        gt=1.0,
        le=100.0,
        description="If the advantage is negative, the ratio is also clipped from above at this value (dual-clip PPO).",
    )
    importance_cap: float | None = Field(
        default=None,
        gt=0.0,
        le=100.0,
        description="Multiply each token's loss by min(p_trainer / p_rollout, importance_cap), detached: truncated "
        "importance sampling, which corrects for the mismatch between generation and training. importance_level and "
        "importance_mode select other weights. null: off. Needs rollout.logprobs=recompute.",
    )
    importance_level: ImportanceLevel = Field(
        default="token",
        description="Ratio bounded by importance_cap. token: that of each token. sequence: product of the ratios of a "
        "response's tokens. geometric: their geometric mean.",
    )
    importance_mode: ImportanceMode = Field(
        default="truncate",
        description="Weight of a token from its ratio r. truncate: r clipped to importance_floor and importance_cap "
        "(TIS). mask: r between them, else 0 (MIS, IcePop). reject: 1 between them, else 0.",
    )
    importance_floor: float | None = Field(
        default=None, gt=0.0, le=1.0, description="Lower bound of the ratio, see importance_mode. null: none."
    )
    kl_coef: float = Field(
        default=0.0,
        ge=0.0,
        le=10.0,
        description="Weight of the KL to the reference model; 0: no reference model is loaded.",
    )
    kl_estimator: KlEstimator = Field(
        default="k3",
        description="KL estimator per token, with d = policy - reference log-probability. k1: d. k2: d^2 / 2. k3: "
        "exp(-d) - 1 + d.",
    )
    kl_in: KlPlace = Field(
        default="loss",
        description="Where the KL is applied. loss: added to the loss. reward: the sum over a response is subtracted "
        "from its reward. token_reward: the sum from a token to the end is subtracted from that token's advantage "
        "(REINFORCE++).",
    )
    entropy_coef: float = Field(
        default=0.0, ge=0.0, le=10.0, description="Weight of the entropy bonus, which is subtracted from the loss."
    )
    loss_average: LossAverage = Field(
        default="token_mean",
        description="Weight of one response token in the optimizer batch. token_mean: 1 / tokens. sequence_mean: 1 / "
        "(tokens of its response * responses). sequence_sum: 1 / responses. constant_length: 1 / "
        "(rollout.max_new_tokens * responses).",
    )
    log_ratio_clamp: float = Field(
        default=20.0,
        gt=0.0,
        le=80.0,
        description="Log-ratios are clamped to +- this value before they are exponentiated (exp(80) still fits in "
        "float32).",
    )

    # Updates of one batch of rollouts
    num_iterations: int = Field(default=1, ge=1, le=64, description="Passes over each step's rollouts.")
    minibatches: int = Field(
        default=1, ge=1, le=1024, description="Optimizer updates per pass, each on a share of the step's groups."
    )

    @model_validator(mode="before")
    @classmethod
    def _start_from_preset(cls, values: Any) -> Any:
        return with_preset(values) if isinstance(values, dict) else values

    @field_validator("loss")
    @classmethod
    def _loss_is_known(cls, value: str) -> str:
        return known_or_own(value, LOSSES, "loss")

    @field_validator("advantages")
    @classmethod
    def _estimator_is_known(cls, value: str) -> str:
        return known_or_own(value, ESTIMATORS, "advantage estimator")

    def impossible(self) -> list[str]:
        return _impossible_losses(self) + _impossible_advantages(self) + _impossible_choices(self)

    @property
    def own_advantages(self) -> bool:
        """Whether an estimator of the user's own stands in place of baseline and scale."""
        return self.advantages not in ESTIMATORS

    @property
    def updates(self) -> int:
        """Optimizer updates per step."""
        return self.num_iterations * self.minibatches

    @property
    def differences_from_preset(self) -> dict[str, tuple[Any, Any]]:
        """Values that were set beside the preset: name -> (here, with the preset alone); without one, the defaults'."""
        usual = AlgorithmSettings(preset=self.preset)
        return {name: (value, getattr(usual, name)) for name, value in self if value != getattr(usual, name)}


class DistillationSettings(Settings):
    """Section ``distillation``: a teacher's distributions over the tokens of the policy's own rollouts."""

    teacher: str | None = Field(
        None,
        description="Folder or hub name of the teacher, of the policy's family and tokenizer. Needed for "
        "training.objective=distill; with rl its divergence is added to the loss.",
    )
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = Field(
        "reverse_kl",
        description="Per token, of policy p and teacher q. reverse_kl: KL(p || q). forward_kl: KL(q || p). jsd: "
        "b * KL(q || m) + (1 - b) * KL(p || m) with m = b * q + (1 - b) * p, b = jsd_weight (GKD, arXiv 2306.13649).",
    )
    jsd_weight: float = Field(0.5, gt=0.0, lt=1.0, description="Weight b of the teacher in jsd.")
    top_k: int = Field(
        64,
        ge=0,
        description="The teacher's k most probable tokens, between which and all others together the divergence is "
        "taken: a lower bound of that between whole distributions. 0: the whole vocabulary.",
    )
    coef: float = Field(1.0, gt=0.0, le=1000.0, description="Weight of the divergence in the loss.")


class PreferenceSettings(Settings):
    """Section ``preference``: training on pairs of responses (``training.objective=dpo``)."""

    loss: Literal["sigmoid", "ipo"] = Field(
        "sigmoid",
        description="Of h = log-ratio to the reference of the chosen response, minus that of the rejected one. "
        "sigmoid: -log sigmoid(beta * h) (DPO). ipo: (h - 1 / (2 * beta))^2, with h of means over tokens (IPO).",
    )
    beta: float = Field(0.1, gt=0.0, le=100.0, description="Strength of the pull towards the reference.")
    reference: str | None = Field(
        None,
        description="Folder or hub name of the reference model; null: the starting point, which with model.lora is the "
        "model without its adapter, unless model.path is an adapter: then a copy of that.",
    )


def _impossible_losses(algorithm: AlgorithmSettings) -> list[str]:
    """See ``Settings.impossible``: what goes with the loss."""
    if algorithm.loss not in LOSSES:
        return []
    only = LOSSES[algorithm.loss].only.items()
    problems = [message for key, (value, message) in only if getattr(algorithm, key) != value]
    return problems + _untaken("algorithm.loss_arguments", algorithm.loss_arguments, f"the loss {algorithm.loss}")


def _impossible_advantages(algorithm: AlgorithmSettings) -> list[str]:
    """See ``Settings.impossible``: what goes with the estimator."""
    baseline, scale = algorithm.baseline, algorithm.scale_advantages
    unread = _as_set(algorithm, "preset", "baseline", "scale_advantages", "normalise_parts")
    checks = (
        (
            scale in ("std", "batch") and baseline == "none",
            f"algorithm.baseline is none and algorithm.scale_advantages is {scale}: equal rewards "
            "would be divided by nothing, and keep their mean. Set algorithm.scale_advantages=whiten or none.",
        ),
        (
            algorithm.own_advantages and bool(unread),
            f"algorithm.advantages is {algorithm.advantages}, in place of which nothing else makes advantages, and "
            f"{unread}. Leave that out, or algorithm.advantages={BASELINE_AND_SCALE}.",
        ),
        (
            algorithm.prune_rate > 0 and algorithm.prune_fill and (baseline == "none" or scale in OF_STEP),
            f"algorithm.prune_rate is {algorithm.prune_rate:g} with prune_fill, which asks further questions until the "
            f"freed tokens are used, and baseline={baseline}, scale_advantages={scale}, "
            "whose statistics are over all of the step's questions. Set algorithm.prune_fill=false, or "
            "scale_advantages=std or none with baseline=group_mean or leave_one_out.",
        ),
    )
    problems = [message for impossible, message in checks if impossible]
    arguments = {} if algorithm.own_advantages else algorithm.advantage_arguments
    return problems + _untaken("algorithm.advantage_arguments", arguments, algorithm.advantages)


def _as_set(algorithm: AlgorithmSettings, *names: str) -> str:
    """Those of the settings that differ from their defaults, as text."""
    fields, values = AlgorithmSettings.model_fields, {name: getattr(algorithm, name) for name in names}
    return ", ".join(f"algorithm.{name} is {x}" for name, x in values.items() if x != fields[name].default)


def _untaken(key: str, arguments: dict[str, Any], name: str) -> list[str]:
    fault = f"{key} has {', '.join(arguments)}, and {name} takes none: it reads settings. "
    return [fault + "Remove them, or name a function of your own."] if arguments else []


def _impossible_choices(algorithm: AlgorithmSettings) -> list[str]:
    """See ``Settings.impossible``: bonuses, which rollouts train, and importance weights."""
    pruned, cap, floor = algorithm.prune_rate > 0, algorithm.importance_cap, algorithm.importance_floor
    unread = _as_set(algorithm, "importance_level", "importance_mode", "importance_floor")
    checks = (
        (
            cap is None and bool(unread),
            f"algorithm.importance_cap is null, so that no importance weights are computed, and {unread}. Set "
            "algorithm.importance_cap=2, or leave that out.",
        ),
        (
            cap is not None and floor is not None and floor >= cap,
            f"algorithm.importance_floor is {floor} and algorithm.importance_cap is {cap}; no ratio would be between "
            "them. Set a floor below the cap.",
        ),
        (
            algorithm.length_bonus_tokens[0] > algorithm.length_bonus_tokens[1],
            f"algorithm.length_bonus_tokens is {list(algorithm.length_bonus_tokens)}: the shortest is longer than the "
            "longest. Swap them.",
        ),
        (
            algorithm.preset == "t_grpo" and not algorithm.temporal_bonus,
            "algorithm.preset is t_grpo and algorithm.temporal_bonus is 0, which leaves GRPO. Set "
            "algorithm.preset=grpo, or a bonus.",
        ),
        (
            pruned and algorithm.mask_truncated,
            "algorithm.prune_rate and algorithm.mask_truncated are both set: pruning would keep responses that are "
            "left out afterwards because they were cut off. Set algorithm.mask_truncated=false, and overlong_share if "
            "long responses shall lose.",
        ),
        (
            pruned and algorithm.prune_correction and algorithm.prune_metric == "largest",
            "algorithm.prune_correction is true and algorithm.prune_metric is largest: what is never kept cannot be "
            "corrected for. Set prune_metric=smallest or random, or prune_correction=false.",
        ),
    )
    return [message for impossible, message in checks if impossible]
