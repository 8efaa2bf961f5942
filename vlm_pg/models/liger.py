"""Triton kernels of the package liger-kernel for norms, feed-forward layers and rotary positions; never its losses."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from vlm_pg.errors import ModelError
from vlm_pg.models.kernel_trials import Trial, faults, kinds, product_of, twin, with_gradients
from vlm_pg.models.layer_globals import set_forward, set_layer_globals
from vlm_pg.models.registry import FAMILIES
from vlm_pg.models.settings import Switch
from vlm_pg.models.weights import whole_shape

_NAMES = {
    "rms_norm": "RMSNorm",
    "rms_norm_around_one": "RMSNorm",
    "layer_norm": "LayerNorm",
    "swiglu": "SwiGLU",
    "experts": "experts",
    "rope": "rotary positions",
}
# liger-kernel has another kernel for this many short rows.
_MANY_ROWS, _SHORT = 4096 * 8, 256


@dataclass(frozen=True)
class Liger:
    """The parts of a model that run on liger-kernel.

    Attributes:
        parts: "rope" and keys of ``liger_layers.FORWARDS``.
        others: further parts that liger-kernel has kernels for: why each stays transformers'.
    """

    parts: tuple[str, ...] = ()
    others: Mapping[str, str] = field(default_factory=dict)


def liger_of(model: Any) -> Liger:
    """The state of a transformers model."""
    return getattr(model, "vlm_pg_liger", Liger())


def liger_line(model: Any) -> str | None:
    """The parts that run on liger-kernel and those that do not, for the user; None where it does not apply."""
    found = liger_of(model)
    on = [_NAMES[part] for part in found.parts]
    parts = [f"{', '.join(on)} (not its losses)"] if on else []
    parts += [f"{name} by transformers: {why}" for name, why in found.others.items()]
    return f"liger-kernel: {'; '.join(parts)}" if parts else None


def apply_liger(model: Any, switch: Switch) -> None:
    """Run layers of ``model``, a transformers model, on liger's kernels; other models stay unchanged.

    "auto": on a GPU, each part whose outputs and gradients are as near to float64 as those of transformers' code; not
    experts, for which the host might wait, and a decode step could not be a CUDA graph. True: all parts, unchecked;
    fake weights, on which work is counted and not computed, may then be on any device.

    Raises:
        ModelError: ``switch`` is True, and there is no GPU, no liger-kernel, or a family it has nothing for.
    """
    if switch is True:
        _apply_all(model)
    elif switch == "auto" and _on_gpu(model) and not isinstance(_weight(model), FakeTensor):
        _apply_agreeing(model)


def _parts(model: Any) -> tuple[str, ...]:
    family = FAMILIES.get(model.config.model_type)
    if family is None:
        return ()
    return (*family.liger, "experts") if family.moe and "swiglu" in family.liger else family.liger


def _apply_all(model: Any) -> None:
    parts = _parts(model)
    if not parts:
        raise ModelError(f"model.liger is true, but {_nothing_for(model)}. Set model.liger=auto or false.")
    if not _on_gpu(model) and not isinstance(_weight(model), FakeTensor):
        raise ModelError(
            f"model.liger is true, but its Triton kernels need a GPU and the model is on {_weight(model).device}. Move "
            "it to a GPU first, or set model.liger=auto or false."
        )
    try:
        from vlm_pg.models import liger_layers  # noqa: F401
    except ImportError as error:
        raise ModelError(f"model.liger is true, but {_missing(error)}, or set model.liger=auto or false.") from error
    changed = tuple(part for part in parts if _install(model, part))
    # All feed-forward layers of a mixture may be experts.
    for part in set(parts) - set(changed) - ({"swiglu"} if "experts" in changed else set()):
        raise ModelError(
            f"model.liger is true, but {type(model).__name__} has nothing that liger-kernel's {_NAMES[part]} could "
            "stand in for. Use a transformers release that pyproject.toml allows, or set model.liger=auto or false."
        )
    model.vlm_pg_liger = Liger(changed)


def _apply_agreeing(model: Any) -> None:
    parts = _parts(model)
    try:
        from vlm_pg.models import liger_layers  # noqa: F401
    except Exception as error:  # Triton and drivers raise anything
        model.vlm_pg_liger = Liger((), {"all layers": _missing(error)})
        return
    others = judged(model) if parts else {"all": _nothing_for(model)}
    if "experts" in parts:
        others["experts"] = "liger's may let the host wait, which CUDA graphs forbid (model.liger=true takes them)"
    changed = tuple(part for part in parts if part not in others and _install(model, part))
    model.vlm_pg_liger = Liger(changed, {_NAMES.get(part, "all layers"): why for part, why in others.items()})


def judged(model: Any) -> dict[str, str]:
    """The parts, experts excepted, whose kernel is further from float64 than transformers' code, and by how much.

    Each is checked alone, outputs and gradients, on random numbers and weights for every kind and size of module.
    """
    generator, like = torch.Generator().manual_seed(0), _weight(model)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(like)

    trials = {"swiglu": _gates, "rope": _rotations}
    others = (part for part in _parts(model) if part != "experts")
    return faults({part: partial(trials.get(part) or partial(_norms, part), model, random) for part in others})


def without_liger(module: Any) -> Any:
    """``module``, or, where it runs on liger-kernel, a copy with its class's forward."""
    layers = sys.modules.get("vlm_pg.models.liger_layers")
    names = ("forward", "_old_forward", "vlm_pg_whole_forward")
    functions = [getattr(module.__dict__.get(name), "__func__", None) for name in names]
    is_ligers = layers is not None and any(
        function.__module__ == layers.__name__ or function.__globals__.get("apply_rotary_pos_emb") is layers.rotate
        for function in functions
        if function is not None
    )
    return twin(module) if is_ligers else module


