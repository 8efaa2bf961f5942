"""Kernels behind grouped attention, chosen by what the device and dtype allow."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from vlm_pg.attention.kernels.base import Kernel
from vlm_pg.attention.kernels.flash_packages import Flash2Kernel, Flash3Kernel, Flash4Kernel
from vlm_pg.attention.kernels.oracle import OracleKernel
from vlm_pg.attention.kernels.torch_kernels import CpuFlashKernel, CudaEfficientKernel, CudaFlashKernel
from vlm_pg.errors import ConfigError

__all__ = ["KERNELS", "Kernel", "available", "preferred", "select_kernel"]

# In order of preference: FlashAttention-3 where it is installed on Hopper, which it is written for. Then torch's own
# FlashAttention-2 before the package's: the same algorithm, tested with the torch that is here. FlashAttention-4, a
# beta, and the oracle are chosen by name only.
KERNELS: dict[str, type[Kernel]] = {
    kernel.name: kernel
    for kernel in (
        Flash3Kernel,
        Flash4Kernel,
        CudaFlashKernel,
        Flash2Kernel,
        CudaEfficientKernel,
        CpuFlashKernel,
        OracleKernel,
    )
}


def available(device: torch.device, dtype: torch.dtype) -> dict[str, str | None]:
    """Kernel name -> None if it can run here, else the reason in words."""
    return {name: kernel.unavailable_because(device, dtype) for name, kernel in KERNELS.items()}


def preferred(reasons: Mapping[str, str | None]) -> str | None:
    """What ``auto`` takes of kernels as ``available`` lists them."""
    return next((key for key, reason in reasons.items() if reason is None and not KERNELS[key].by_name_only), None)


@functools.cache
def select_kernel(device: torch.device, dtype: torch.dtype, name: str = "auto") -> Kernel:
    """The kernel to use on ``device`` in ``dtype``.

    Raises:
        ConfigError: an unknown name, or a kernel that cannot run here (with the reason).
    """
    reasons = available(device, dtype)
    if name == "auto":
        chosen = preferred(reasons)
        if chosen is None:
            raise ConfigError(
                f"No attention kernel runs on {device} in {dtype}: {reasons}. "
                "Set model.attention_kernel=oracle to use the slow reference."
            )
        name = chosen
    if name not in KERNELS:
        raise ConfigError(
            f"Unknown attention kernel {name!r}; known are auto, {', '.join(KERNELS)}. Choose one of these."
        )
    if reasons[name] is not None:
        raise ConfigError(
            f"Attention kernel {name!r} cannot run here: {reasons[name]}. Use auto to choose by capability."
        )
    return KERNELS[name]()
