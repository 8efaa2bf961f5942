"""The work of a GPU without one: passes over tensors with shapes, dtypes and devices, without values.

torch's ``FakeTensorMode`` raises where the host needs a value (``.item()``, ``nonzero``, ``bool(tensor)``) and for
operands on two devices. It lets pass what a device would not, or what makes the host wait: copies between devices,
indices on the CPU, matrix products of two dtypes, attention operators' own demands. ``Strict`` raises on those.

Backward of tensors on a fake "cuda" needs a context of the driver; on a fake "cpu" it runs, with the CUDA kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from scripts.bench.counting import fake_mode
from tests.support.groups import make_case, random_group, tiny_policy
from tests.support.tiny import tiny_model, tiny_processor
from vlm_pg.attention.kernels import Kernel
from vlm_pg.attention.kernels.torch_kernels import CudaFlashKernel
from vlm_pg.models import family as family_file
from vlm_pg.models import logits, network
from vlm_pg.models import tower as tower_module
from vlm_pg.models.loading import make_policy
from vlm_pg.models.lora import add_lora
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.models.tower import VisionPiece
from vlm_pg.types import ResponseGroup

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
aten = torch.ops.aten

# Operators that a GPU has for operands of one dtype only. Fake mode looks at shapes alone in most of them.
_ONE_DTYPE = {
    *(aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._grouped_mm, aten.convolution, aten.convolution_backward),
    *(aten.index_copy, aten.index_copy_, aten.index_add, aten.index_add_, aten.index_put, aten.index_put_),
    *(aten.lerp, aten.lerp_, aten.scatter, aten.scatter_, aten.native_layer_norm, aten.dot, aten.mv),
    *(aten._flash_attention_forward, aten._efficient_attention_forward),
    *(torch.ops.c10d.alltoall_base_, torch.ops.c10d._allgather_base_),
}
_COPIES = (aten._to_copy, aten.copy_, aten.copy)
# The log-sum-exp is wider than the rest.
# Collectives: fake ones look at nothing.
_EXCHANGE, _GATHER = torch.ops.c10d.alltoall_base_, torch.ops.c10d._allgather_base_
_ATTENTION_BACKWARD = (aten._flash_attention_backward, aten._efficient_attention_backward)


class FaultOnDevice(RuntimeError):
    """Something that a GPU refuses, or for which the host waits."""


class Strict(TorchDispatchMode):
    """Raises FaultOnDevice where a pass does what it must not, with fake tensors.

    Args:
        captured: inside a CUDA graph, in which nothing may be copied from the host either.
    """

    def __init__(self, captured: bool = False):
        super().__init__()
        self.captured = captured
        self.watches = True
        self.seen: set[str] = set()
        # Copies from the host to the device without a synchronization.
        self.uploads = 0
        # Of each collective its name, and elements to and from each rank.
        self.sent: list[tuple[str, list[int], list[int]]] = []

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """Inside, for what is made between two passes, nothing raises."""
        self.watches = False
        try:
            yield
        finally:
            self.watches = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.watches:
            return func(*args, **kwargs)
        packet = func.overloadpacket
        self.seen.add(packet.__name__)
        given = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        self._check_dtypes(packet, given, args)
        if packet in (_EXCHANGE, _GATHER):
            self._check_collective(packet, args)
        if packet in _COPIES:
            self._check_copy(packet, args, kwargs)
        elif packet is not aten.lift_fresh:
            self._check_devices(packet, given)
        return func(*args, **kwargs)

    def _check_dtypes(self, packet: Any, given: Sequence[torch.Tensor], args: Any) -> None:
        if packet in _ATTENTION_BACKWARD:
            # grad_out, q, k, v, out of the one; grad_out, q, k, v, bias, out of the other.
            operands = args[:5] if packet is aten._flash_attention_backward else args[:6]
            given = [x for x in operands if isinstance(x, torch.Tensor)]
        elif packet not in _ONE_DTYPE:
            return
        found = {x.dtype for x in given if x.is_floating_point()}
        if len(found) > 1:
            raise FaultOnDevice(f"{packet} of {sorted(map(str, found))}: a GPU has it for one dtype only")

    def _check_collective(self, packet: Any, args: Any) -> None:
        """Tensors of the given sizes, contiguous."""
        out, given = args[:2]
        ranks = torch.distributed.get_world_size()
        if packet is _EXCHANGE:
            to, came = ([int(size) for size in sizes] for sizes in (args[4], args[3]))
            fits = (sum(came), sum(to)) == (out.shape[0], given.shape[0])
            to, came = ([size * math.prod(given.shape[1:]) for size in sizes] for sizes in (to, came))
        else:
            to = came = [given.numel()] * ranks
            fits = sum(came) == out.numel()
        if not fits:
            raise FaultOnDevice(f"{packet} with sizes that are not those of its tensors")
        if not (out.is_contiguous() and given.is_contiguous()):
            raise FaultOnDevice(f"{packet} of tensors that are not contiguous")
        self.sent.append((packet.__name__, to, came))

    def _check_copy(self, packet: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if packet is aten._to_copy:
            source, target = args[0].device, kwargs.get("device") or args[0].device
            waits = not kwargs.get("non_blocking")
        else:
            source, target = args[1].device, args[0].device
            waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        self._judge_copy(source.type, torch.device(target).type, waits)

    def _judge_copy(self, source: str, target: str, waits: bool) -> None:
        if source == target:
            return
        if target == "cpu":
            raise FaultOnDevice("a copy from the device to the host: the host waits for everything that is queued")
        if self.captured:
            raise FaultOnDevice("a copy from the host to the device, which a CUDA graph cannot hold")
        if waits:
            raise FaultOnDevice("a blocking copy from the host to the device: the host waits for what is queued")
        self.uploads += 1

    def _check_devices(self, packet: Any, given: Sequence[torch.Tensor]) -> None:
        """Numbers of no dimension may come from the host; indices may not, although torch copies them itself."""
        found = {x.device.type for x in given if x.dim() or x.device.type != "cpu"}
        if len(found) > 1:
            raise FaultOnDevice(f"{packet} of tensors on {sorted(found)}: one of them was left on the host")


@contextmanager
def faked(strict: Strict | None = None) -> Iterator[Strict]:
    """Inside, tensors are fake, and what a GPU would not do raises."""
    strict = strict or Strict()
    with fake_mode(allow_non_fake_inputs=False), ExitStack() as stack:
        stack.enter_context(mock.patch.object(family_file, "tower_inputs", _tower_inputs_of_real_grids))
        stack.enter_context(mock.patch.object(VisionPiece, "grid_thw", _grids_with_values))
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)))
        # Which compares values.
        stack.enter_context(mock.patch.object(logits, "judged", return_value=None))
        logits.logits_fault.cache_clear()
        stack.callback(logits.logits_fault.cache_clear)
        stack.enter_context(strict)
        yield strict


def _grids_with_values(piece: VisionPiece) -> torch.Tensor:
    with _disable_current_modes():
        return torch.tensor(piece.grids)


_tower_inputs = family_file.tower_inputs


def _tower_inputs_of_real_grids(tower: Any, grid_thw: torch.Tensor, device: torch.device) -> dict[str, Any]:
    """As the program makes them of grids with values; what goes to the device without values."""
    assert not isinstance(grid_thw, FakeTensor), "grids must be on the host, with their values, when the tower begins"
    with _disable_current_modes():
        made = _tower_inputs(tower, grid_thw, torch.device("meta"))
        # numpy's arrays can be sliced and subtracted, as a tensor on the host can.
        on_host = {name: x.numpy() for name, x in made.items() if isinstance(x, torch.Tensor) and not x.is_meta}
    moved = {name: as_fake(x, device) for name, x in made.items() if isinstance(x, torch.Tensor) and x.is_meta}
    return made | on_host | moved


def as_fake(value: Any, device: torch.device) -> Any:
    """A tensor, or a record of tensors, without values, on ``device``. Call it inside ``faked``."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    assert is_dataclass(value) and not isinstance(value, type)
    parts = {f.name: getattr(value, f.name) for f in fields(value)}
    return replace(value, **{name: as_fake(x, device) for name, x in parts.items() if isinstance(x, torch.Tensor)})


