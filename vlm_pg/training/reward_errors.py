"""How often reward functions of the user's have failed, over all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from vlm_pg.distributed import gather_objects
from vlm_pg.metrics import Metric
from vlm_pg.rewards.rewarder import Rewarder

REWARD_ERRORS = Metric("reward_errors/", "failures so far", "same")


class RewardErrors:
    """How often reward functions of the user's have failed.

    Only rank 0 is heard, so a function's first error on another rank is shown here.
    """

    def __init__(self, rewarder: Rewarder, warn: Callable[[str], None]):
        self._rewarder, self._warn = rewarder, warn
        self._shown: set[str] = set()

    def count(self) -> dict[str, float | None]:
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
