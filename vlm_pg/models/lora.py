"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) on the language model, through peft.

The adapter is put into the transformers model itself: its forward, its ``save_pretrained`` (which then writes the
adapter alone) and everything of ours that reaches into it stay what they are.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from vlm_pg.errors import ModelError
from vlm_pg.models.family import Family
from vlm_pg.models.registry import family_of
from vlm_pg.models.settings import PARTS, VISION_PARTS, LoraSettings, Part

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
# Fields of peft's LoraConfig. With ``EXACT_FIELDS`` adapters are loaded, trained and exported exactly as peft computes
# them; all others must have their default values.
_DESCRIPTION = {"task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"}
_DESCRIPTION |= {"inference_mode", "runtime_config", "megatron_core"}
# Fields that decide which layers have an adapter, and its shape: checked by the adapter's tensors.
_LAYERS = {"r", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out"}
_INITIALIZATION = {"init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"}
# An adapter with these fields alone is one that ``add_lora`` makes.
_PLAIN_FIELDS = _DESCRIPTION | _LAYERS | _INITIALIZATION
_PLAIN_FIELDS |= {"lora_alpha", "lora_dropout", "qalora_group_size", "ensure_weight_tying"}
EXACT_FIELDS = frozenset(
    _PLAIN_FIELDS
    | {"use_rslora", "rank_pattern", "alpha_pattern", "bias", "modules_to_save", "trainable_token_indices"}
    | {"target_parameters", "use_dora", "lora_bias", "kasa_config"}
)
# These do not change the base weights, and the file overwrites the initial adapter.
_PLAIN_INITIALIZATIONS = (True, False, "gaussian", "orthogonal", "eva", "mica")
# These change the base weights when the adapter is added, the same way every time.
_REPLAYED_INITIALIZATIONS = ("olora", "pissa")
_MERGE = "Train an adapter without it, or merge it with peft (merge_and_unload) and use the merged model."


def add_lora(model: Any, settings: LoraSettings) -> None:
    """Freeze ``model`` and put a new adapter into its language model; B starts at zero, A is always the same.

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
        # Full names: the vision tower has layers with the same short names.
        target_modules=[name for name in names if name.rpartition(".")[2] in targets],
    )
    # Ranks and resumed runs must start from the same adapter, whatever the state of the generator.
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model.add_adapter(config)
    model.requires_grad_(False)
    for parameter in adapter_parameters(model):
        # Beside weights in 4 bits peft leaves it in fp32.
        parameter.data = parameter.data.to(model.dtype)
        parameter.requires_grad_(True)


def base_model(model: Any) -> Any:
    """The transformers model inside a PeftModel, adapter layers in place; any other model unchanged.

    Raises:
        ModelError: an adapter that is not LoRA, or has an option that is not supported.
    """
    configs = getattr(model, "peft_config", None) or {}
    others = sorted({str(getattr(c.peft_type, "value", c.peft_type)) for c in configs.values()} - {"LORA"})
    if others:
        raise ModelError(
            f"The model has an adapter of type {', '.join(others)}; only LORA is supported. Merge it into the model "
            "(merge_and_unload), or make a LoRA adapter with lora_dropout=0."
        )
    for config in configs.values():
        _check_fields(config, "The model's adapter")
    is_peft_model = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    return model.get_base_model() if is_peft_model else model


def adapter_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """A and B of every adapted layer."""
    return [parameter for name, parameter in model.named_parameters() if ".lora_" in name]


def has_adapter(model: torch.nn.Module) -> bool:
    """Whether adapter layers are in place, put there by ``add_lora`` or by peft."""
    return bool(adapter_parameters(model))


def check_adapter(model: Any, train: Collection[Part] | None = None) -> None:
    """Refuse a foreign adapter that cannot be shared exactly, or whose tower weights would have no gradient.

    Args:
        train: the parts that are to train; None: whichever do.

    Raises:
        ModelError: an adapter layer has dropout, or the trained parts of the vision tower differ from ``train``.
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
    """Inside, adapted layers compute as the frozen layers they wrap.

    Raises:
        ModelError: the model has no adapter, or one that cannot be disabled.
    """
    if not has_adapter(model):
        raise ModelError("The model has no adapter that could be disabled. Add one with add_lora.")
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for config in getattr(model, "peft_config", {}).values():
        # With these the model with a disabled adapter differs from the base model.
        if config.bias != "none" or config.kasa_config or config.init_lora_weights not in _PLAIN_INITIALIZATIONS:
            raise ModelError(
                f"The adapter cannot be disabled: bias={config.bias}, init_lora_weights={config.init_lora_weights} or "
                f"kasa_config={config.kasa_config} changed weights beneath it. Load a second policy as reference, "
                "or set algorithm.kl_coef=0."
            )
    # The latter hold modules_to_save and trained tokens.
    layers = [m for m in model.modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper)]
    if any(layer.merged for layer in layers if isinstance(layer, BaseTunerLayer)):
        raise ModelError(
            "The adapter is merged into the weights, as while answers are sampled, and cannot be disabled then. Score "
            "the reference before or after generation."
        )
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
    """Add every adapter's B A to the layer it wraps and take the adapter away: a plain transformers model is left.

    Trained copies of whole modules (``modules_to_save``) replace these; where that unties embeddings and output head,
    the model's configuration is updated.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    done: list[str] = []
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    modules: list[tuple[str, Any]] = list(model.named_modules())
    for name, layer in modules:
        if any(name.startswith(f"{outer}.") for outer in done):
            continue
        if hasattr(layer, "unload_and_optionally_merge_module"):
            options = {"merge": True, "safe_merge": True, "adapter_names": None}
            model.set_submodule(name, layer.unload_and_optionally_merge_module(**options))
        elif isinstance(layer, BaseTunerLayer):
            if layer in embeddings:
                # Otherwise a tied output head would be changed, too.
                base: Any = layer.get_base_layer()
                base.weight = torch.nn.Parameter(base.weight.clone(), requires_grad=False)
            layer.merge(safe_merge=True)
            model.set_submodule(name, layer.get_base_layer())
        else:
            continue
        done.append(name)
    # save_pretrained decides by these that there is an adapter to save.
    model._hf_peft_config_loaded = False
    del model.peft_config
    if model.get_input_embeddings().weight is not model.get_output_embeddings().weight:
        model.config.tie_word_embeddings = False


def adapter_base(path: str | Path) -> str | None:
    """The model that the adapter in folder ``path`` was trained on; None if ``path`` is no adapter folder."""
    file = Path(path).expanduser() / CONFIG_FILE
    if not file.is_file() or (file.parent / "config.json").is_file():
        return None
    base = _adapter_config(file.parent).get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise ModelError(f"{file} does not say which model it belongs to; set base_model_name_or_path in it.")
    revision = _adapter_config(file.parent).get("revision")
    if revision not in (None, "main") and not Path(base).expanduser().is_dir():
        raise ModelError(
            f"{file} names revision {revision!r} of {base}, but only latest revisions are read from the hub. Download "
            "it to a folder, and name the folder in base_model_name_or_path."
        )
    return base


def adapts_tower(folder: str | Path, family: Family) -> bool:
    """Whether the adapter in ``folder`` may have weights for the vision tower; True where its file does not show it."""
    tower, path = (family.tower or "").rpartition(".")[2], Path(folder) / WEIGHTS_FILE
    if not path.is_file():
        return family.reads_media
    try:
        with safe_open(path, "pt") as file:
            names = list(file.keys())
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error
    return family.reads_media and any(tower in name.split(".") for name in names)


def load_adapter(model: Any, folder: str | Path, settings: LoraSettings | None) -> None:
    """Put the adapter in ``folder`` into ``model``: trainable as ``settings`` say, or frozen if they are None. If the
    model has an adapter of these settings, its weights are replaced.

    Every tensor of its file is compared with the model's weights afterwards.

    Raises:
        ModelError: peft is missing, an option of the adapter is not supported, its layers are not those the settings
            name, or a tensor of its file is missing or belongs nowhere.
    """
    peft = _import_peft()
    path = Path(folder) / WEIGHTS_FILE
    pickled = path.with_suffix(".bin")
    try:
        is_pickled = pickled.is_file() and not path.is_file()
        saved = torch.load(pickled, "cpu", weights_only=True) if is_pickled else load_file(path)
    except Exception as error:  # damaged files raise anything
        raise _unreadable(path, error) from error
    config = _lora_config(folder, peft)
    if settings is None:
        config.inference_mode = True
        try:
            model.add_adapter(config)
        except Exception as error:  # odd types in its files raise anything
            raise ModelError(
                f"The adapter in {folder} could not be put into the model: {error} It needs {CONFIG_FILE} and "
                f"{WEIGHTS_FILE} as peft writes them, for this model."
            ) from error
        # peft leaves modules_to_save and biases trainable.
        model.requires_grad_(False)
    elif not has_adapter(model):
        _check_plain(folder, config, settings)
        add_lora(model, settings)
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    # Releases of transformers name layers differently.
    adapter = _adapter_state(model, peft)
    renamings = [one for one in get_model_conversion_mapping(model) or [] if isinstance(one, WeightRenaming)]
    found = {}
    for name, tensor in saved.items():
        name = name.removeprefix("base_model.model.")
        found[name if name in adapter else rename_source_key(name, renamings, [])[0]] = tensor
    # A file may contain adapted embeddings themselves, too.
    weights = model.state_dict() | adapter
    foreign = sorted(name for name, x in found.items() if name not in weights or weights[name].shape != x.shape)
    lacking = sorted(set(adapter) - set(found))
    if lacking or foreign:
        hint = (
            "Check base_model_name_or_path there, and that its files are complete."
            if settings is None
            else f"Use the model.lora settings it was trained with (see {CONFIG_FILE} there)."
        )
        whose = "its model" if settings is None else "model.lora and the model"
        raise ModelError(
            f"The adapter in {folder} does not fit {whose}; names or shapes differ: "
            f"{_counted(lacking, 'missing')}, {_counted(foreign, 'unknown or of another shape')}. {hint}"
        )
    peft.set_peft_model_state_dict(model, found)
    # Loaders skip tensors silently. NaN equals NaN here.
    weights = model.state_dict() | _adapter_state(model, peft)
    exact: dict[str, Any] = {"rtol": 0.0, "atol": 0.0, "equal_nan": True}
    lost = sorted(name for name, x in found.items() if not torch.allclose(weights[name], x.to(weights[name]), **exact))
    if lost:
        raise ModelError(
            f"{_counted(lost, 'of the adapter')} in {folder} did not arrive in the model. Update peft and "
            "transformers, or merge the adapter into its model with peft and use the merged model."
        )


def _adapter_state(model: Any, peft: Any) -> dict[str, Tensor]:
    """The adapter's weights by the names in its file; without embeddings, for which peft would access the network."""
    return peft.get_peft_model_state_dict(model, save_embedding_layers=False)


