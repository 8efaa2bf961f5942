"""Digests of everything that decides the bits of a tower's output: weights and code, and the machine that computes.

The same operation on the same numbers gives other bits with other vector instructions, other block sizes (which
libraries choose by caches and number of threads), another matrix library, or a switch in torch or the environment.
Measured with a layer of Qwen2.5-VL's tower: ``ATEN_CPU_CAPABILITY``, ``ONEDNN_MAX_CPU_ISA``, ``MKL_CBWR`` and, for some
numbers of rows, the number of threads change its output.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.metadata import distributions, version
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from vlm_pg.attention.grouped import grouped_attention
from vlm_pg.attention.kernels.torch_kernels import CudaFlashKernel
from vlm_pg.cache.provenance import gpu_driver, lines, source_digest, this_machine
from vlm_pg.cache.store import key_of
from vlm_pg.models.family import Family
from vlm_pg.models.layer_globals import replaced_globals
from vlm_pg.models.tower import frames_forward, takes_all_frames
from vlm_pg.models.weights import is_shard

# A context in which these weights are whole on every rank; ``nullcontext`` where they are anyway.
Gather = Callable[[Iterable[torch.nn.Parameter]], AbstractContextManager[Any]]

# Our modules on the way from pixels to features; a test follows the calls and finds those that are not named here.
OWN_CODE = ("family", "network", "weights", "tower", "vision")
# Of a tower's configuration: where it comes from and by what it was written, of which no output depends.
_NOT_OF_THE_OUTPUT = frozenset(("_name_or_path", "architectures", "transformers_version"))


def tower_digest(model: Any, family: Family, gather: Gather = nullcontext) -> str:
    """64 hexadecimal digits: two towers with the same give the same bits for the same call, where ``numerics_digest``
    is the same too.

    Of the weights and buffers (mergers among them) names, dtypes, shapes and bytes, one after the other, those kept in
    few bits as they are stored; by how much adapters in it count; the configuration, the attention kernel; the code by
    the classes' source, what stands in their modules and on the layers in place of it, transformers' version, and our
    own source. The division of media over calls is not in it, but in every entry.

    Under ZeRO-3 torch's linear layer is another function. For rows [rows, width], which is what linear layers of Qwen's
    towers are given, it makes the same calls (a test compares the bits), so it counts as the same.

    Args:
        gather: context in which sharded weights are whole; a collective, so all ranks call this together then.
    """
    tower = family.vision_tower(model)
    config = getattr(tower, "config", None)
    values = {} if config is None else config.to_dict()
    values = {key: value for key, value in values.items() if key not in _NOT_OF_THE_OUTPUT}
    parts = {
        "weights": _of_weights(tower, gather),
        "config": json.dumps(values, sort_keys=True, default=str),
        "attention": getattr(config, "_attn_implementation", None),
        "family": [family.model_type, family.deepstack_layers(model.config)],
        "code": _code(tower),
        "own code": source_digest(Path(__file__).with_name(f"{name}.py") for name in OWN_CODE),
        "adapters": _adapters(tower),
    }
    return key_of(parts)


def weights_digest(model: Any) -> str:
    """64 hexadecimal digits of all weights and buffers of a model as loaded here, adapters and their scales too."""
    return key_of({"weights": _of_weights(model, nullcontext), "adapters": _adapters(model)})


def _of_weights(tower: torch.nn.Module, gather: Gather) -> str:
    """A digest against accidents, not against deliberate collisions."""
    digest = xxhash.xxh3_128()
    for name, parameter in tower.named_parameters():
        with gather([parameter] if is_shard(parameter) else []):
            _update(digest, name, parameter)
            state: Any = getattr(parameter, "quant_state", None)
            for key, tensor in sorted(state.as_dict(packed=True).items()) if state is not None else ():
                _update(digest, f"{name}.{key}", tensor)
    # Those that are computed when a tower is made are not in its checkpoint, and a cast may reach them.
    for name, buffer in tower.named_buffers():
        _update(digest, name, buffer)
    return digest.hexdigest()


def _adapters(tower: torch.nn.Module) -> list[Any]:
    """Scales and activity of each layer's adapters, which their weights do not show."""
    peft: Any = sys.modules.get("peft.tuners.tuners_utils")  # without it there are none
    found: list[Any] = []
    for name, module in tower.named_modules() if peft is not None else ():
        if isinstance(module, peft.BaseTunerLayer):
            scaling = {key: float(value) for key, value in getattr(module, "scaling", {}).items()}
            at_work = [list(module.active_adapters), list(module.merged_adapters), module.disable_adapters]
            found.append([name, scaling, at_work])
    return found


