"""What decides about a sum's last bits besides its numbers: the chip, the libraries, and what both were told.

The same operation on the same numbers gives other bits with other vector instructions, other block sizes (which
libraries choose by caches and number of threads), another matrix library, or a switch in torch or the environment.
Measured with a layer of Qwen2.5-VL's tower: ``ATEN_CPU_CAPABILITY``, ``ONEDNN_MAX_CPU_ISA``, ``MKL_CBWR`` and, for some
numbers of rows, the number of threads change its output.
"""

from __future__ import annotations

import os
import platform
import re
from functools import cache
from importlib.metadata import distributions
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from vlm_pg.cache.provenance import gpu_driver, lines, this_machine
from vlm_pg.cache.store import key_of

_CPU_INFO = Path("/proc/cpuinfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
# Lines of /proc/cpuinfo that say which processor it is, on x86 and on Arm. "model name" alone does not: to a virtual
# machine all of a vendor's may be "Intel Xeon Processor".
_OF_PROCESSOR = frozenset(
    ("vendor_id", "cpu family", "model", "model name", "stepping", "cache size", "flags")
    + ("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features")
)
# Whatever is called so chooses kernels, or their precision; of most the values alone are documented, not their effects.
_ENVIRONMENT = (
    *("ATEN_", "MKL_", "ONEDNN_", "DNNL_", "OPENBLAS_", "BLIS_", "ARMPL_", "KMP_"),
    *("CUBLAS", "CUDNN_", "NVIDIA_TF32", "MIOPEN_", "ROCBLAS_", "HIPBLAS", "FLASH_ATTENTION_"),
    *("TORCH_ALLOW_TF32", "TORCH_BLAS_", "TORCH_CUDNN_", "TORCH_LINEAR_", "PYTORCH_TUNABLEOP_"),
)
_PACKAGES = ("torch", "transformers", "triton", "flash-attn", "kernels", "liger-kernel", "bitsandbytes", "peft")
_LIBRARIES = ("nvidia-cublas", "nvidia-cudnn", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "flash-attn-", "mkl")
# torch's switches, as its own modules read them: those of later releases are among them. Of TF32 its newer names are
# read: the older ones raise where somebody has used those.
_SWITCHES = re.compile(
    r"_get_(?!\w*tf32)(\w+_sdp_enabled|(blas_preferred|cpu_allow|cublas|cudnn_(?!batch)|deterministic_algo|math_sdp"
    r"|miopen|mkldnn|nnpack|onednn|rocm|sdp_|sm_)\w+)"
)
_FP32 = ("cuda.matmul", "cudnn.conv", "mkldnn.matmul", "mkldnn.conv")


def numerics_digest(device: torch.device) -> str:
    """64 hexadecimal digits: with the same, the same call on the same numbers gives the same bits.

    Of this moment: it is asked where something is computed, for a switch may be set at any time.
    """
    return key_of({"told": told(device), "host": _host(device.type, device.index)})


def told(device: torch.device) -> dict[str, Any]:
    """What this process has told torch and its libraries, as JSON values."""
    return {
        "switches": {name: str(getattr(torch._C, name)()) for name in _switches()},
        "fp32": [attrgetter(name)(torch.backends).fp32_precision for name in _FP32],
        "cudnn benchmark": torch.backends.cudnn.benchmark_limit,
        "autocast": [torch.is_autocast_enabled(device.type), str(torch.get_autocast_dtype(device.type))],
        "default": str(torch.get_default_dtype()),
        "subnormal": float(torch.tensor(2.0**-130) * torch.tensor(0.5)),  # zero where they are flushed
        # Among them sums are divided.
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "environment": {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)},
    }


@cache
def _switches() -> list[str]:
    return [name for name in dir(torch._C) if _SWITCHES.fullmatch(name)]


@cache
def _host(kind: str, index: int | None) -> dict[str, Any]:
    versions = {"torch build": torch.__config__.show(), "packages": _versions()}
    if kind == "cpu":
        return {**versions, "processor": processor(), "libc": platform.libc_ver()}
    if kind == "cuda":
        return {**versions, "gpu": gpu(torch.device(kind, index or 0))}
    return {**versions, "machine": [kind, this_machine()]}


def processor() -> list[str]:
    """Which processor this is: facts by which libraries choose code and block sizes. Where none are known, this machine
    alone."""
    found = lines(_CPU_INFO)
    facts = sorted({line for line in found if line.partition(":")[0].strip() in _OF_PROCESSOR})
    if not facts:
        facts = [this_machine()]
    caches = sorted(
        f"{place.name} {name} {value}"
        for place in _CACHES.glob("index*")
        for name in ("level", "type", "size")
        for value in lines(place / name)
    )
    return [platform.machine(), torch.backends.cpu.get_cpu_capability(), *facts, *caches]


def gpu(device: torch.device) -> list[Any]:
    """Which GPU this is, with its driver and libraries."""
    state = torch.cuda.get_device_properties(device)
    return [
        *(state.name, state.major, state.minor, state.multi_processor_count, getattr(state, "L2_cache_size", None)),
        *(getattr(state, "gcnArchName", None), torch.version.cuda, torch.version.hip, torch.backends.cudnn.version()),
        *gpu_driver(),
    ]


def _versions() -> dict[str, str]:
    """Of packages with kernels, and of the libraries that torch loads."""
    found = {(package.metadata["Name"] or "").lower().replace("_", "-"): package.version for package in distributions()}
    return {name: of for name, of in found.items() if name in _PACKAGES or name.startswith(_LIBRARIES)}