# Heads and widths of published models (config.json of the checkpoints under https://huggingface.co/Qwen): Qwen2-VL-7B,
# Qwen2.5-VL-7B, Qwen3-VL-8B, Qwen3-VL-30B-A3B, Qwen3.5-9B. Layers and vocabulary stay small.
_ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
_INTERLEAVED = _ROPE | {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
_OF_7B = {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944}
_OF_8B = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
_OF_QWEN3_5 = {
    # One of each kind: transformers' own code for the first takes some thousand operations a layer.
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "hidden_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_parameters": _INTERLEAVED | {"mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25},
}
_ONE_AXIS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
REAL_TEXT: dict[str, dict[str, Any]] = {
    "qwen2_vl": _OF_7B | {"rope_parameters": _ROPE},
    "qwen2_5_vl": _OF_7B | {"rope_parameters": _ROPE},
    "qwen3_vl": _OF_8B | {"rope_parameters": _INTERLEAVED},
    "qwen3_vl_moe": _OF_8B | {"rope_parameters": _INTERLEAVED, "hidden_size": 2048, "num_key_value_heads": 4},
    "qwen3_5": _OF_QWEN3_5,
    "qwen3_5_moe": _OF_QWEN3_5 | {"hidden_size": 2048, "num_key_value_heads": 2},
    "qwen2": _OF_7B | _ONE_AXIS,
    "qwen3": _OF_8B | _ONE_AXIS,
    "qwen3_moe": _OF_8B | _ONE_AXIS | {"hidden_size": 2048, "num_key_value_heads": 4},
    "qwen3_5_text": _OF_QWEN3_5,
    "qwen3_5_moe_text": _OF_QWEN3_5 | {"hidden_size": 2048, "num_key_value_heads": 2},
}
_TOWER_OF_QWEN3 = {"hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304}
REAL_VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 1280, "num_heads": 16},
    "qwen2_5_vl": {"hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420},
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _TOWER_OF_QWEN3),
}


def fake_policy(family: str, device: torch.device, kernel: Kernel | None = None, **settings: Any) -> Policy:
    """A bf16 policy with published heads and widths on a fake device. Call it inside ``faked``.

    Args:
        kernel: what its attention runs on, without the self-check, which compares values; default: torch's flash
            attention for CUDA, whatever the device.
    """
    chosen = kernel or CudaFlashKernel()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(network, "check_kernel", return_value=0.0))
        stack.enter_context(mock.patch.object(network, "select_kernel", return_value=chosen))
        stack.enter_context(mock.patch.object(tower_module, "check_kernel", return_value=0.0))
        on_gpu = device == CUDA and isinstance(chosen, CudaFlashKernel)
        stack.enter_context(mock.patch.object(tower_module, "frames_kernel", return_value=chosen if on_gpu else None))
        if (lora := settings.get("lora")) is None:
            model = tiny_model(family, text=REAL_TEXT[family], vision=REAL_VISION.get(family))
        else:
            # peft moves modules, which fake weights do not allow: a tiny model with values, of which they are taken.
            with _disable_current_modes():
                model = tiny_model(family)
                add_lora(model, lora)
        put(model, device, torch.bfloat16)
        policy = make_policy(model, tiny_processor(family), ModelSettings(path="tiny", **settings))
        if isinstance(chosen, CudaFlashKernel):
            # On the fake CPU, too.
            tower_module.attend_on(policy.model, policy.family, chosen)
        return policy


