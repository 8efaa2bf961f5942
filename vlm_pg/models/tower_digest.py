"""What decides about every bit that a vision tower gives, but for who computes it (``numerics``): weights and code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import xxhash

from vlm_pg.attention.frames import frames_forward
from vlm_pg.attention.grouped import grouped_attention
from vlm_pg.attention.kernels.cuda import CudaFlashKernel
from vlm_pg.cache.source_code import source_digest
from vlm_pg.cache.store import key_of
from vlm_pg.models.family import Family
from vlm_pg.models.layer_globals import replaced_globals
from vlm_pg.models.scattered import is_part
from vlm_pg.models.tower_attention import takes_all_frames

Gathered = Callable[[Iterable[torch.nn.Parameter]], AbstractContextManager[None]]

# Our modules on the way from pixels to features; a test follows the calls and finds those that are not named here.
OWN_CODE = ("family", "network", "scattered", "tower_attention", "tower_inputs", "turns", "vision")
# Of a tower's configuration: where it comes from and by what it was written, of which no output depends.
_NOT_OF_THE_OUTPUT = frozenset(("_name_or_path", "architectures", "transformers_version"))


def at_hand(weights: Iterable[torch.nn.Parameter]) -> AbstractContextManager[None]:
    """Weights of which each rank has all."""
    return nullcontext()


def tower_digest(model: Any, family: Family, gathered: Gathered = at_hand) -> str:
    """64 hexadecimal digits: two towers with the same give the same bits for the same call, where ``numerics_digest``
    is the same too.

    Of the weights and buffers (mergers among them) names, dtypes, shapes and bytes, one after the other, those kept in
    few bits as they are stored; by how much adapters in it count; the configuration, the attention kernel; the code by
    the classes' source, what stands in their modules and on the layers in place of it, transformers' version, and our
    own source. Not among it is how media are divided over calls, which every entry says.

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
        "own code": source_digest(Path(__file__).with_name(f"{name}.py") for name in OWN_CODE),
        "adapters": _adapters(tower),
    }
    return key_of(parts)


def weights_digest(model: Any) -> str:
    """64 hexadecimal digits of all weights and buffers of a model as it is here, adapters and their scales too."""
    return key_of({"weights": _of_weights(model, at_hand), "adapters": _adapters(model)})


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
    """Classes of its modules and functions that run them, which may have been replaced or compiled; their source."""
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
    of_modules = [f"{name} {_of_source(name)} {_of_names(name)}" for name in ours]
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


def _of_names(module: str) -> str:
    """What a module's functions find under the names they call: kernels are put there in place of its own."""
    names = vars(sys.modules[module]) if module in sys.modules else {}
    return key_of({name: _name(value) for name, value in names.items() if callable(value)})
