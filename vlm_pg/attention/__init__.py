"""Attention with shared prefixes: ``PrefixTree`` says who shares what, ``grouped_attention`` computes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlm_pg.attention.grouped import grouped_attention as grouped_attention
    from vlm_pg.attention.tree import PrefixTree as PrefixTree

__all__ = ["PrefixTree", "grouped_attention"]


def __getattr__(name: str) -> Any:
    if name == "grouped_attention":
        from vlm_pg.attention.grouped import grouped_attention

        return grouped_attention
    if name == "PrefixTree":
        from vlm_pg.attention.tree import PrefixTree

        return PrefixTree
    raise AttributeError(f"module 'vlm_pg.attention' has no attribute {name!r}")
