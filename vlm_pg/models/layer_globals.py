"""Replacing the forward of single layers, or a function it calls by name; other instances keep theirs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FunctionType, MethodType
from typing import Any


def layer_global(module: Any, name: str) -> Any:
    """The value of global ``name`` in the forward of ``module``; AttributeError if there is none."""
    found = layer_function(module).__globals__
    if name not in found:
        raise AttributeError(f"{type(module).__name__} has no global {name!r} in its forward.")
    return found[name]


def set_layer_globals(module: Any, replaced: Mapping[str, Any]) -> bool:
    """Replace globals of the forward of ``module``, where it uses any of these names.

    The code stays transformers' own; only this instance changes. Returns whether any name is used.
    """
    names = {name: value for name, value in replaced.items() if name in layer_function(module).__code__.co_names}
    if not names:
        return False
    set_forward(module, with_globals(module, names))
    return True


def with_globals(module: Any, names: Mapping[str, Any]) -> FunctionType:
    """The forward of ``module``, unbound, with ``names`` replaced in its globals."""
    function = layer_function(module)
    values, defaults = {**function.__globals__, **names}, function.__defaults__
    forward = FunctionType(function.__code__, values, function.__name__, defaults, function.__closure__)
    forward.__kwdefaults__ = function.__kwdefaults__
    return forward


def set_forward(module: Any, function: Any) -> None:
    """Make ``function(module, ...)`` the forward of this instance, beneath hooks of accelerate (``device_map``).

    The hooks replace the forward and call it by another name; they move inputs and offloaded weights between devices.
    """
    # A bound method: copy.deepcopy binds it to the copy, where a closure would keep the original's weights.
    setattr(module, "_old_forward" if hasattr(module, "_hf_hook") else "forward", MethodType(function, module))


def replaced_globals(module: Any) -> dict[str, Any]:
    """The functions that the forward of ``module`` calls instead of those of its modeling file, by name."""
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
