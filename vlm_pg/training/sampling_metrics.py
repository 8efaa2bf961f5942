"""What a step's metrics say of where its rollouts and rewards came from, over all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from vlm_pg.distributed import gather_objects, max_over_ranks, sum_over_ranks
from vlm_pg.memory import GIB
from vlm_pg.rewards.rewarder import Rewarder
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.training.generation import Generation

if TYPE_CHECKING:
    from vlm_pg.rollout.server.engine import ServerEngine

Values = dict[str, float | None]


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
        return {f"reward_errors/{name}": float(count) for name, count in counts.items()}


def sampling_metrics(generation: Generation, seconds: float, device: torch.device) -> Values:
    """Tokens, speed and memory of generation in this process, or what a server owed; called on all ranks.

    Args:
        seconds: that the step's rollouts took.
    """
    if not isinstance(generation.rollouts, RolloutEngine):
        return _server_metrics(generation.rollouts, device)
    counts = generation.counts
    counted = {
        "prompt_tokens": float(counts.prompt_tokens),
        "prefill_tokens": float(counts.prefill_tokens),
        "new_tokens": float(counts.new_tokens),
    }
    sums = sum_over_ranks(counted, device)
    peak = max_over_ranks({"gib": counts.peak_bytes / GIB}, device)["gib"]
    values: Values = {f"generation/{name}": value for name, value in sums.items()}
    return values | {"generation/tokens_per_second": sums["new_tokens"] / seconds, "generation/peak_gib": peak}


def _server_metrics(server: ServerEngine, device: torch.device) -> Values:
    """How far the server is behind, how far its weights are away, and what it owed."""
    found = server.take_divergence()
    sums = sum_over_ranks(
        {"tokens": float(found.tokens), "kl": found.kl, "again": float(server.take_asked_again())}, device
    )
    largest = max_over_ranks({"largest": found.largest}, device)["largest"]
    values: Values = {"rollouts_asked_again": sums["again"]}
    if sums["tokens"]:
        values |= {"server_divergence": sums["kl"] / sums["tokens"], "server_divergence_max": largest}
    lag = server.lag_steps
    return values if lag is None else values | {"rollout_lag_steps": lag}
