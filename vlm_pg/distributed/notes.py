"""What ranks tell each other without a collective, through the store that they met at."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from vlm_pg.distributed.processes import is_distributed

# Between two looks whether all ranks have come.
_MEETING_SECONDS = 0.1


class SharedNote:
    """A text that one rank leaves and all ranks read without a collective, from any thread."""

    def __init__(self, name: str):
        self._key = f"vlm_pg/{name}"
        # What the ranks met at; torch has no public name for it.
        self._store = dist.distributed_c10d._get_default_store()

    def leave(self, text: str) -> None:
        """Raises ConnectionError: the process that holds the store is gone."""
        try:
            self._store.set(self._key, text)
        except dist.DistError as error:
            raise ConnectionError(f"{self._key} cannot be left: {error}") from error

    def is_there(self) -> bool:
        return bool(self._store.check([self._key]))

    def read(self, within_seconds: float) -> str:
        """Waits until it has been left.

        Raises:
            TimeoutError: it was not, or the process that holds the store is gone.
        """
        try:
            self._store.wait([self._key], timedelta(seconds=within_seconds))
            return self._store.get(self._key).decode()
        except dist.DistError as error:
            raise TimeoutError(f"{self._key} was not left in {within_seconds:.0f} s") from error


class SharedFlag(SharedNote):
    """Something that any rank may say and all ranks hear."""

    def set(self) -> None:
        self.leave("1")

    def is_set(self) -> bool:
        return self.is_there()


class Meeting:
    """Where ranks that work at their own pace wait for each other for as long as that takes: collectives give up after
    minutes. All ranks make their meetings in the same order."""

    _number = 0

    def __init__(self) -> None:
        Meeting._number += 1
        self._key = f"vlm_pg/meeting/{Meeting._number}"

    def wait(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Until all ranks wait here.

        Raises:
            InterruptedError: ``should_stop`` said so; it is asked several times a second.
        """
        if not is_distributed():
            return
        store = dist.distributed_c10d._get_default_store()
        store.add(self._key, 1)
        while store.add(self._key, 0) < dist.get_world_size():
            if should_stop():
                raise InterruptedError("stopped while waiting for the other ranks")
            time.sleep(_MEETING_SECONDS)
