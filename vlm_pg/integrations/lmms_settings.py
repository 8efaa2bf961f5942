"""The sections of our configuration that lmms-eval's ``--model_args`` may name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError

from vlm_pg.config_files import describe
from vlm_pg.errors import ConfigError
from vlm_pg.media.settings import MediaSettings
from vlm_pg.models.settings import ModelSettings
from vlm_pg.prompts.settings import PromptSettings
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.settings import Settings

# What the task, the arguments of the model's class or the processes of a training run decide about.
_NOT_HERE = {
    "model.path": "Give pretrained=CHECKPOINT.",
    "prompt.system": "Give system_prompt=TEXT.",
    **{
        f"rollout.{key}": "The task's generation_kwargs, or --gen_kwargs, say that."
        for key in ("num_generations", "temperature", "top_p", "top_k", "stop_strings")
    },
    "rollout.engine": "Generation is in this process here; lmms-eval has models of its own for servers.",
}


class ModelArguments(Settings):
    """What is chosen with ``--model_args`` beside the arguments of the class itself."""

    model: ModelSettings
    media: MediaSettings = Field(default_factory=MediaSettings)
    prompt: PromptSettings = Field(default_factory=PromptSettings)
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)


def model_arguments(pretrained: str, settings: Mapping[str, Any]) -> ModelArguments:
    """The settings by their dotted names ("media.num_frames").

    Raises:
        ConfigError: one is unknown, impossible, or decided elsewhere.
    """
    nested: dict[str, dict[str, Any]] = {"model": {"path": pretrained}}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        if key in _NOT_HERE:
            raise ConfigError(f"--model_args has {key}={value}, which is not taken here. {_NOT_HERE[key]}")
        if section not in ModelArguments.model_fields or not name or "." in name:
            raise ConfigError(
                f"--model_args has {key}={value}. pretrained, device, system_prompt, seed, and settings such as "
                f"media.num_frames of the sections {', '.join(ModelArguments.model_fields)} are taken. Correct it."
            )
        nested.setdefault(section, {})[name] = value
    try:
        return ModelArguments.model_validate(nested)
    except ValidationError as error:
        raise ConfigError("; ".join(describe(error, ModelArguments, {}, "--model_args"))) from None
