"""What of TRL's GRPOTrainer cannot be computed over shared prefixes, said when the trainer is built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vlm_pg.errors import ConfigError, ModelError
from vlm_pg.integrations.scoring import check_model
from vlm_pg.models.registry import FAMILIES

WAY_OUT = "Leave it out, or use TRL's GRPOTrainer."


def check_trainer(args: Any, model: Any) -> None:
    """Refuse settings and models that would be trained on in another way than TRL trains on them.

    Args:
        args: TRL's GRPOConfig.
        model: the trainer's model, not wrapped.

    Raises:
        ConfigError: settings; all of them are named.
        ModelError: another family, dropout.
    """
    refused = list(_refused_settings(args, model))
    if refused:
        raise ConfigError(f"GroupedGRPOTrainer cannot take {'; nor '.join(refused)}. {WAY_OUT}")
    try:
        check_model(model)
    except ModelError as error:
        dropout = getattr(model.config.get_text_config(), "attention_dropout", 0.0)
        if not (dropout and args.disable_dropout):
            raise
        raise ModelError(
            f"{error} disable_dropout=True reaches the dropout modules of a model only; Qwen-VL's attention drops by "
            "the number in its config."
        ) from error


def _refused_settings(args: Any, model: Any) -> Iterator[str]:
    """Each with the reason and what would be allowed."""
    # transformers' new name for it and, under releases that have it not, the old one.
    options = getattr(args, "activation_checkpointing_kwargs", None) or args.gradient_checkpointing_kwargs or {}
    if args.gradient_checkpointing and options and options.get("use_reentrant") is not False:
        yield (
            "gradient_checkpointing_kwargs without use_reentrant=False (torch then recomputes a layer apart from the "
            "rest, which loses the gradient that goes through the shared prefix; add it, or give no such arguments)"
        )
    if args.neftune_noise_alpha is not None:
        yield "neftune_noise_alpha (each copy of a prompt would get noise of its own, and there is one copy)"
    if args.fsdp:
        yield (
            "fsdp (parts of a layer are called, whose weights FSDP does not gather then; "
            "DistributedDataParallel is right)"
        )
    if args.deepspeed_plugin is not None and args.deepspeed_plugin.zero_stage == 3:
        yield (
            "deepspeed with ZeRO-3 (ranks gather weights together, and do not encode equally many pictures; ZeRO-2 is "
            "right)"
        )
    if getattr(args, "parallelism_config", None) is not None:
        yield "parallelism_config (layers split over devices are not tested)"
    if args.torch_compile:
        yield "torch_compile (the layers are called one by one, outside the compiled forward)"
    if args.use_liger_kernel:
        yield "use_liger_kernel (not compared with TRL's)"
    for name in ("fp16", "fp16_full_eval"):
        if getattr(args, name):
            yield f"{name} (not compared with TRL's; bf16 is)"
    suppressed = (args.generation_kwargs or {}).get("suppress_tokens", ())
    family = FAMILIES.get(model.config.model_type)
    image_token = family and family.image_token_id(model.config)
    takes_place = image_token is not None and "suppress_tokens" in (args.generation_kwargs or {})
    if takes_place and image_token not in (suppressed or ()):
        yield (
            "generation_kwargs with suppress_tokens without the image token (it takes the place of TRL's own list, "
            f"and a sampled image token ends the run; add {image_token})"
        )
