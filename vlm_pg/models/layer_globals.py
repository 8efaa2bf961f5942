"""A function that one model's layers call by name gives way to another, and other models' layers keep theirs."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType, MethodType
from typing import Any


def layer_global(module: Any, name: str) -> Any:
    """What the forward of ``module`` finds under a global ``name``; AttributeError if it has no such name."""
    found = _function(module).__globals__
    if name not in found:
        raise AttributeError(f"{type(module).__name__} has no global {name!r} in its forward.")
    return found[name]


def set_layer_globals(module: Any, replaced: Mapping[str, Any]) -> bool:
    """Let the forward of ``module`` find ``replaced`` under these names, where it uses any of them by name.

    The code stays transformers' own; only this instance sees the others. Returns whether there was something to do.
    """
    function = _function(module)
    names = {name: value for name, value in replaced.items() if name in function.__code__.co_names}
    if not names:
        return False
    forward = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    forward.__kwdefaults__ = function.__kwdefaults__
    # A bound method: copy.deepcopy binds it to the copy, where a closure would keep the original's weights.
    module.forward = MethodType(forward, module)
    return True


def _function(module: Any) -> Any:
    return getattr(module.forward, "__func__", module.forward)
