"""Loading a folder or hub name: as a ``Policy``, or without weights for what prompts need of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open

from vlm_pg.attention.registration import ATTENTION_NAME
from vlm_pg.errors import ModelError
from vlm_pg.models.checks import PromptInterface
from vlm_pg.models.family import Family
from vlm_pg.models.liger import apply_liger
from vlm_pg.models.lora import (
    adapter_base,
    adapts_tower,
    add_lora,
    base_model,
    check_adapter,
    has_adapter,
    load_adapter,
)
from vlm_pg.models.policy import Policy
from vlm_pg.models.registry import family_of
from vlm_pg.models.settings import ModelSettings, PositionRule
from vlm_pg.models.tower import attend_to_all_frames
from vlm_pg.models.weights import is_quantized, not_finite, quantize_linears

_LISTED = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load_policy(
    path: str | Path,
    dtype: str | torch.dtype | None = None,
    device: torch.device | str | None = None,
    settings: ModelSettings | None = None,
    weights_version: int = 0,
    reading: AbstractContextManager[None] | None = None,
    vision_alone: bool = False,
) -> Policy:
    """Load a checkpoint of a registered family (Qwen-VL, or a Qwen language model) as a policy.

    Args:
        path: local folder or hub name; also the folder of an adapter, which names the model it belongs to.
        dtype: "fp32", "bf16" or a torch dtype; default: the settings'.
        device: default: CUDA if there is one, else CPU.
        settings: everything else about the model; ``path`` and ``dtype`` given here win.
        weights_version: how many optimizer steps the weights have had.
        reading: around transformers' reading of the weights, for engines that divide them over ranks meanwhile.
        vision_alone: without the language model, an adapter of which is left out too; the policy can make prompts and
            visual features of them, and nothing else. An adapter that reaches into the tower is of the whole model,
            which is loaded then.

    Raises:
        ModelError: nothing there, unreadable, or of a kind that is not supported.
    """
    settings = settings or ModelSettings(path=str(path))
    dtype = dtype or settings.dtype
    if not isinstance(dtype, torch.dtype) and dtype not in DTYPES:
        raise ModelError(f"dtype is {dtype!r}; allowed are {', '.join(DTYPES)}, or a torch dtype.")
    torch_dtype = dtype if isinstance(dtype, torch.dtype) else DTYPES[dtype]
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    adapter, path = str(path), adapter_base(path) or path
    config = load_config(str(path), settings)
    family = family_of(config)
    vision_alone = vision_alone and (adapter == str(path) or not adapts_tower(adapter, family))
    if vision_alone:
        settings = settings.model_copy(update={"lora": None})
    import transformers

    alone = {"config": _without_language(config), "ignore_mismatched_sizes": True} if vision_alone else {}
    named, of_tower = family.model_class, _vision_attention(device, torch_dtype)
    try:
        model_class = getattr(transformers, named) if isinstance(named, str) else named
        quantizes = settings.lora is not None and settings.lora.quantize
        around = nullcontext() if reading is None or family.read_whole or quantizes else reading
        with _without_report() if vision_alone else around:
            model, found = model_class.from_pretrained(
                str(path),
                dtype=torch_dtype,
                attn_implementation=family.attention_setting(ATTENTION_NAME, of_tower),
                use_safetensors=True,
                trust_remote_code=settings.trust_remote_code,
                output_loading_info=True,
                **alone,
            )
        # It is saved under the names it was read from: transformers stores the conversions of names that were of use,
        # but under ZeRO-3 all that there are.
        if getattr(model, "_weight_conversions", None):
            model._weight_conversions = [used for used in model._weight_conversions if used.was_used()]
        processor = read_processor(str(path), family, settings)
    except Exception as error:  # tokenizers raise nothing more exact, configurations of odd types anything
        raise ModelError(
            f"The model at {str(path)!r} has a config but could not be loaded: {error} A checkpoint needs its weights "
            "as safetensors and its processor files beside config.json."
        ) from error
    # transformers fills them with random numbers.
    lacking = sorted(map(str, found.get("missing_keys") or ()))
    if vision_alone:
        mismatched = [name for name, *_ in found.get("mismatched_keys") or ()]
        lacking = sorted(name for name in lacking + mismatched if family.part_of(name) != "language")
    if lacking:
        listed = ", ".join(lacking[:_LISTED]) + (", ..." if len(lacking) > _LISTED else "")
        raise ModelError(
            f"The model at {str(path)!r} lacks {len(lacking)} of its weights ({listed}), which would be random "
            "numbers. A checkpoint needs all of them; copy the missing safetensors files from where it comes from."
        )
    read = ((name, p) for name, p in model.named_parameters() if not vision_alone or family.part_of(name) != "language")
    _check_finite(path, read)
    check_tokenizer(str(path), config, processor, family)
    if settings.lora is not None and settings.lora.quantize:
        # One layer after the other: the device never holds the model as it was read.
        quantize_linears(model, family.quantizable_layers(model), device)
    model = model.to(device)
    if adapter != str(path) and not vision_alone:
        load_adapter(model, adapter, settings.lora)
        _check_finite(adapter, model.named_parameters())
    return make_policy(model, processor, settings, weights_version)


def check_sequence_size(settings: ModelSettings, size: int) -> None:
    """Raise ModelError if the model's heads cannot be divided over ``size`` sequence ranks; reads its config alone."""
    if size == 1:
        return
    path = adapter_base(settings.path) or settings.path
    config = load_config(str(path), settings)
    family = family_of(config)
    allowed = family.sequence_sizes(config)
    if size not in allowed:
        heads, key_value_heads, _ = family.head_shape(config)
        raise ModelError(
            f"training.sequence_parallel is {size}, but {settings.path} has {heads} query heads and {key_value_heads} "
            f"key-value heads, which can be divided over {', '.join(map(str, allowed))} processes. Set it to one of "
            "these."
        )


