"""Rollouts, rewards and advantages of one step's questions: complete groups, before anything is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vlm_pg.algorithms.advantages import group_advantages
from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.config import RunConfig
from vlm_pg.errors import ConfigError
from vlm_pg.models.policy import Policy
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.rewards.rubric import score
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.types import Prompt, RolloutGroup, Sample

if TYPE_CHECKING:
    from vlm_pg.rollout.server.engine import ServerEngine


def make_rollout_engine(
    config: RunConfig,
    policy: Policy,
    samples: Sequence[Sample],
    run_folder: Path,
    should_stop: Callable[[], bool],
    warn: Callable[[str], None],
) -> RolloutEngine | ServerEngine:
    """What ``rollout.engine`` names; a server is asked what it is at once.

    Raises:
        ConfigError: the packages of the server engine are not installed.
    """
    if config.rollout.engine == "in_process":
        return RolloutEngine(policy, config.rollout, config.run.seed, should_stop)
    try:
        from vlm_pg.rollout.server.engine import ServerEngine
        from vlm_pg.rollout.server.messages import ChatMessages
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"rollout.engine is server, which needs the package {error.name}. Install it with: "
            "pip install 'vlm-pg[server]'."
        ) from error
    builder = PromptBuilder(policy.processor, config.prompt, policy.positions)
    by_id = {sample.sample_id: sample for sample in samples}
    messages = ChatMessages(policy, by_id, builder.question_text, config.prompt.system)
    return ServerEngine(policy, config.rollout, config.run.seed, should_stop, messages, run_folder / "served", warn)


def sample_groups(
    engine: RolloutEngine | ServerEngine, questions: Sequence[tuple[Sample, Prompt]], step: int | str
) -> list[RolloutGroup]:
    """``num_generations`` rollouts of every question under the policy as it is now."""
    rollouts = engine.generate([prompt for _, prompt in questions], step)
    version = engine.policy.weights_version
    return [
        RolloutGroup(sample, prompt, group, version)
        for (sample, prompt), group in zip(questions, rollouts, strict=True)
    ]


def reward_groups(groups: Sequence[RolloutGroup], settings: RewardSettings) -> list[RolloutGroup]:
    """The groups with the reward of every rollout."""
    return [
        replace(group, rewards=tuple(score(group.sample, rollout.text, settings) for rollout in group.rollouts))
        for group in groups
    ]


def advantage_groups(groups: Sequence[RolloutGroup], settings: AlgorithmSettings) -> list[RolloutGroup]:
    """The groups with the advantage of every rollout, each group over all of its own rollouts."""
    return [
        replace(
            group,
            advantages=tuple(group_advantages([reward.total for reward in group.rewards], settings.scale_advantages)),
        )
        for group in groups
    ]


def group_sums(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Sums over this rank's groups from which the step's metrics are made; ``*_n`` are the counts to divide by."""
    sums = {"groups": 0.0, "no_spread": 0.0, "rollouts": 0.0, "tokens": 0.0, "truncated": 0.0, "no_value": 0.0}
    for part in ("reward", "accuracy", "format"):
        sums[f"{part}_sum"] = sums[f"{part}_n"] = 0.0
    for group in groups:
        totals = [reward.total for reward in group.rewards if reward.total is not None]
        sums["groups"] += 1
        sums["no_spread"] += len(set(totals)) < 2
        for rollout, reward in zip(group.rollouts, group.rewards, strict=True):
            sums["rollouts"] += 1
            sums["tokens"] += len(rollout.token_ids)
            sums["truncated"] += rollout.finish_reason == "length"
            sums["no_value"] += reward.total is None
            values = {"reward": reward.total, **reward.parts}
            for part in ("reward", "accuracy", "format"):
                value = values.get(part)
                if value is not None:
                    sums[f"{part}_sum"] += value
                    sums[f"{part}_n"] += 1
    return sums


def group_metrics(sums: dict[str, float]) -> dict[str, float | None]:
    """The step's metrics from sums over all ranks; None where nothing had a value."""

    def mean(part: str) -> float | None:
        return sums[f"{part}_sum"] / sums[f"{part}_n"] if sums[f"{part}_n"] else None

    rollouts = max(1.0, sums["rollouts"])
    return {
        "reward": mean("reward"),
        "reward/accuracy": mean("accuracy"),
        "reward/format": mean("format"),
        "groups": sums["groups"],
        "groups_without_spread": sums["no_spread"] / max(1.0, sums["groups"]),
        "response_tokens_mean": sums["tokens"] / rollouts,
        "truncated_share": sums["truncated"] / rollouts,
        "no_value_share": sums["no_value"] / rollouts,
    }
