"""Which attention kernel is counted: a GPU's, and beside a measurement of ``vlm-pg bench`` the one that runs there."""

from __future__ import annotations

from typing import Any

from vlm_pg.attention.kernels import Kernel
from vlm_pg.attention.kernels.torch_kernels import CpuFlashKernel, CudaFlashKernel
from vlm_pg.bench.contestant import CannotRun
from vlm_pg.bench.paper.cuda_kernels import MULTIPROCESSORS


def counted_kernel() -> Kernel:
    """A GPU's, which cuts long prompts of a decode step as on a device of ``MULTIPROCESSORS``."""
    kernel = CudaFlashKernel()
    kernel.multiprocessors = MULTIPROCESSORS
    return kernel


def kernel_beside(spec: dict[str, Any]) -> Kernel:
    """The attention kernel that ours runs where ``spec`` is measured.

    Raises:
        CannotRun: the kernels that run there are not among those that are counted.
    """
    if spec["device"] == "cpu":
        return CpuFlashKernel()
    if spec["dtype"] != "bf16":
        raise CannotRun(
            f"attention in {spec['dtype']} runs by other kernels on a GPU than those that are counted; with "
            "--dtype bf16 it is counted"
        )
    return counted_kernel()
