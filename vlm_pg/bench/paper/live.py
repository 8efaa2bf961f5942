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
        storage = tensor.untyped_storage()
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = 0
            # Its place may be another one's when it has gone.
            weakref.finalize(storage, self._has_gone, storage._cdata)

    def has_come(self, tensor: torch.Tensor) -> None:
        """Counted once for all views of it, until the last one goes."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        known = self._sizes.get(key)
        # What was there stays uncounted; what came may have been given another size since.
        if known == 0 or known == size:
            return
        if known is None:
            weakref.finalize(storage, self._has_gone, key)
        self._sizes[key] = size
        self.now += size - (known or 0)
        if self.now > self.peak:
            if self._collects and self.now > self._collected_at * _GROWTH:
                gc.collect()
                self._collected_at = max(self.now, self.peak)
            self.peak = max(self.peak, self.now)

    def _has_gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)