def put(model: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """All weights and buffers to ``device``, those of floating point as ``Module.to(device, dtype)`` casts them."""
    made: dict[torch.Tensor, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None and weight not in made:
                made[weight] = torch.nn.Parameter(_placed(weight, device, dtype), weight.requires_grad)
            if weight is not None:
                module._parameters[name] = made[weight]
        for name, buffer in module._buffers.items():
            # Rotary frequencies stay fp32 in models that are loaded in half precision.
            if buffer is not None:
                module._buffers[name] = _placed(buffer, device, buffer.dtype)


def _placed(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype, device=device)


@lru_cache
def real_policy(family: str) -> Policy:
    """A tiny one with values, which makes prompts."""
    with _disable_current_modes():
        return tiny_policy(family=family)


@lru_cache
def groups_of(family: str) -> tuple[ResponseGroup, ...]:
    """Two questions on one video of several frames, one with an image, and one without media; answers of 1 to 90."""
    policy = real_policy(family)
    with _disable_current_modes():
        shown = [("video", 0, 7), ("video", 1, 7), ("image", 2, None), ("text", 3, None)]
        cases = [make_case(policy, kind, seed, media_seed=media, max_side=6) for kind, seed, media in shown]
        lengths = [[5, 90, 1], [30], [7, 7], [66, 2]]
        given = enumerate(zip(cases, lengths, strict=True))
        return tuple(random_group(policy, case, of_group, seed) for seed, (case, of_group) in given)


def features_of(policy: Policy, groups: Sequence[ResponseGroup], device: torch.device) -> torch.Tensor | None:
    """What the tower makes of the groups' media, joined group by group; None without any."""
    prompts = [group.prompt for group in groups if group.prompt.pixel_values is not None]
    if not prompts:
        return None
    with _disable_current_modes():
        pixels = torch.cat([prompt.pixel_values for prompt in prompts if prompt.pixel_values is not None])
        grids = torch.cat([prompt.grid_thw for prompt in prompts if prompt.grid_thw is not None])
    features = policy.run_tower(as_fake(pixels, device), grids)
    assert (features.dtype, features.device) == (policy.dtype, device)
    return features
