"""How many bytes operators read and write, each tensor once an operator; what is repeated by strides is read once."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# They move nothing: views that are not called so, and a question about a device.
_NO_KERNEL = ("aten::_unsafe_view", "aten::empty", "aten::new_empty", "aten::empty_like", "prim::device")


class TrafficBytes(TorchDispatchMode):
    """Counts while it is entered.

    Args:
        least: tensors of fewer bytes do not count.
    """

    def __init__(self, least: int = 0):
        super().__init__()
        self._least, self.read, self.written = least, 0, 0

    @property
    def total(self) -> int:
        return self.read + self.written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view or func._schema.name in _NO_KERNEL:
            return out
        # What an operator changes without returning it, as an operator of one's own does, is written as well.
        for place, argument in enumerate(func._schema.arguments):
            given = args[place] if place < len(args) else (kwargs or {}).get(argument.name)
            changed = argument.alias_info is not None and argument.alias_info.is_write
            if not (changed and func._schema.name == "aten::copy_"):
                self.read += self._bytes(given)
            if changed:
                self.written += self._bytes(given)
        if not any(argument.alias_info is not None for argument in func._schema.returns):
            self.written += self._bytes(out)
        return out

    def _bytes(self, tree: Any) -> int:
        sizes = [
            min(x.numel() * x.element_size(), x.untyped_storage().nbytes())
            for x in tree_leaves(tree)
            if isinstance(x, torch.Tensor)
        ]
        return sum(size for size in sizes if size >= self._least)
