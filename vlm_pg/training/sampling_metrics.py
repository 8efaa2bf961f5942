"""What a step's metrics say of where its rollouts and rewards came from, over all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from vlm_pg.distributed import gather_objects
from vlm_pg.metrics import Metric
from vlm_pg.rewards.rewarder import Rewarder
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.training.generation import NEW_TOKENS, Generation
from vlm_pg.training.tally import Tally

if TYPE_CHECKING:
    from vlm_pg.rollout.server.engine import ServerEngine

Values = dict[str, float | None]

REWARD_ERRORS = Metric("reward_errors/", "failures so far", "same")
TOKENS_PER_SECOND = Metric("generation/tokens_per_second", "new tokens per second", "same")
ASKED_AGAIN = Metric("rollouts_asked_again", "rollouts", "sum")
DIVERGENCE = Metric("server_divergence", "nat per token")
DIVERGENCE_MAX = Metric("server_divergence_max", "nat", "largest")
LAG = Metric("rollout_lag_steps", "steps", "same")


class RewardErrors:
    """How often reward functions of the user's have failed.

    Only rank 0 is heard, so a function's first error on another rank is shown here.
    """

    def __init__(self, rewarder: Rewarder, warn: Callable[[str], None]):
        self._rewarder, self._warn = rewarder, warn
        self._shown: set[str] = set()

    def count(self) -> Values:
        """Failures so far of each function that has failed, over all ranks; called on all of them."""
        rewarder = self._rewarder
        self._shown |= set(rewarder.first_errors)  # the rewarder itself shows these
        counts: Counter[str] = Counter()
        for failures, messages in gather_objects((dict(rewarder.failures), dict(rewarder.first_errors))):
            counts.update(failures)
            for name in messages.keys() - self._shown:
                self._shown.add(name)
                self._warn(messages[name])
        return {REWARD_ERRORS.of(name): float(count) for name, count in counts.items()}


def sampling_metrics(generation: Generation, seconds: float) -> Values:
    """Tokens, speed and memory of generation in this process, or what a server owed; called on all ranks.

    Args:
        seconds: that the step's rollouts took.
    """
    if not isinstance(generation.rollouts, RolloutEngine):
        return _server_metrics(generation.rollouts)
    found = generation.tally.reduced()
    return found | {TOKENS_PER_SECOND: found[NEW_TOKENS] / seconds}


def _server_metrics(server: ServerEngine) -> Values:
    """How far the server is behind, how far its weights are away, and what it owed."""
    found, tally = server.take_divergence(), Tally()
    tally.add(ASKED_AGAIN, server.take_asked_again())
    if found.tokens:
        tally.add(DIVERGENCE, found.kl, found.tokens)
        tally.add(DIVERGENCE_MAX, found.largest)
    lag = server.lag_steps
    return tally.reduced() | ({} if lag is None else {LAG: lag})
