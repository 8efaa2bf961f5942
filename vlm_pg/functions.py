"""User-defined functions, loaded by name: rewards, losses, advantage estimators."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from vlm_pg.errors import ConfigError


def load_function(name: str, setting: str) -> Callable[..., Any]:
    """Load "path/to/file.py:function" or "package.module:function".

    Args:
        setting: dotted key of the setting that names it, for messages.

    Raises:
        ConfigError: there is no such file, module or function, or importing it fails.
    """
    path, colon, function_name = name.rpartition(":")
    if not colon or not path or not function_name.isidentifier():
        raise ConfigError(f"{setting} names '{name}'. path/to/file.py:function or package.module:function is expected.")
    try:
        module = _file_module(path, setting) if path.endswith(".py") else importlib.import_module(path)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{setting} names '{name}', and importing '{path}' fails with {type(error).__name__}: {error}. A "
            "file or module that can be imported here is expected. Correct the name, or the module."
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise ConfigError(
            f"{setting} names '{name}', and '{path}' has no function '{function_name}'. It has "
            f"{', '.join(known) or 'none'}. Correct the name."
        )
    return function


def _file_module(path: str, setting: str) -> ModuleType:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"{setting} names the file '{path}', which does not exist. Correct the path.")
    # One module per file and process, under a unique name.
    name = f"vlm_pg_file_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
