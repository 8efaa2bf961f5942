"""A CUDA graph's rules on the CPU: operators are recorded once and run again on the very tensors they ran on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Where the host would read from the device, or write to it: a capture fails there.
_HOST = ("_local_scalar_dense", "nonzero", "lift_fresh")


class RecordedMemory:
    """In place of ``GraphMemory``. Whatever Python would decide anew in a step, a replay does as it was recorded."""

    def __init__(self, *_: Any) -> None:
        self.replays = 0

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        work()
        recorder = _Recorder()
        with recorder:
            work()
        recorder.undo()

        def replay() -> None:
            self.replays += 1
            recorder.replay()

        return replay


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(func._schema.name == f"aten::{name}" for name in _HOST), f"{func} in a recorded step"
        for tensor in _written(func, args, kwargs or {}):
            whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            self._before.setdefault(_memory(tensor), (whole, whole.clone()))
        out = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, out))
        return out

    def undo(self) -> None:
        """A capture computes nothing: what it writes has its old values, what it makes none before the first replay."""
        for tensor, before in self._before.values():
            tensor.copy_(before)
        for _, args, kwargs, out in self._calls:
            given = {_memory(tensor) for tensor in _tensors((args, kwargs))}
            for tensor in _tensors(out):
                if tensor.is_floating_point() and _memory(tensor) not in given:
                    tensor.fill_(torch.nan)

    def replay(self) -> None:
        for func, args, kwargs, recorded in self._calls:
            given = {_memory(tensor) for tensor in _tensors((args, kwargs))}
            for old, new in zip(_tensors(recorded), _tensors(func(*args, **kwargs)), strict=True):
                if _memory(old) not in given:  # neither a view nor written in index
                    old.copy_(new)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Arguments that an operator writes to."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[index] if index < len(args) else kwargs.get(argument.name))


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
