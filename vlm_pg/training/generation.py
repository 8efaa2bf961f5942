"""Sampling a step's rollouts, in one or several rounds, and the control groups that a temporal reward needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vlm_pg.config import RunConfig
from vlm_pg.errors import ConfigError
from vlm_pg.memory import GIB
from vlm_pg.metrics import Metric
from vlm_pg.models.policy import Policy
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.training.tally import Tally
from vlm_pg.types import BadSample, Prompt, RolloutGroup, Sample

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


PROMPT_TOKENS = Metric("generation/prompt_tokens", "tokens", "sum")
PREFILL_TOKENS = Metric("generation/prefill_tokens", "tokens", "sum")
NEW_TOKENS = Metric("generation/new_tokens", "tokens", "sum")
PEAK = Metric("generation/peak_gib", "GiB of keys and values", "largest")


class Generation:
    """The engine that samples, and what it has done since ``begin``."""

    def __init__(self, rollouts: RolloutEngine | ServerEngine, control: RolloutEngine | None):
        self.rollouts, self._control = rollouts, control
        self.begin()

    def begin(self) -> None:
        """A new step begins."""
        self.tally = Tally()
        self._count(0, 0, 0, 0)

    def sample(self, questions: Sequence[tuple[Sample, Prompt]], step: int) -> list[RolloutGroup]:
        """``num_generations`` rollouts of every question under the policy as it is now; none where a server failed."""
        return self._sample(self.rollouts, questions, step)

    def take_faults(self) -> list[BadSample] | None:
        """Questions for which a server had no usable rollouts; None where none samples."""
        return None if isinstance(self.rollouts, RolloutEngine) else self.rollouts.take_faults()

    def sample_controls(self, questions: Sequence[tuple[Sample, Prompt]], step: int) -> list[RolloutGroup]:
        """Half as many rollouts of questions whose frames are out of order."""
        assert self._control is not None
        return self._sample(self._control, questions, f"{step}/control")

    def _sample(
        self, engine: RolloutEngine | ServerEngine, questions: Sequence[tuple[Sample, Prompt]], key: int | str
    ) -> list[RolloutGroup]:
        rollouts = engine.generate([prompt for _, prompt in questions], key)
        if questions and isinstance(engine, RolloutEngine):
            stats = engine.stats
            self._count(stats.prompt_tokens, stats.prefill_tokens, stats.new_tokens, stats.peak_bytes)
        version = engine.policy.weights_version
        return [
            RolloutGroup(sample, prompt, group, version)
            for (sample, prompt), group in zip(questions, rollouts, strict=True)
        ]

    def _count(self, prompt_tokens: int, prefill_tokens: int, new_tokens: int, peak_bytes: int) -> None:
        counted = {PROMPT_TOKENS: prompt_tokens, PREFILL_TOKENS: prefill_tokens, NEW_TOKENS: new_tokens}
        self.tally.add_all(counted | {PEAK: peak_bytes / GIB})


def control_engine(config: RunConfig, policy: Policy, should_stop: Callable[[], bool]) -> RolloutEngine | None:
    """Samples T-GRPO's control groups, G / 2 rollouts each; None without a temporal bonus."""
    if not config.algorithm.temporal_bonus:
        return None
    half = max(1, config.rollout.num_generations // 2)
    settings = config.rollout.model_copy(update={"num_generations": half})
    return RolloutEngine(policy, settings, config.run.seed, should_stop)