def _counted(names: list[str], label: str) -> str:
    return f"{len(names)} tensors {label}" + (f" (the first is {names[0]})" if names else "")


def _unreadable(path: Path, error: Exception) -> ModelError:
    return ModelError(
        f"{path} cannot be read: {error}. An adapter needs its weights as safetensors; copy the file again from where "
        "it comes from."
    )


def _lora_config(folder: str | Path, peft: Any) -> Any:
    """The adapter's configuration in ``folder``, as peft's own object; raises for options that are not exact."""
    written = _adapter_config(folder)
    kind = str(written.get("peft_type"))
    if kind != "LORA":
        raise ModelError(f"The adapter in {folder} is of type {kind}; only LORA is supported. {_MERGE}")
    known = {field.name for field in fields(peft.LoraConfig)}
    # peft ignores fields of newer releases.
    for name in sorted(name for name, value in written.items() if name not in known and value):
        raise ModelError(
            f"The adapter in {folder} has {name}={written[name]!r}, which the installed peft {peft.__version__} does "
            f"not know. Update peft. {_MERGE}"
        )
    # A change of the base weights must be repeated when the adapter is loaded.
    how, allowed = written.get("init_lora_weights", True), (*_PLAIN_INITIALIZATIONS, *_REPLAYED_INITIALIZATIONS)
    if how not in allowed:
        raise ModelError(
            f"The adapter in {folder} has init_lora_weights={how!r}, which changed the weights of its model in a "
            f"way its folder does not hold. Supported are {', '.join(map(str, allowed))}. Convert it to plain LoRA "
            "with peft (path_initial_model_for_weight_conversion), or use the merged model."
        )
    try:
        config = peft.LoraConfig.from_pretrained(str(folder))
    except Exception as error:  # odd types in the file raise anything
        raise ModelError(
            f"The adapter in {folder} could not be loaded: {error} It needs {CONFIG_FILE} as peft writes it."
        ) from error
    _check_fields(config, f"The adapter in {folder}")
    return config


