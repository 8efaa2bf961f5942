"""A forward of one model's layers, or a function it calls by name, gives way to another; other models keep theirs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FunctionType, MethodType
from typing import Any


def layer_global(module: Any, name: str) -> Any:
    """What the forward of ``module`` finds under a global ``name``; AttributeError if it has no such name."""
    found = layer_function(module).__globals__
    if name not in found:
        raise AttributeError(f"{type(module).__name__} has no global {name!r} in its forward.")
    return found[name]


def set_layer_globals(module: Any, replaced: Mapping[str, Any]) -> bool:
    """Let the forward of ``module`` find ``replaced`` under these names, where it uses any of them by name.

    The code stays transformers' own; only this instance sees the others. Returns whether there was something to do.
    """
    names = {name: value for name, value in replaced.items() if name in layer_function(module).__code__.co_names}
    if not names:
        return False
    set_forward(module, with_globals(module, names))
    return True


def with_globals(module: Any, names: Mapping[str, Any]) -> FunctionType:
    """The forward of ``module``, unbound, which finds ``names`` in place of what it finds there now."""
    function = layer_function(module)
    forward = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    forward.__kwdefaults__ = function.__kwdefaults__
    return forward


def set_forward(module: Any, function: Any) -> None:
    """Let ``function(module, ...)`` be the forward of this instance, beneath hooks of accelerate (``device_map``).

    These stand in the forward's place and call it by another name: put in their place instead, nothing would bring
    inputs to the device of the weights, or offloaded weights to a device.
    """
    # A bound method: copy.deepcopy binds it to the copy, where a closure would keep the original's weights.
    setattr(module, "_old_forward" if hasattr(module, "_hf_hook") else "forward", MethodType(function, module))


def replaced_globals(module: Any) -> dict[str, Any]:
    """By name, what the forward of ``module`` calls in place of what stands in its modeling file under that name."""
    function = layer_function(module)
    if not isinstance(function, FunctionType):
        return {}
    found = function.__globals__
    theirs = getattr(sys.modules.get(function.__module__), "__dict__", found)
    return {
        name: found[name]
        for name in function.__code__.co_names
        if name in found and found is not theirs and found[name] is not theirs.get(name)
    }


def layer_function(module: Any) -> Any:
    """The forward of ``module``, unbound where it is a method."""
    # accelerate's hooks are no functions with globals: they keep the forward that they call.
    forward = module._old_forward if hasattr(module, "_hf_hook") else module.forward
    return getattr(forward, "__func__", forward)
