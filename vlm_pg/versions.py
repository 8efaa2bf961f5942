"""Versions of the packages that determine results."""

from __future__ import annotations

import importlib.metadata
import sys

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
    return {"python": sys.version.split()[0], **{name: version_of(name) or "not installed" for name in PACKAGES}}


def version_of(package: str) -> str | None:
    """The version of a package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