def _nothing_for(model: Any) -> str:
    known = ", ".join(name for name, family in FAMILIES.items() if family.liger)
    return f"liger-kernel has nothing for model type {model.config.model_type!r}; it has kernels for {known}"


def _missing(error: Exception) -> str:
    return (
        f"the package liger-kernel is not installed, or not as it is needed ({error}). Install it with pip install "
        "'vlm-pg[liger]'"
    )


def _install(model: Any, part: str) -> int:
    """Installs the kernels of ``part``; returns the number of changed modules."""
    from vlm_pg.models.liger_layers import FORWARDS, ROTATIONS

    if part == "rope":
        return sum(set_layer_globals(module, ROTATIONS) for module in model.modules() if _attends(module))
    fits, forward = FORWARDS[part]
    chosen = [module for module in model.modules() if fits(module)]
    for module in chosen:
        set_forward(module, forward)
    return len(chosen)


def _attends(module: Any) -> bool:
    """Whether it is an attention layer, of the language model or the tower."""
    return type(module).__name__.endswith("Attention")


def _on_gpu(model: Any) -> bool:
    return _weight(model).device.type == "cuda"


def _weight(model: Any) -> Tensor:
    return next(model.parameters())


def _norms(part: str, model: Any, random: Any) -> Iterator[Trial]:
    from vlm_pg.models.liger_layers import FORWARDS

    fits, forward = FORWARDS[part]
    for module in kinds(model, fits):
        weights = {name: random(*whole_shape(weight)) for name, weight in module.named_parameters(recurse=False)}

        def run(by: Any, x: Tensor, *given: Tensor, module: Any = module, names: Any = weights) -> Any:
            return by(twin(module, **dict(zip(names, given, strict=True))), x)

        width = whole_shape(module.weight)[-1]
        for rows in (64, _MANY_ROWS) if width <= _SHORT else (64,):
            by, usual = (partial(run, one) for one in (forward, type(module).forward))
            yield from with_gradients(type(module).__name__, by, usual, {"input": random(1, rows, width), **weights})


def _gates(model: Any, random: Any) -> Iterator[Trial]:
    from vlm_pg.models.liger_layers import FORWARDS

    fits, forward = FORWARDS["swiglu"]
    for module in kinds(model, fits):
        inputs = {name: random(1, 64, module.gate_proj.out_features) for name in ("gate", "up")}
        by, usual = (partial(product_of, module, forward=one) for one in (forward, type(module).forward))
        yield from with_gradients(type(module).__name__, by, usual, inputs)


def _rotations(model: Any, random: Any) -> Iterator[Trial]:
    from vlm_pg.models.liger_layers import ROTATIONS

    rows: tuple[int, ...]
    for module in kinds(model, _attends):
        theirs, used = vars(sys.modules[type(module).__module__]), type(module).forward.__code__.co_names
        name = next((name for name in ROTATIONS if name in used), None)
        if name is None:
            continue
        if name == "apply_rotary_pos_emb":
            config, rows, heads_before_rows = module.config, (1, 64), (1, 2)
            heads = (config.num_attention_heads, config.num_key_value_heads)
            turned = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
        else:  # a tower's, whose patches have no batch, and heads behind rows
            rows, heads_before_rows, heads, turned = (64,), (0, 0), (module.num_heads,) * 2, 1.0
        # As they come: both halves alike.
        angles = random(*rows, int(module.head_dim * turned) // 2).repeat(*(1 for _ in rows), 2)
        cos, sin = angles.cos(), angles.sin()

        def run(by: Any, q: Tensor, k: Tensor, at: Any = heads_before_rows, angles: Any = (cos, sin)) -> Any:
            return by(q.transpose(*at), k.transpose(*at), *angles)

        inputs = {
            name: random(*rows, count, module.head_dim) for name, count in zip(("queries", "keys"), heads, strict=True)
        }
        by, usual = (partial(run, one[name]) for one in (ROTATIONS, theirs))
        yield from with_gradients(f"{type(module).__name__}'s rotation", by, usual, inputs)
