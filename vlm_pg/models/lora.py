"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) on the language model, through peft.

The adapter is put into the transformers model itself: its forward, its ``save_pretrained`` (which then writes the
adapter alone) and everything of ours that reaches into it stay what they are.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from vlm_pg.errors import ModelError
from vlm_pg.models.family import Family
from vlm_pg.models.registry import family_of
from vlm_pg.models.settings import PARTS, VISION_PARTS, LoraSettings, Part

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


def add_lora(model: Any, settings: LoraSettings, seed: int = 0) -> None:
    """Freeze ``model`` and put a new adapter into its language model; B starts at zero, A depends on ``seed`` alone.

    Raises:
        ModelError: peft is missing, a target names no linear layer, or the model has an adapter already.
    """
    peft = _import_peft()
    if has_adapter(model):
        raise ModelError("The model has an adapter already. Merge it or load the model without it, then add another.")
    names = family_of(model.config).adaptable_layers(model)
    known = sorted({name.rpartition(".")[2] for name in names})
    unknown = sorted(set(settings.target_modules) - set(known))
    if unknown:
        raise ModelError(
            f"model.lora.target_modules names {', '.join(unknown)}; the language model's linear layers are called "
            f"{', '.join(known)}. Choose among them, or leave target_modules out for all."
        )
    targets = settings.target_modules or known
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        # Full names: the vision tower has layers of the same short names.
        target_modules=[name for name in names if name.rpartition(".")[2] in targets],
    )
    # Ranks and resumed runs must start from the same adapter, whatever was drawn before.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model.add_adapter(config)
    model.requires_grad_(False)
    for parameter in adapter_parameters(model):
        # Beside weights in 4 bits peft leaves it in fp32.
        parameter.data = parameter.data.to(model.dtype)
        parameter.requires_grad_(True)


def base_model(model: Any) -> Any:
    """The transformers model inside a PeftModel, adapter layers in place; any other model as it is.

    Raises:
        ModelError: an adapter that is not LoRA.
    """
    configs = getattr(model, "peft_config", None) or {}
    others = sorted({str(getattr(c.peft_type, "value", c.peft_type)) for c in configs.values()} - {"LORA"})
    if others:
        raise ModelError(
            f"The model has an adapter of type {', '.join(others)}; only LORA is supported. Merge it into the model "
            "(merge_and_unload), or make a LoRA adapter with lora_dropout=0."
        )
    is_peft_model = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    return model.get_base_model() if is_peft_model else model


def adapter_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """A and B of every adapted layer."""
    return [parameter for name, parameter in model.named_parameters() if ".lora_" in name]


def has_adapter(model: torch.nn.Module) -> bool:
    """Whether adapter layers are in place, put there by ``add_lora`` or by peft."""
    return bool(adapter_parameters(model))


def check_adapter(model: Any, train: Collection[Part] | None = None) -> None:
    """Refuse what cannot be shared exactly, or would be left without gradient, in an adapter that somebody else made.

    Args:
        train: the parts that are to train; None: whichever do.

    Raises:
        ModelError: an adapter layer has dropout, or what trains of the vision tower is not what ``train`` says.
    """
    rates = {m.p for name, m in model.named_modules() if ".lora_dropout" in name and isinstance(m, torch.nn.Dropout)}
    if any(rates):
        raise ModelError(
            f"The adapter has lora_dropout={max(rates)}; it must be 0. A shared prefix is computed once for all "
            "responses, so dropout cannot differ between them. Make the adapter with lora_dropout=0."
        )
    if train is None:
        return
    found = family_of(model.config).trained_parts(model)
    for part in VISION_PARTS:
        if (part in found) != (part in train):
            wanted = [p for p in PARTS if p in (found if p in VISION_PARTS else train)]
            raise ModelError(
                f"With this adapter the {part} is {'trained' if part in found else 'frozen'}, but model.train is "
                f"[{', '.join(train)}]. Set model.train=[{', '.join(wanted)}], or make the adapter for other layers."
            )


@contextmanager
def adapter_disabled(model: torch.nn.Module) -> Iterator[None]:
    """Inside, adapted layers answer as the frozen layers they wrap.

    Raises:
        ModelError: the model has no adapter, so that it would answer as it always does.
    """
    if not has_adapter(model):
        raise ModelError("The model has no adapter that could be disabled. Add one with add_lora.")
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    before = [layer.disable_adapters for layer in layers]
    for layer in layers:
        # peft's own switch also turns requires_grad of the adapter off and on, which engines watch.
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, disabled in zip(layers, before, strict=True):
            layer._disable_adapters = disabled


