"""Published peaks of devices: dense matrix products, memory and its bandwidth."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One GPU as its maker describes it.

    ``flops_per_second``: of dense products, by dtype; bf16 with fp32 sums, fp32 without TF32 (torch's default).
    ``bytes_per_second``: of its memory. ``memory_bytes``: all of it; the driver keeps some hundred MB.
    """

    flops_per_second: dict[str, float]
    bytes_per_second: float
    memory_bytes: int
    source: str


_GIB = 2**30
DEVICES = {
    "A100 80GB SXM": Device(
        {"bf16": 312e12, "fp32": 19.5e12},
        2.039e12,
        80 * _GIB,
        "NVIDIA A100 Tensor Core GPU datasheet (80GB SXM): 312 TFLOPS BF16 without sparsity, 19.5 FP32, 2,039 GB/s",
    ),
    "H100 SXM": Device(
        {"bf16": 989e12, "fp32": 67e12},
        3.35e12,
        80 * _GIB,
        "NVIDIA H100 Tensor Core GPU datasheet (SXM): 1,979 TFLOPS BF16 with sparsity, half of that without, 67 FP32, "
        "3.35 TB/s",
    ),
    "H200": Device(
        {"bf16": 989e12, "fp32": 67e12},
        4.8e12,
        141 * 10**9,
        "NVIDIA H200 Tensor Core GPU datasheet (SXM): 1,979 TFLOPS BF16 with sparsity, half of that without, 67 FP32, "
        "141 GB, 4.8 TB/s",
    ),
    "RTX 4090": Device(
        {"bf16": 165.2e12, "fp32": 82.6e12},
        1.008e12,
        24 * _GIB,
        "NVIDIA Ada GPU Architecture whitepaper, appendix on the GeForce RTX 4090: 165.2 TFLOPS BF16 with FP32 "
        "accumulate, without sparsity, 82.6 FP32, 1,008 GB/s",
    ),
}
