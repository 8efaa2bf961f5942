"""Versions of the packages that determine results."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

PACKAGES = (
    "vlm-pg",
    "torch",
    "transformers",
    "deepspeed",
    "qwen-vl-utils",
    "decord",
    "av",
    "accelerate",
    "peft",
    "bitsandbytes",
)


def versions() -> dict[str, str]:
    """Python's version and those of ``PACKAGES``, by name; "not installed" where one is not."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
