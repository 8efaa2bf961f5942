"""GRPO for Qwen-VL on images and long video, with the visual prefix encoded once per group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlm_pg.models.loading import load_policy as load_policy
    from vlm_pg.models.loading import make_policy as make_policy

__version__ = "0.1.0"
__all__ = ["__version__", "load_policy", "make_policy"]


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import; `vlm-pg --help` must not wait for them.
    if name in ("load_policy", "make_policy"):
        from vlm_pg.models import loading

        return getattr(loading, name)
    raise AttributeError(f"module 'vlm_pg' has no attribute {name!r}")
