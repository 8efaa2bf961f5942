"""Settings as trackers take them, and classes by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flat_config(config: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted keys; lists become text.

    flat_config({"rollout": {"num_generations": 8}, "eval": {"sets": ["a"]}})
        == {"rollout.num_generations": 8, "eval.sets": "['a']"}
    """
    flat: dict[str, Any] = {}
    for key, value in config.items() if isinstance(config, Mapping) else ():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flat_config(value, f"{name}.")
        else:
            flat[name] = value if isinstance(value, bool | int | float | str | None) else str(value)
    return flat
