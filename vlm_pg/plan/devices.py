"""Published peaks of GPUs; imports nothing, for the check of a machine that may lack packages."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """Published peaks of one GPU.

    ``flops_per_second``: of dense products, by bytes of an element; bf16 with fp32 sums, fp32 without TF32.
    ``driver_names``: what the driver calls it, whole, without the maker. ``source``: NVIDIA's data sheet of that name.
    """

    flops_per_second: dict[int, float]
    bytes_per_second: float
    memory_bytes: int
    source: str
    driver_names: tuple[str, ...]


_A100, _H100 = {2: 312e12, 4: 19.5e12}, {2: 989e12, 4: 67e12}
# Where a sheet gives matrix products with sparsity alone, half of them.
DEVICES = {
    "A100 80GB SXM": Device(
        _A100, 2.039e12, 80 * GIB, "A100 Tensor Core GPU, 80GB SXM", ("A100-SXM4-80GB", "A100-SXM-80GB")
    ),
    "H100 SXM": Device(_H100, 3.35e12, 80 * GIB, "H100 Tensor Core GPU, SXM", ("H100 80GB HBM3",)),
    "H200": Device(_H100, 4.8e12, 141 * 10**9, "H200 Tensor Core GPU, SXM", ("H200",)),
    "RTX 4090": Device(
        {2: 165.2e12, 4: 82.6e12}, 1.008e12, 24 * GIB, "Ada GPU Architecture, appendix", ("GeForce RTX 4090",)
    ),
}