@torch.no_grad()
def merge_adapter(model: Any) -> None:
    """Add every adapter's B A to the layer it wraps and take the adapter away: a plain transformers model is left."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in list(model.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge(safe_merge=True)
            model.set_submodule(name, layer.get_base_layer())
    # By these save_pretrained decides that there is an adapter to save.
    model._hf_peft_config_loaded = False
    del model.peft_config


def adapter_base(path: str | Path) -> str | None:
    """The model that the adapter in folder ``path`` was trained on; None if ``path`` is no adapter folder."""
    file = Path(path).expanduser() / CONFIG_FILE
    if not file.is_file() or (file.parent / "config.json").is_file():
        return None
    base = _adapter_config(file.parent).get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise ModelError(f"{file} does not say which model it belongs to; set base_model_name_or_path in it.")
    return base


def adapts_tower(folder: str | Path, family: Family) -> bool:
    """Whether the adapter in ``folder`` may have weights for the vision tower; True where its file does not say."""
    place = (family.tower or "").rpartition(".")[2]
    if not (Path(folder) / WEIGHTS_FILE).is_file():
        return family.reads_media
    try:
        with safe_open(Path(folder) / WEIGHTS_FILE, "pt") as file:
            names = list(file.keys())
    except (OSError, SafetensorError) as error:
        raise _unreadable(Path(folder) / WEIGHTS_FILE, error) from error
    return family.reads_media and any(place in name.split(".") for name in names)


def load_adapter(model: Any, folder: str | Path, settings: LoraSettings | None) -> None:
    """Put the adapter in ``folder`` into ``model``: trainable as ``settings`` say, or frozen if they are None.

    Raises:
        ModelError: peft is missing, or the adapter's layers are not those the settings name.
    """
    peft = _import_peft()
    if settings is None:
        _load_frozen(model, folder, peft)
        return
    _check_scaling(folder, settings)
    add_lora(model, settings)
    saved = _read_weights(folder)
    expected = {name: tensor.shape for name, tensor in peft.get_peft_model_state_dict(model).items()}
    found = {name.removeprefix("base_model.model."): tensor for name, tensor in saved.items()}
    if {name: tensor.shape for name, tensor in found.items()} != expected:
        raise ModelError(
            f"The adapter in {folder} has {len(found)} tensors, the adapter that model.lora describes has "
            f"{len(expected)}, and their names or shapes differ. Use the model.lora settings it was trained with "
            f"(see {CONFIG_FILE} there)."
        )
    peft.set_peft_model_state_dict(model, found)


def _load_frozen(model: Any, folder: str | Path, peft: Any) -> None:
    """As transformers does it, which leaves what the file lacks at random numbers and zeros."""
    conversions = getattr(model, "_weight_conversions", None)
    try:
        model.load_adapter(str(folder))
    except Exception as error:  # of odd types in its files, anything
        raise ModelError(
            f"The adapter in {folder} could not be loaded: {error} It needs {CONFIG_FILE} and {WEIGHTS_FILE} as peft "
            "writes them."
        ) from error
    # By the names of the adapter's file the model itself would be saved under wrong ones, once it is merged.
    model._weight_conversions = conversions
    if not (Path(folder) / WEIGHTS_FILE).is_file():
        return
    found = {name.removeprefix("base_model.model.") for name in _read_weights(folder)}
    lacking = sorted(set(peft.get_peft_model_state_dict(model)) - found)
    if lacking:
        raise ModelError(
            f"The adapter in {folder} lacks {len(lacking)} of its tensors (the first is {lacking[0]}). Copy "
            f"{WEIGHTS_FILE} again from where it comes from."
        )


def _read_weights(folder: str | Path) -> dict[str, torch.Tensor]:
    path = Path(folder) / WEIGHTS_FILE
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ModelError:
    return ModelError(
        f"{path} cannot be read: {error}. An adapter needs its weights as safetensors; copy the file again from where "
        "it comes from."
    )


def _check_scaling(folder: str | Path, settings: LoraSettings) -> None:
    """Names and shapes say nothing about the factor on an adapter's output."""
    config = _adapter_config(folder)
    alpha = config.get("lora_alpha")
    odd = [name for name in ("use_rslora", "rank_pattern", "alpha_pattern") if config.get(name)]
    if alpha != settings.alpha or odd:
        raise ModelError(
            f"The adapter in {folder} has {', '.join([f'lora_alpha={alpha}', *odd])}; model.lora has "
            f"alpha={settings.alpha} and none of use_rslora, rank_pattern, alpha_pattern. Set model.lora.alpha to the "
            "adapter's, or merge the adapter into the model."
        )


def _adapter_config(folder: str | Path) -> dict[str, Any]:
    path = Path(folder) / CONFIG_FILE
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}. Copy it again from where the adapter comes from.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object. Copy it again from where the adapter comes from.")
    return value


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ModelError(
            "LoRA adapters need the package peft, which is not installed. Install it with pip install 'vlm-pg[lora]', "
            "or leave model.lora out to train all weights."
        ) from error
    return peft
