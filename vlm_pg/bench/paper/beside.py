"""Which kernel is counted beside a measurement of ``vlm-pg bench``."""

from __future__ import annotations

from typing import Any

from vlm_pg.attention.kernels import Kernel
from vlm_pg.attention.kernels.cpu import CpuFlashKernel
from vlm_pg.attention.kernels.cuda import CudaFlashKernel
from vlm_pg.bench.contestant import CannotRun


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
    return CudaFlashKernel()
