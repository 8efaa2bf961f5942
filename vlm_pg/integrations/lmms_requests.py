"""Requests of lmms-eval in our terms: chat messages with media by reference, generation arguments, ``--model_args``."""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from pydantic import Field, ValidationError

from vlm_pg.config_files import describe
from vlm_pg.errors import ConfigError, VlmPgError
from vlm_pg.media.settings import MediaSettings
from vlm_pg.models.settings import ModelSettings
from vlm_pg.prompts.settings import PromptSettings
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.settings import Settings
from vlm_pg.types import MediaRef


@dataclass(frozen=True)
class Conversation:
    """``messages``: as chat templates take them; ``media``: of their parts that are no texts, in order."""

    messages: tuple[dict[str, Any], ...]
    media: tuple[MediaRef, ...]


def conversation_of(messages: Sequence[Mapping[str, Any]], pictures: Path, name: str) -> Conversation:
    """Read a task's messages: {"role": ..., "content": [{"type": "image", "url": PIL image or path}, ...]}.

    Args:
        pictures: a folder for pictures that come in memory; equal ones get one file.
        name: of the question, for messages.

    Raises:
        VlmPgError: a part that is no text, image or video file.
    """
    media: list[MediaRef] = []
    result = []
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        kept: list[dict[str, Any]] = []
        for part in parts:
            if part["type"] == "text":
                kept.append({"type": "text", "text": part["text"]})
            else:
                media.append(_medium(part, pictures, name))
                kept.append({"type": part["type"]})
        result.append({"role": message["role"], "content": kept})
    return Conversation(tuple(result), tuple(media))


def _medium(part: Mapping[str, Any], pictures: Path, name: str) -> MediaRef:
    kind, value = part["type"], part.get("url")
    if kind == "image" and isinstance(value, Image.Image):
        return MediaRef("image", _saved(value, pictures))
    start, end = part.get("start_time"), part.get("end_time")
    if kind == "video" and isinstance(value, Mapping):
        start, end = value.get("video_start", start), value.get("video_end", end)
        value = value.get("url") or value.get("path")
    if isinstance(value, str) and kind == "image":
        return MediaRef("image", _absolute(value))
    if isinstance(value, str) and kind == "video":
        return MediaRef("video", _absolute(value), start, end)
    raise VlmPgError(
        f"{name} shows a part of type {kind!r} that is a {type(value).__name__}. Images (in memory or as files) and "
        "videos (as files) can be shown. Choose a task with those."
    )


def _absolute(path: str) -> str:
    """Of a file; URLs stay, and are refused where media are read."""
    return path if "://" in path else str(Path(path).absolute())


def _saved(picture: Image.Image, folder: Path) -> str:
    """The picture's pixels as a file. What else it carries (a turn to be made) is not applied by lmms-eval either."""
    has_alpha = "A" in picture.getbands() or "transparency" in picture.info
    plain = picture.convert("RGBA" if has_alpha else "RGB")
    plain.info = {}
    target = io.BytesIO()
    plain.save(target, "PNG", compress_level=1)
    data = target.getvalue()
    path = folder / f"{hashlib.sha256(data).hexdigest()}.png"
    if not path.exists():
        path.write_bytes(data)
    return str(path)


# lmms-eval's default where a task names no strings. Its own classes of Qwen's models do not stop there either, because
# they write paragraphs (models/simple/qwen2_5_vl.py).
PARAGRAPH = "\n\n"
_KNOWN = ("max_new_tokens", "max_gen_toks", "temperature", "do_sample", "top_p", "top_k", "num_beams", "until")


@dataclass(frozen=True)
class Generation:
    """Of one request. ``max_new_tokens`` None: as the settings say. ``until``: strings that end an answer and are no
    part of it. Requests with equal ones are answered together."""

    max_new_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    until: tuple[str, ...]

    def settings(self, base: RolloutSettings, samples: int) -> RolloutSettings:
        """``base`` with the task's values, ``samples`` answers a question.

        Raises:
            ConfigError: the values go beyond what is possible.
        """
        changes = {
            "num_generations": samples,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop_strings": self.until,
            "max_new_tokens": self.max_new_tokens or base.max_new_tokens,
        }
        try:
            return RolloutSettings.model_validate({**base.model_dump(), **changes})
        except ValueError as error:
            raise ConfigError(f"The task's generation_kwargs cannot be used: {error}") from None

    def without_stop(self, text: str) -> str:
        """``text`` up to the first of the strings that end it."""
        ends = [start for stop in self.until if (start := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text


def generation_of(arguments: Mapping[str, Any], name: str) -> Generation:
    """Read a task's ``generation_kwargs``.

    Args:
        name: of the question, for messages.

    Raises:
        ConfigError: beam search, or a value of a wrong kind.
    """
    for key in sorted(set(arguments) - set(_KNOWN)):
        warnings.warn(f"generation_kwargs.{key}={arguments[key]} is not used by the model vlm_pg", stacklevel=2)
    beams = arguments.get("num_beams")
    if beams not in (None, 1):
        raise ConfigError(
            f"{name}: generation_kwargs.num_beams is {beams}, and answers are sampled or greedy here. Set num_beams=1 "
            "(--gen_kwargs num_beams=1)."
        )
    temperature = arguments.get("temperature")
    if temperature is None:
        temperature = 1.0 if arguments.get("do_sample") else 0.0
    if arguments.get("do_sample") is False:
        temperature = 0.0  # tasks leave a temperature beside it, which transformers passes over too
    until = arguments.get("until") or ()
    until = [until] if isinstance(until, str) else until
    length = arguments.get("max_new_tokens", arguments.get("max_gen_toks"))
    is_sampled = temperature > 0
    return Generation(
        max_new_tokens=None if length is None else int(length),
        temperature=float(temperature),
        top_p=float(arguments.get("top_p") or 1.0) if is_sampled else 1.0,
        top_k=int(arguments.get("top_k") or 0) if is_sampled else 0,
        until=tuple(str(stop) for stop in until if stop and stop != PARAGRAPH),
    )


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