def make_policy(model: Any, processor: Any, settings: ModelSettings | None = None, weights_version: int = 0) -> Policy:
    """A policy around a transformers model that is already in memory; sets its attention, freezes what is frozen.

    ``policy.family.notes`` has notes for the user, such as on the router's balancing loss.
    """
    settings = settings or ModelSettings(path=getattr(model, "name_or_path", "") or "in memory")
    model = base_model(model)
    family = family_of(model.config)
    if not set(settings.train) <= set(family.parts):
        raise ModelError(
            f"model.train is [{', '.join(settings.train)}], but {settings.path} ({family.model_type}) has no vision "
            f"tower. Set model.train=[{', '.join(family.parts)}], or use a Qwen-VL checkpoint."
        )
    if family.moe:
        # Only the balancing loss reads the router's logits, and it depends on how often a prefix is repeated.
        model.config.get_text_config().output_router_logits = False
    model.set_attn_implementation(family.attention_setting(ATTENTION_NAME))
    attend_to_all_frames(model, family)
    apply_liger(model, settings.liger)
    if settings.gradient_checkpointing:
        # Nothing random happens in a layer (dropout is 0). The method's name depends on transformers' release.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False, "preserve_rng_state": False})
    if settings.lora is not None and settings.lora.quantize:
        if not has_adapter(model):
            quantize_linears(model, family.quantizable_layers(model), next(model.parameters()).device)
        elif not any(map(is_quantized, model.parameters())):
            raise ModelError(
                "model.lora.quantize is set, but the model has an adapter already, around whole weights. Pass the "
                "model without its adapter, or leave quantize out."
            )
    if settings.lora is not None and not has_adapter(model):
        add_lora(model, settings.lora)
    if has_adapter(model):
        # The adapter decides which weights train.
        check_adapter(model, settings.train)
    else:
        for name, parameter in model.named_parameters():
            part = family.part_of(name)
            # Single weights of the language model that are frozen already stay so.
            if part != "language" or part not in settings.train:
                parameter.requires_grad_(part in settings.train)
    if (tower := family.vision_tower(model)) is not None:
        detach_frozen_blocks(tower)
    # No module of these families behaves differently in training mode once dropout is 0, except checkpointing.
    model.train()
    return Policy(model, processor, family, settings, weights_version)


def _without_language(config: Any) -> Any:
    """A copy of ``config`` without decoder layers, whose vocabulary is one token; everything around the tower, by
    which its weights are found and prompts are made, is as it was."""
    config = deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers, text.vocab_size = 0, 1
    text.pad_token_id = None  # it would have to be in the vocabulary
    if getattr(text, "layer_types", None):
        text.layer_types = []
    return config


