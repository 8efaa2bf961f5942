"""How much memory is alive, tensor by tensor, while fake tensors come and go."""

from __future__ import annotations

import gc
import weakref

import torch

# What an allocator rounds up to.
BLOCK_BYTES = 512
# The collector runs whenever this much more than ever before seems to be alive.
_GROWTH = 1.01


class LiveMemory:
    """Bytes of all storages that were made since, and of those that still are.

    Under a dispatch mode tensors that checkpointing computes again are held by circles of Python objects, until the
    garbage collector finds them. So a peak counts only if it is still there after a collection.

    Args:
        collects: False where nothing is checkpointed, which saves most of the time.
    """

    def __init__(self, collects: bool = True) -> None:
        self._collects = collects
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._collected_at = 0

    def was_there(self, tensor: torch.Tensor) -> None:
        """Its memory is not counted unless it came after the beginning."""
        self._note(tensor, 0)

    def has_come(self, tensor: torch.Tensor) -> None:
        """Counted once for all views of it, until the last one goes."""
        storage = tensor.untyped_storage()
        size = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        if not self._note(tensor, size):
            return
        self.now += size
        if self.now > self.peak:
            if self._collects and self.now > self._collected_at * _GROWTH:
                gc.collect()
                self._collected_at = max(self.now, self.peak)
            self.peak = max(self.peak, self.now)

    def _note(self, tensor: torch.Tensor, size: int) -> bool:
        """Whether its memory is new. What has gone is forgotten, for its place may be another one's soon."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return False
        self._sizes[key] = size
        weakref.finalize(storage, self._has_gone, key, size)
        return True

    def _has_gone(self, key: int, size: int) -> None:
        if self._sizes.pop(key, None) is not None:
            self.now -= size