def _check_fields(config: Any, whose: str) -> None:
    for name, value in _unusual_fields(config).items():
        if name not in EXACT_FIELDS:
            raise ModelError(f"{whose} has {name}={value!r}, which is not supported. {_MERGE}")


def _unusual_fields(config: Any) -> dict[str, Any]:
    """Fields that differ from their defaults."""
    default = type(config)()
    values = {field.name: (getattr(config, field.name), getattr(default, field.name)) for field in fields(config)}
    return {name: value for name, (value, usual) in values.items() if value != usual and (value or usual)}


def _check_plain(folder: str | Path, config: Any, settings: LoraSettings) -> None:
    """Raise unless the configuration is plain LoRA with the settings' alpha, which tensors' shapes do not show."""
    odd = {name: value for name, value in _unusual_fields(config).items() if name not in _PLAIN_FIELDS}
    if config.init_lora_weights not in _PLAIN_INITIALIZATIONS:
        odd["init_lora_weights"] = config.init_lora_weights
    if config.lora_alpha != settings.alpha or odd:
        having = [f"{name}={value!r}" for name, value in ({"lora_alpha": config.lora_alpha} | odd).items()]
        raise ModelError(
            f"The adapter in {folder} has {', '.join(having)}; model.lora describes plain LoRA with "
            f"alpha={settings.alpha}. Set model.lora.alpha to the adapter's; one with other options can only be merged "
            "into its model (vlm-pg export), on which a new one trains."
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