@contextmanager
def _without_report() -> Iterator[None]:
    """Inside, transformers does not list the language model's weights as left out."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _check_finite(path: str | Path, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    found = not_finite(weights)
    if found:
        raise ModelError(
            f"The model at {str(path)!r} has NaN or infinities in {len(found)} of its weights (the first is "
            f"{_where_not_finite(Path(path)) or found[0]}), with which nothing can be computed. Copy its safetensors "
            "files again from where they come from, or choose another checkpoint."
        )


def _where_not_finite(folder: Path) -> str:
    """The first such tensor in the folder's files; "" for a hub name."""
    for path in sorted(folder.expanduser().glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # no mapping
                if not torch.isfinite(file.get_tensor(name).float()).all():
                    return f"{name} in {path.name}"
    return ""


def read_processor(path: str, family: Family, settings: ModelSettings) -> Any:
    """A checkpoint's processor, or tokenizer of a text model; raises any error of transformers."""
    import transformers

    # A folder may still have the processor of the larger model that a language model was cut from.
    kind = transformers.AutoProcessor if family.reads_media else transformers.AutoTokenizer
    return kind.from_pretrained(path, trust_remote_code=settings.trust_remote_code)


def check_tokenizer(path: str, config: Any, processor: Any, family: Family) -> None:
    """A processor with another model's tokenizer, or none, would fail much later and far from its cause."""
    vocabulary = getattr(processor, "tokenizer", processor).get_vocab()
    for token, field, kind in family.media_tokens:
        if family.reads_media and kind and field and vocabulary.get(token) != getattr(config, field):
            raise ModelError(
                f"The tokenizer at {path!r} has id {vocabulary.get(token)} for {token}, the model expects "
                f"{getattr(config, field)}. Its tokenizer files are missing or another model's; copy them "
                "from the checkpoint the model comes from."
            )
    largest, rows = max(vocabulary.values(), default=-1), config.get_text_config().vocab_size
    if not 0 <= largest < rows:
        raise ModelError(
            f"The tokenizer at {path!r} has token ids up to {largest}, the model has embeddings for ids 0 to "
            f"{rows - 1}. Its tokenizer files are missing or another model's; copy them from the checkpoint the model "
            "comes from. If tokens were added, resize the model's embeddings (resize_token_embeddings) and save it."
        )


def detach_frozen_blocks(tower: Any) -> None:
    """Remove transformers' and peft's hooks by which a checkpointed tower's first output requires a gradient.

    Reentrant checkpointing needs that; here backward would go through all frozen blocks for nothing, and each would
    keep its input.
    """
    for module in tower.modules():
        for key, hook in list(module._forward_hooks.items()):
            if getattr(hook, "__name__", "").startswith("make_inputs_require_grad"):
                del module._forward_hooks[key]


def load_config(path: str, settings: ModelSettings) -> Any:
    """A model's transformers config; ModelError where there is none that could be read."""
    from transformers import AutoConfig

    looks_local = path.startswith((".", "/", "~")) or Path(path).exists() or path.count("/") > 1
    if looks_local and not Path(path).expanduser().is_dir():
        raise ModelError(
            f"model.path is {path!r}, which is not a folder. Give a folder with config.json and safetensors weights, "
            "or a hub name such as Qwen/Qwen2.5-VL-7B-Instruct."
        )
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=settings.trust_remote_code)
    except Exception as error:  # of odd types in the file, anything
        raise ModelError(
            f"No model configuration could be read from {path!r}: {error} Give a folder with config.json and "
            "safetensors weights, or a hub name that this machine can reach."
        ) from error


def _vision_attention(device: torch.device, dtype: torch.dtype) -> str:
    """flash-attn's variable-length kernel where it is installed and can run, else torch's own (``make_policy`` then has
    the tower attend to all frames at once by torch's flash attention)."""
    from transformers.utils.import_utils import is_flash_attn_2_available

    runs = device.type == "cuda" and dtype != torch.float32 and torch.cuda.get_device_capability(device) >= (8, 0)
    return "flash_attention_2" if runs and is_flash_attn_2_available() else "sdpa"


class WeightlessPolicy(PromptInterface):
    """Processor, positions, sizes and limits of a checkpoint (or of an adapter's base), as its ``Policy`` has them.

    Args:
        settings: which model, and how its positions are counted.

    Raises:
        ModelError: nothing there, unreadable, or of a kind that is not supported.
    """

    def __init__(self, settings: ModelSettings):
        self.settings = settings
        self.path = str(adapter_base(settings.path) or settings.path)
        self.config = load_config(self.path, settings)
        self.family = family_of(self.config)
        try:
            self.processor = read_processor(self.path, self.family, settings)
        except Exception as error:  # tokenizers raise nothing more exact
            raise ModelError(
                f"The model at {self.path!r} has a config, but its processor could not be loaded: {error} A checkpoint "
                "needs its processor files beside config.json."
            ) from error
        check_tokenizer(self.path, self.config, self.processor, self.family)

    def positions(self, *given: Any, rule: PositionRule | None = None) -> torch.Tensor:
        """See ``Family.positions``; by ``settings.positions``, or by another rule."""
        rule = rule or self.settings.positions
        needs_model = rule == "transformers" and self.family.reads_media
        return self.family.positions(rule, self._meta_model if needs_model else self.model, *given)

    @cached_property
    def model(self) -> SimpleNamespace:
        """Stands for transformers' model: ``config``, ``generation_config``, ``name_or_path``."""
        from transformers import GenerationConfig

        try:
            generation = GenerationConfig.from_pretrained(self.path)
        except OSError:  # no such file: transformers derives it from the model's config, too
            generation = GenerationConfig.from_model_config(self.config)
        return SimpleNamespace(config=self.config, generation_config=generation, name_or_path=self.path)

    @cached_property
    def _meta_model(self) -> Any:
        """The transformers model on the meta device, whose class counts positions by transformers' rule."""
        import transformers

        named = self.family.model_class
        model_class: Any = getattr(transformers, named) if isinstance(named, str) else named
        with torch.device("meta"):
            return model_class._from_config(self.config)
