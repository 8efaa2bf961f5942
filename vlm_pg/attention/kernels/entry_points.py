"""Calling another package's private functions by argument name, after their signatures were checked once."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any


class EntryPointError(ImportError):
    """A package is not importable here, or its functions have changed. The message says which and how."""


def import_first(modules: Sequence[str]) -> Any:
    """The first of ``modules`` that imports.

    Raises:
        EntryPointError: none does; the message has the reason for each.
    """
    problems = []
    for name in modules:
        try:
            return importlib.import_module(name)
        except (ImportError, OSError, RuntimeError) as error:
            # OSError, RuntimeError: a compiled part built for another torch or CUDA.
            first_line = str(error).splitlines()[0] if str(error) else "no message"
            problems.append(f"{name}: {first_line}")
    raise EntryPointError(f"it does not import ({'; '.join(problems)})")


def bind(
    module: Any,
    function_name: str,
    takes: Mapping[str, Sequence[str]],
    fixed: Mapping[str, Any] | None = None,
    absent: Collection[str] = (),
) -> Callable[..., Any]:
    """``module.function_name`` as a function of our own argument names.

    Args:
        takes: our name -> names under which versions of the package know this argument.
        fixed: arguments that always get the same value, passed where the version has them.
        absent: optional tensors that some versions want spelled out as None.

    Raises:
        EntryPointError: the function is not there, lacks one of our arguments, or wants one that we do not know.
    """
    function = getattr(module, function_name, None)
    if function is None:
        raise EntryPointError(f"{module.__name__} has no {function_name}; another version of the package is needed")
    # A function registered as a torch custom operator hides its signature behind (*args, **kwargs).
    parameters = inspect.signature(getattr(function, "_init_fn", function)).parameters
    names = {ours: name for ours, known in takes.items() for name in known if name in parameters}
    constants = {name: value for name, value in (fixed or {}).items() if name in parameters}
    constants |= {name: None for name in absent if name in parameters}
    missing = sorted(takes.keys() - names.keys())
    unknown = sorted(
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name not in constants
        and name not in names.values()
    )
    if missing or unknown:
        raise EntryPointError(
            f"{module.__name__}.{function_name} has another signature than this kernel was written for "
            f"(not found: {', '.join(missing) or 'none'}; not known: {', '.join(unknown) or 'none'}); "
            "install a version named in this kernel's file"
        )

    def call(**ours: Any) -> Any:
        return function(**{names[name]: value for name, value in ours.items()}, **constants)

    return call