def _update(digest: Any, name: str, tensor: Tensor) -> None:
    digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _code(tower: torch.nn.Module) -> list[str]:
    """Classes and forwards of its modules, which may have been replaced or compiled, and their source."""
    names, modules = set(), set()
    for module in tower.modules():
        forward = module.forward
        compiled = " compiled" if module._compiled_call_impl is not None else ""
        names.add(f"{_name(type(module))} {_name(forward)}{compiled}")
        modules |= {type(module).__module__, getattr(forward, "__module__", "")}
        # What this layer alone finds under the names it calls; what its module has is below.
        for called, function in replaced_globals(module).items():
            names.add(f"{_name(type(module))} {called} {_name(function)}")
            modules.add(getattr(function, "__module__", ""))
    attention = _attention(tower)
    modules.add(getattr(attention, "__module__", ""))
    if attention is frames_forward:
        modules |= {grouped_attention.__module__, CudaFlashKernel.__module__}
    # torch's own is known by its version.
    ours = sorted(name for name in modules if name.split(".")[0] != "torch")
    of_modules = []
    for name in ours:
        # Callable globals: kernels may replace a module's own functions.
        values = vars(sys.modules[name]) if name in sys.modules else {}
        functions = key_of({called: _name(value) for called, value in values.items() if callable(value)})
        of_modules.append(f"{name} {_of_source(name)} {functions}")
    return [*sorted(names), f"attention {_name(attention)}", f"transformers {version('transformers')}", *of_modules]


def _attention(tower: Any) -> Any:
    """The function behind the name of its attention kernel; None for one that stands in the tower's own module."""
    if takes_all_frames(tower):
        return frames_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS.get(getattr(getattr(tower, "config", None), "_attn_implementation", None))


def _name(of: Any) -> str:
    return f"{getattr(of, '__module__', '')}.{getattr(of, '__qualname__', '')}"


@cache
def _of_source(module: str) -> str:
    file = getattr(sys.modules.get(module), "__file__", None)
    return "" if file is None else source_digest([Path(file)])


_CPU_INFO = Path("/proc/cpuinfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
# Lines of /proc/cpuinfo that say which processor it is, on x86 and on Arm. "model name" alone does not: to a virtual
# machine all of a vendor's may be "Intel Xeon Processor".
_OF_PROCESSOR = frozenset(
    ("vendor_id", "cpu family", "model", "model name", "stepping", "cache size", "flags")
    + ("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features")
)
# Variables with these prefixes choose kernels or their precision; the effects of most are not documented.
_ENVIRONMENT = (
    *("ATEN_", "MKL_", "ONEDNN_", "DNNL_", "OPENBLAS_", "BLIS_", "ARMPL_", "KMP_"),
    *("CUBLAS", "CUDNN_", "NVIDIA_TF32", "MIOPEN_", "ROCBLAS_", "HIPBLAS", "FLASH_ATTENTION_"),
    *("TORCH_ALLOW_TF32", "TORCH_BLAS_", "TORCH_CUDNN_", "TORCH_LINEAR_", "PYTORCH_TUNABLEOP_"),
)
_PACKAGES = ("torch", "transformers", "triton", "flash-attn", "kernels", "liger-kernel", "bitsandbytes", "peft")
_LIBRARIES = ("nvidia-cublas", "nvidia-cudnn", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "flash-attn-", "mkl")
# torch's switches, as its own modules read them: those of later releases are among them. Of TF32 its newer names are
# read: the older ones raise once the newer ones are in use.
_SWITCH = re.compile(
    r"_get_(?!\w*tf32)(\w+_sdp_enabled|(blas_preferred|cpu_allow|cublas|cudnn_(?!batch)|deterministic_algo|math_sdp"
    r"|miopen|mkldnn|nnpack|onednn|rocm|sdp_|sm_)\w+)"
)
_SWITCHES = list(filter(_SWITCH.fullmatch, dir(torch._C)))
_FP32 = ("cuda.matmul", "cudnn.conv", "mkldnn.matmul", "mkldnn.conv")


def numerics_digest(device: torch.device) -> str:
    """64 hexadecimal digits: with the same, the same call on the same numbers gives the same bits.

    Of the moment of the call: a switch may be set at any time.
    """
    return key_of({"told": process_switches(device), "host": _host(device.type, device.index)})


def process_switches(device: torch.device) -> dict[str, Any]:
    """Switches of torch and its libraries set in this process, as JSON values."""
    return {
        "switches": {name: str(getattr(torch._C, name)()) for name in _SWITCHES},
        "fp32": [attrgetter(name)(torch.backends).fp32_precision for name in _FP32],
        "cudnn benchmark": torch.backends.cudnn.benchmark_limit,
        "autocast": [torch.is_autocast_enabled(device.type), str(torch.get_autocast_dtype(device.type))],
        "default": str(torch.get_default_dtype()),
        "subnormal": float(torch.tensor(2.0**-130) * torch.tensor(0.5)),  # zero where they are flushed
        # Sums are divided among threads.
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "environment": {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)},
    }


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
    names = ("level", "type", "size")
    files = [level / name for level in _CACHES.glob("index*") for name in names]
    caches = sorted(f"{file.parent.name} {file.name} {value}" for file in files for value in lines(file))
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
