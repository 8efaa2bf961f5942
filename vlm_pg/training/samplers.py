"""Who samples a run's rollouts, as ``rollout.engine`` says, and who samples the controls of a temporal reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from vlm_pg.config import RunConfig
from vlm_pg.errors import ConfigError
from vlm_pg.models.policy import Policy
from vlm_pg.rollout.contracts import Sampler
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.training.stop import StopRequest
from vlm_pg.types import Sample


def make_sampler(
    config: RunConfig,
    policy: Policy,
    samples: Sequence[Sample],
    run_folder: Path,
    stop: StopRequest,
    warn: Callable[[str], None],
) -> Sampler:
    """What ``rollout.engine`` names; a server is asked what it is at once.

    Raises:
        ConfigError: the packages of the server engine are not installed.
    """
    if config.rollout.engine == "in_process":
        return RolloutEngine(policy, config.rollout, config.run.seed, stop.between_tokens, lambda: stop.asked)
    try:
        from vlm_pg.rollout.server.engine import ServerEngine
        from vlm_pg.rollout.server.messages import ChatMessages
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"rollout.engine is server, which needs the package {error.name}. Install it with: "
            "pip install 'vlm-pg[server]'."
        ) from error
    messages = ChatMessages(policy, {sample.sample_id: sample for sample in samples})
    return ServerEngine(
        policy, config.rollout, config.run.seed, stop.between_tokens, messages, run_folder / "served", warn
    )


def make_control_sampler(config: RunConfig, policy: Policy, should_stop: Callable[[], bool]) -> Sampler | None:
    """Samples T-GRPO's control groups, G / 2 rollouts each; None without a temporal bonus."""
    if not config.algorithm.temporal_bonus:
        return None
    half = max(1, config.rollout.num_generations // 2)
    settings = config.rollout.model_copy(update={"num_generations": half})
    return RolloutEngine(policy, settings, config.run.seed, should_stop)
