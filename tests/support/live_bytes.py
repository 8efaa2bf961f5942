"""How many bytes of tensors are alive at a time: counted by storage, so that it depends on no allocator."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside: counts what operations make, in forward and backward; ``peak`` is the most that was alive at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: WeakKeyDictionary[Any, None] = WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [leaf.untyped_storage() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for storage in inputs:  # what was there before counts as nothing
            self._known.setdefault(storage, None)
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        if storage in self._known:
            return
        self._known[storage] = None
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        finalize(storage, self._gone, size)

    def _gone(self, size: int) -> None:
        self.now -= size
