"""A server is busy with one batch of questions while the prompts of the next are made, and outputs are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from types import TracebackType

from vlm_pg.rollout.contracts import Sampler
from vlm_pg.types import BadSample, Prompt, Rollout

# The rollouts of each prompt, and why some have none.
Sampled = tuple[list[tuple[Rollout, ...]], list[BadSample]]


class Prefetcher(AbstractContextManager["Prefetcher"]):
    """Asks a sampler; a context manager, which ends what is still being asked when something raises.

    Args:
        sampler: is asked for one batch after the other, in order.
        stop: makes the sampler raise; given for one that works elsewhere, which is asked in a thread of its own. None:
            it works here and now.
    """

    def __init__(self, sampler: Sampler, stop: Callable[[], None] | None):
        self._sampler, self._stop = sampler, stop
        self._thread = None if stop is None else ThreadPoolExecutor(1, "asking")

    @property
    def batches(self) -> int:
        """How many batches may be under way when the next is made; their prompts are in memory."""
        return 0 if self._thread is None else 1

    def ask(self, prompts: Sequence[Prompt], key: str) -> Callable[[], Sampled]:
        """Begin to sample. What is returned waits for the rollouts, and raises what the sampler does."""
        if self._thread is None:
            sampled = self._sample(prompts, key)
            return lambda: sampled
        return self._thread.submit(self._sample, prompts, key).result

    def _sample(self, prompts: Sequence[Prompt], key: str) -> Sampled:
        return self._sampler.generate(prompts, key), self._sampler.take_faults() or []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        if error is not None and self._stop is not None:
            self._stop()
        self._thread.shutdown(cancel_futures=True)
