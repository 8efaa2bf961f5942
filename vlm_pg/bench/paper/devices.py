"""Published peaks of devices: dense matrix products, memory and its bandwidth.

Figures are those of NVIDIA's data sheets; where a sheet gives matrix products with sparsity alone, half of them. Each
entry names its sheet and its variant. None of the sheets was at hand when this was last gone through. Figures of A100,
H100 SXM, H200 SXM and RTX 4090 were compared with several independent copies (H100 SXM: 989.4 dense BF16 and 66.9 FP32;
RTX 4090: 165.2, 82.6), the bandwidth of H100 PCIe with NVIDIA's product brief PB-11133 ("greater than 2,000 GB/s"),
those of H100 NVL with others' tables alone (835 dense BF16, 94 GB, 3.9 TB/s). Nothing was found to compare BF16 and
FP32 of H100 PCIe, FP32 of H100 NVL, and all but memory and bandwidth of H200 NVL with.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One GPU as its maker describes it.

    ``flops_per_second``: of dense products, by dtype; bf16 with fp32 sums, fp32 without TF32 (torch's default).
    ``bytes_per_second``: of its memory. ``memory_bytes``: all of it; the driver keeps some hundred MB.
    ``driver_names``: what the driver calls it, whole, without the maker.
    """

    flops_per_second: dict[str, float]
    bytes_per_second: float
    memory_bytes: int
    source: str
    driver_names: tuple[str, ...] = ()


_GIB = 2**30
# For which everything is counted.
DEVICES = {
    "A100 80GB SXM": Device(
        {"bf16": 312e12, "fp32": 19.5e12},
        2.039e12,
        80 * _GIB,
        "NVIDIA A100 Tensor Core GPU datasheet (80GB SXM): 312 TFLOPS BF16 without sparsity, 19.5 FP32, 2,039 GB/s",
        ("A100-SXM4-80GB", "A100-SXM-80GB"),
    ),
    "H100 SXM": Device(
        {"bf16": 989e12, "fp32": 67e12},
        3.35e12,
        80 * _GIB,
        "NVIDIA H100 Tensor Core GPU datasheet (SXM): 1,979 TFLOPS BF16 with sparsity, half of that without, 67 FP32, "
        "3.35 TB/s",
        ("H100 80GB HBM3",),
    ),
    "H200": Device(
        {"bf16": 989e12, "fp32": 67e12},
        4.8e12,
        141 * 10**9,
        "NVIDIA H200 Tensor Core GPU datasheet (SXM): 1,979 TFLOPS BF16 with sparsity, half of that without, 67 FP32, "
        "141 GB, 4.8 TB/s",
        ("H200",),
    ),
    "RTX 4090": Device(
        {"bf16": 165.2e12, "fp32": 82.6e12},
        1.008e12,
        24 * _GIB,
        "NVIDIA Ada GPU Architecture whitepaper, appendix on the GeForce RTX 4090: 165.2 TFLOPS BF16 with FP32 "
        "accumulate, without sparsity, 82.6 FP32, 1,008 GB/s",
        ("GeForce RTX 4090",),
    ),
}


@dataclass(frozen=True)
class Link:
    """How GPUs of one kind in one machine reach each other.

    ``bytes_per_second``: that one of them sends while it gets as much; sheets give the sum of both directions.
    """

    name: str
    bytes_per_second: float
    source: str


# Of each of ``DEVICES``. Compared with several independent copies of the sheets, as above.
LINKS = {
    "A100 80GB SXM": Link(
        "NVLink 3", 300e9, "NVIDIA A100 Tensor Core GPU datasheet (80GB SXM): NVLink 600 GB/s, half of it one way"
    ),
    "H100 SXM": Link(
        "NVLink 4", 450e9, "NVIDIA H100 Tensor Core GPU datasheet (SXM): NVLink 900 GB/s, half of it one way"
    ),
    "H200": Link("NVLink 4", 450e9, "NVIDIA H200 Tensor Core GPU datasheet (SXM): NVLink 900 GB/s, half of it one way"),
    "RTX 4090": Link(
        "PCIe 4.0 x16",
        31.5e9,
        "PCI Express Base Specification 4.0: 16 GT/s a lane, 128 of 130 bits, 16 lanes, one way; it has no NVLink",
    ),
}

