"""Kernel backends behind grouped attention, one file each, chosen by what device and dtype allow."""

from __future__ import annotations

from vlm_pg.attention.kernels.base import Kernel
from vlm_pg.attention.kernels.registry import available, select_kernel

__all__ = ["Kernel", "available", "select_kernel"]
