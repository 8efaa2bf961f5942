"""What decides about every bit that a vision tower gives: its weights, its code, and what computes it where."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import xxhash

from vlm_pg.cache.store import key_of
from vlm_pg.models.family import Family
from vlm_pg.models.scattered import is_part

Gathered = Callable[[Iterable[torch.nn.Parameter]], AbstractContextManager[None]]

_PACKAGES = ("torch", "transformers", "flash-attn", "kernels", "liger-kernel")
# Of a tower's configuration: where it comes from and by what it was written, of which no output depends.
_NOT_OF_THE_OUTPUT = frozenset(("_name_or_path", "architectures", "transformers_version"))
_CPU_INFO = Path("/proc/cpuinfo")


def at_hand(weights: Iterable[torch.nn.Parameter]) -> AbstractContextManager[None]:
    """Weights of which each rank has all."""
    return nullcontext()


def tower_digest(model: Any, family: Family, gathered: Gathered = at_hand) -> str:
    """64 hexadecimal digits: two towers with the same give the same bits for the same call.

    Of the weights and buffers (mergers among them) names, dtypes, shapes and bytes, one after the other, those kept in
    few bits as they are stored; by how much adapters in it count; the configuration, the attention kernel; the code by
    the classes' source and the packages' versions; the device with its libraries and what torch was told about
    precision. On a CPU the number of threads too, among which sums are divided. Not among it is how media are divided
    over calls, which every entry says.

    Under ZeRO-3 torch's linear layer is another function. For rows [rows, width], which is what linear layers of Qwen's
    towers are given, it makes the same calls (a test compares the bits), so it counts as the same.

    Args:
        gathered: inside, these weights are whole here. A collective where they lie with several ranks: then all of them
            call this together.
    """
    tower = family.vision_tower(model)
    config = getattr(tower, "config", None)
    values = {} if config is None else config.to_dict()
    values = {key: value for key, value in values.items() if key not in _NOT_OF_THE_OUTPUT}
    parts = {
        "weights": _of_weights(tower, gathered),
        "config": json.dumps(values, sort_keys=True, default=str),
        "attention": getattr(config, "_attn_implementation", None),
        "family": [family.model_type, family.deepstack_layers(model.config)],
        "code": _code(tower),
        "adapters": _adapters(tower),
        "versions": {package: _version(package) for package in _PACKAGES},
        "arithmetic": _arithmetic(next(tower.parameters()).device),
    }
    return key_of(parts)


def _of_weights(tower: torch.nn.Module, gathered: Gathered) -> str:
    """Against accidents, not against people who make weights that collide."""
    digest = xxhash.xxh3_128()
    for name, parameter in tower.named_parameters():
        with gathered([parameter] if is_part(parameter) else []):
            for part, tensor in _stored(name, parameter):
                _update(digest, part, tensor)
    # Those that are computed when a tower is made are not in its checkpoint, and a cast may reach them.
    for name, buffer in tower.named_buffers():
        _update(digest, name, buffer)
    return digest.hexdigest()


def _adapters(tower: torch.nn.Module) -> list[Any]:
    """Of each layer with adapters what their weights do not say: by how much each counts, and which are at work."""
    peft: Any = sys.modules.get("peft.tuners.tuners_utils")  # without it there are none
    found: list[Any] = []
    for name, module in tower.named_modules() if peft is not None else ():
        if isinstance(module, peft.BaseTunerLayer):
            scaling = {key: float(value) for key, value in getattr(module, "scaling", {}).items()}
            at_work = [list(module.active_adapters), list(module.merged_adapters), module.disable_adapters]
            found.append([name, scaling, at_work])
    return found


def _stored(name: str, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a weight is made of: of one in few bits its scales too."""
    yield name, parameter.detach()
    state: Any = getattr(parameter, "quant_state", None)
    if state is not None:
        for key, tensor in sorted(state.as_dict(packed=True).items()):
            yield f"{name}.{key}", tensor


def _update(digest: Any, name: str, tensor: torch.Tensor) -> None:
    digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _code(tower: torch.nn.Module) -> list[str]:
    """The classes of its modules and the functions that run them, which may have been replaced, and their source."""
    names, files = set(), set()
    for module in tower.modules():
        forward = module.forward
        names.add(f"{_name(type(module))} {_name(forward)}")
        files |= {type(module).__module__, getattr(forward, "__module__", "")}
    return sorted(names) + [f"{name} {_of_source(name)}" for name in sorted(files)]


def _name(of: Any) -> str:
    return f"{getattr(of, '__module__', '')}.{getattr(of, '__qualname__', '')}"


@cache
def _of_source(module: str) -> str:
    file = getattr(sys.modules.get(module), "__file__", None)
    # torch's own is known by its version.
    if file is None or module.split(".")[0] == "torch":
        return ""
    return xxhash.xxh3_128_hexdigest(Path(file).read_bytes())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _arithmetic(device: torch.device) -> dict[str, Any]:
    backends = torch.backends
    # torch's older names for these raise where somebody has used the newer ones.
    of_fp32 = [attrgetter(name)(backends) for name in ("cuda.matmul", "cudnn.conv", "mkldnn.matmul", "mkldnn.conv")]
    of_torch = {
        "device": device.type,
        "precision": [backend.fp32_precision for backend in of_fp32],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if device.type != "cuda":
        of_cpu = {"processor": _processor(), "instructions": backends.cpu.get_cpu_capability()}
        return {**of_torch, **of_cpu, "threads": torch.get_num_threads()}
    kernels = backends.cuda
    return {
        **of_torch,
        "name": torch.cuda.get_device_name(device),
        "libraries": [torch.version.cuda, torch.version.hip, backends.cudnn.version()],
        "sums": [kernels.matmul.allow_bf16_reduced_precision_reduction, str(kernels.preferred_blas_library())],
        "attention": [
            kernels.flash_sdp_enabled(),
            kernels.mem_efficient_sdp_enabled(),
            kernels.math_sdp_enabled(),
            kernels.cudnn_sdp_enabled(),
        ],
    }


@cache
def _processor() -> str:
    """Libraries choose their code by it."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    found = {line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")}
    return ", ".join([platform.machine(), *sorted(found)])