# Others on which something may be measured.
VARIANTS = {
    "A100 80GB PCIe": Device(
        {"bf16": 312e12, "fp32": 19.5e12},
        1.935e12,
        80 * _GIB,
        "NVIDIA A100 Tensor Core GPU datasheet (80GB PCIe): 312 TFLOPS BF16 without sparsity, 19.5 FP32, 1,935 GB/s",
        ("A100 80GB PCIe",),
    ),
    "A100 40GB": Device(
        {"bf16": 312e12, "fp32": 19.5e12},
        1.555e12,
        40 * _GIB,
        "NVIDIA A100 Tensor Core GPU datasheet (40GB): 312 TFLOPS BF16 without sparsity, 19.5 FP32, 1,555 GB/s",
        ("A100-SXM4-40GB", "A100-PCIE-40GB"),
    ),
    "H100 PCIe": Device(
        {"bf16": 756e12, "fp32": 51e12},
        2.0e12,
        80 * _GIB,
        "NVIDIA H100 Tensor Core GPU datasheet (PCIe): 1,513 TFLOPS BF16 with sparsity, half of that without, 51 FP32, "
        "2 TB/s",
        ("H100 PCIe",),
    ),
    "H100 NVL": Device(
        {"bf16": 835e12, "fp32": 60e12},
        3.9e12,
        94 * 10**9,
        "NVIDIA H100 Tensor Core GPU datasheet (NVL): 1,671 TFLOPS BF16 with sparsity, half of that without, 60 FP32, "
        "94 GB, 3.9 TB/s",
        ("H100 NVL",),
    ),
    "H200 NVL": Device(
        {"bf16": 835e12, "fp32": 60e12},
        4.8e12,
        141 * 10**9,
        "NVIDIA H200 Tensor Core GPU datasheet (NVL): 1,671 TFLOPS BF16 with sparsity, half of that without, 60 FP32, "
        "141 GB, 4.8 TB/s",
        ("H200 NVL",),
    ),
}


ALL = DEVICES | VARIANTS


@dataclass(frozen=True)
class Reached:
    """What kernels and host reach of a device's peaks: constants of an expected time (``roofline.expected_seconds``).

    Measured on one H100 SXM with torch 2.11 in bf16, 2026-11-28 (docs/benchmarks/2026-11-28-h100.md has the figures and
    the error of each); taken for every device, of which no other was measured.

    ``matmul``, ``attention``: shares of peak FLOP/s, of cuBLAS and of torch's FlashAttention-2, fitted to five updates
    and two prefills. ``bandwidth``: copies move 3.0 of 3.35 TB/s. ``weights_bandwidth``: products of few rows read
    weights at 84 % of that (profile). ``kernel_seconds``: from one kernel of a stream or graph to the next,
    fitted to five decode steps of 708 or 1,924. ``wait_seconds``: the device is idle for so long once the host has
    waited for a value; fitted to the same steps and to prefix_grouper's update, which waits 251 times.
    ``launch_seconds``: of the host in transformers' modules; a decode step of 1,924 launches takes 40 to 70 ms.
    ``capture_steps``: recording a CUDA graph takes as long as so many decode steps launched one by one (0.16 s).
    """

    matmul: float = 0.64
    attention: float = 0.33
    bandwidth: float = 0.9
    weights_bandwidth: float = 0.75
    kernel_seconds: float = 3e-6
    wait_seconds: float = 6e-4
    launch_seconds: float = 29e-6
    capture_steps: int = 3


REACHED = Reached()


def device_called(name: str | None) -> str | None:
    """The key in ``DEVICES`` or ``VARIANTS`` of the GPU that the driver calls so, None where neither has it.

    The whole name counts: a slice of a card (MIG), a card for laptops or an RTX 4090 D has other peaks.
    """
    called = (name or "").removeprefix("NVIDIA ").strip()
    return next((key for key, device in ALL.items() if called in device.driver_names), None)


# NVIDIA, CUDA GPU compute capability (https://developer.nvidia.com/cuda-gpus), by the beginning of a name above.
_CAPABILITIES = {"A100": (8, 0), "H100": (9, 0), "H200": (9, 0), "RTX 4090": (8, 9)}


def capability_of(name: str) -> tuple[int, int]:
    """Compute capability of a device of ``ALL``."""
    return next(capability for begins, capability in _CAPABILITIES.items() if name.startswith(begins))
