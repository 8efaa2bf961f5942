"""What a protocol is: everything that decides a published figure but the model itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from vlm_pg.eval.protocols.template import Template, parse
from vlm_pg.media.settings import MediaSettings
from vlm_pg.prompts.settings import PromptSettings
from vlm_pg.settings import Settings
from vlm_pg.types import CONTROL_TOKEN, Sample

OptionStyle = Literal["A. text", "(A) text", "A: text"]
SubtitleRule = Literal["none", "at_frames", "lmms", "kit", "qwen3_vl", "interleaved"]
# The media settings that change what a model sees; the others are the machine's.
MEDIA_KEYS = (
    "frames",
    "fps",
    "min_frames",
    "max_frames",
    "num_frames",
    "last_frame",
    "video_tokens",
    "min_pixels",
    "max_pixels",
    "image_min_pixels",
    "image_max_pixels",
)
BY_KIND = "answer_kind"
ANY = "*"


class ProtocolSampling(Settings):
    """How the answers of a protocol are sampled."""

    temperature: float = Field(0.0, ge=0.0, le=100.0, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Keep the smallest set of tokens with this probability.")
    top_k: int = Field(0, ge=0, description="Keep the k most probable tokens; 0 keeps all.")
    presence_penalty: float = Field(
        0.0, ge=-2.0, le=2.0, description="Taken, once, from the logit of every token that the answer has already."
    )
    num_generations: int = Field(1, ge=1, le=1024, description="Answers per question.")
    seed: int | None = Field(None, ge=0, lt=2**63, description="The published seed; null: none is published.")

    @model_validator(mode="after")
    def _greedy_answers_are_alike(self) -> Self:
        if self.temperature == 0.0 and self.num_generations > 1:
            raise ValueError(
                f"temperature is 0 and num_generations is {self.num_generations}: greedy answers are all alike. Set "
                "num_generations to 1, or a temperature above 0."
            )
        return self


class Protocol(Settings):
    """One way to ask, sample, read and average an evaluation set, as somebody published it.

    ``templates`` are chosen by what ``template_by`` names of a question: its values, joined with "/", or "*" in place
    of any of them; the first that fits, in the order written. See ``template.py`` for what stands in one.
    """

    name: str = Field(description="SET/VARIANT of a bundled one; a file's own name otherwise.")
    source: str = Field(min_length=1, description="Who published it and where, in one line.")
    differs: str = Field("", description="What of the published way cannot be done here, or is not published.")
    pipeline: str = Field("", description="The name that 'vlm-pg prepare' knows the set by.")
    system: str = Field("", description="System message, as it is; empty: none.")
    template_by: tuple[str, ...] = Field((BY_KIND,), min_length=1, description="Keys of details, or answer_kind.")
    templates: dict[str, str] = Field(min_length=1, description="The words of the user's turn, by question type.")
    without: tuple[str, ...] = Field((), description="Texts left out of {question}, as '<image 1>'; ends are trimmed.")
    option_style: OptionStyle = Field("A. text", description="How options are lettered in {options}.")
    subtitles: SubtitleRule = Field(
        "none",
        description="Which subtitles {subtitles} holds, or "
        "interleaved: frames as images, and texts between them, before the words; see wording.py.",
    )
    clips: bool = Field(True, description="Show the clip that a record names of a video; false: the whole video.")
    answer_prefix: str = Field("", description="Written for the model at the beginning of its answer.")
    read_prefix: str = Field("", description="The end of answer_prefix that is read as part of the answer.")
    media: dict[str, Any] = Field(default_factory=dict, description="Media settings that differ from the defaults.")
    max_prompt_tokens: int = Field(16_384, ge=1, description="Longest prompt, visual tokens included.")
    max_new_tokens: int = Field(ge=1, description="Longest answer.")
    sampling: ProtocolSampling = Field(default_factory=ProtocolSampling)
    reader: str = Field(
        "ours",
        min_length=1,
        description="ours, the name of a published rule of reading, or a function of one's own by path (eval/own.py).",
    )
    aggregation: str = Field("mean", min_length=1, description="How the set's figures are made, by name or by path.")
    categories: tuple[str, ...] = Field((), description="Keys of details that figures are also given by, in groups.")

    @field_validator("system", "templates", "answer_prefix")
    @classmethod
    def _no_control_tokens(cls, value: Any) -> Any:
        for text in value.values() if isinstance(value, dict) else (value,):
            if found := CONTROL_TOKEN.search(text):
                raise ValueError(
                    f"contains the control token '{found[0]}'. Plain text is allowed; the chat template adds the "
                    "control tokens. Remove it."
                )
        return value

    @field_validator("media")
    @classmethod
    def _media_are_what_is_seen(cls, value: dict[str, Any]) -> dict[str, Any]:
        others = [key for key in value if key not in MEDIA_KEYS]
        if others:
            raise ValueError(
                f"media has {', '.join(others)}. A protocol may set {', '.join(MEDIA_KEYS)}. Leave the others to the "
                "configuration's section media."
            )
        MediaSettings(**value)
        return value

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        for key, text in self.templates.items():
            parts = key.split("/")
            if key != ANY and len(parts) != len(self.template_by):
                raise ValueError(
                    f"templates has '{key}', and template_by is {', '.join(self.template_by)}. A value for each, "
                    "joined with '/', is expected, '*' for any. Correct the key or template_by."
                )
            parse(text)
        if not self.answer_prefix.endswith(self.read_prefix):
            raise ValueError(
                f"read_prefix is {self.read_prefix!r}, which is no end of answer_prefix {self.answer_prefix!r}. Give "
                "the end of it that is read as part of the answer, or leave read_prefix out."
            )
        uses = any("subtitles" in template.places for template in self.parsed.values())
        if uses != (self.subtitles not in ("none", "interleaved")):
            raise ValueError(
                f"subtitles is {self.subtitles} and {'a' if uses else 'no'} template has {{subtitles}}. Name a rule "
                "with it, none or interleaved without. Change either."
            )
        return self

    @cached_property
    def parsed(self) -> Mapping[str, Template]:
        """The templates, parsed."""
        return {key: parse(text) for key, text in self.templates.items()}

    def question_type(self, sample: Sample) -> tuple[str, ...]:
        """What templates are chosen by, of one question: its values of ``template_by``."""
        values = [sample.answer_kind if key == BY_KIND else sample.details.get(key) for key in self.template_by]
        return tuple(detail_text(value) for value in values)

    def template_for(self, sample: Sample) -> Template | None:
        """The first template that fits the question; None: the protocol does not ask it (``asks``)."""
        values = self.question_type(sample)
        for key, template in self.parsed.items():
            wanted = key.split("/")
            if key == ANY or all(want in (ANY, value) for want, value in zip(wanted, values, strict=True)):
                return template
        return None

    def asks(self, sample: Sample) -> bool:
        """Whether the question belongs to what the protocol reports; one without a template does not."""
        return self.template_for(sample) is not None

    def as_asked(self, sample: Sample) -> Sample:
        """The question with the media that are shown: with ``clips`` false, whole videos in place of their clips."""
        if self.clips or all(ref.start is None and ref.end is None for ref in sample.media):
            return sample
        return replace(sample, media=tuple(replace(ref, start=None, end=None) for ref in sample.media))

    def media_settings(self, base: MediaSettings) -> MediaSettings:
        """``base`` with what the protocol sets; frames and sizes that it does not are those of the defaults.

        Raises:
            ValueError: they do not go together with the limits of ``base``.
        """
        seen = {key: MediaSettings.model_fields[key].get_default() for key in MEDIA_KEYS}
        return MediaSettings.model_validate({**base.model_dump(), **seen, **self.media})

    def prompt_settings(self, base: PromptSettings) -> PromptSettings:
        """``base`` with the protocol's length limit, and reading subtitles if the protocol shows any."""
        changes = {"max_prompt_tokens": self.max_prompt_tokens, "subtitles": self.subtitles != "none"}
        return base.model_copy(update=changes)

    def rollout_changes(self) -> dict[str, Any]:
        """What the protocol sets of section ``rollout``; everything else that changes what is drawn is switched off."""
        sampling = self.sampling
        return {
            "num_generations": sampling.num_generations,
            "max_new_tokens": self.max_new_tokens,
            "min_new_tokens": 0,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": sampling.presence_penalty,
            "stop_token_ids": (),
            "stop_strings": (),
        }

    def as_read(self, output: str) -> str:
        """What readers are given of an output: what was written for the model and is part of its answer, then that."""
        return self.read_prefix + output

    def not_applied(self) -> list[str]:
        """Lines about what is published and not done here, to be shown with the figures."""
        return [self.differs] if self.differs else []


def detail_text(value: Any) -> str:
    """A value of details as written in prompts: "" for null, 1 for 1.0, true and lists as JSON has them."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value, ensure_ascii=False)
