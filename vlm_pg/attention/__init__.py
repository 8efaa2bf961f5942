"""Attention with shared prefixes: ``PrefixTree`` describes the sharing, ``grouped_attention`` computes it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlm_pg.attention.grouped import grouped_attention as grouped_attention
    from vlm_pg.attention.tree import PrefixTree as PrefixTree

__all__ = ["PrefixTree", "grouped_attention"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'vlm_pg.attention' has no attribute {name!r}")
    home = "tree" if name == "PrefixTree" else "grouped"
    return getattr(import_module(f"vlm_pg.attention.{home}"), name)
