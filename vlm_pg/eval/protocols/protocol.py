"""A protocol: everything that determines a published figure except the model.

Templates word the user's turn, with placeholders:

{question}          the question, {options} one option a line, {subtitles} those at the frames that are shown
{details.KEY}       what the set publishes of the question under KEY
[[ ... ]]           left out where a placeholder inside it is empty, or details lack its KEY
{{ and }}           a brace

A bundled file has ``common``, what its variants share, and ``variants``. ``base`` of a variant, or of a file of one's
own, names one or several that it begins with. ``media`` and ``sampling`` are laid over each other key by key,
``differs_also`` is put behind what ``differs`` of the bases says; all else replaces what was there.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from string import Formatter
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from vlm_pg.config_files import describe, read_tree
from vlm_pg.errors import ConfigError, printable
from vlm_pg.media.settings import MediaSettings
from vlm_pg.prompts.settings import PromptSettings, refuse_control_tokens
from vlm_pg.settings import Settings
from vlm_pg.types import Sample

OptionStyle = Literal["A. text", "(A) text", "A: text"]
SubtitleRule = Literal["none", "at_frames", "lmms", "kit", "qwen3_vl", "interleaved"]
# The media settings that change the pixels of a prompt; the others are about this machine.
MEDIA_KEYS = (
    *("frames", "fps", "min_frames", "max_frames", "num_frames", "last_frame"),
    *("video_tokens", "min_pixels", "max_pixels", "image_min_pixels", "image_max_pixels"),
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
    """One published way to word, sample, read and average an evaluation set.

    ``templates`` are chosen by the values that ``template_by`` names of a question, joined with "/", or "*" for any of
    them; the first that fits, in the order written.
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
        description="ours, the name of a published rule of reading, or one's own function by path (eval/readers.py).",
    )
    aggregation: str = Field("mean", min_length=1, description="How the set's figures are made, by name or by path.")
    categories: tuple[str, ...] = Field((), description="Keys of details that figures are also given by, in groups.")

    _no_control_tokens = field_validator("system", "templates", "answer_prefix")(refuse_control_tokens)

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
        uses = any("subtitles" in template.placeholders for template in self.parsed.values())
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
        """The question's values of ``template_by``."""
        values = [sample.answer_kind if key == BY_KIND else sample.details.get(key) for key in self.template_by]
        return tuple(detail_text(value) for value in values)

    def template_for(self, sample: Sample) -> Template | None:
        """The first template that fits the question; None: the protocol excludes it."""
        values = self.question_type(sample)
        for key, template in self.parsed.items():
            wanted = key.split("/")
            if key == ANY or all(want in (ANY, value) for want, value in zip(wanted, values, strict=True)):
                return template
        return None

    def includes(self, sample: Sample) -> bool:
        """Whether the protocol reports the question; not without a template for it."""
        return self.template_for(sample) is not None

    def with_shown_media(self, sample: Sample) -> Sample:
        """The question with the media that are shown: with ``clips`` false, whole videos in place of their clips."""
        if self.clips or all(ref.start is None and ref.end is None for ref in sample.media):
            return sample
        return replace(sample, media=tuple(replace(ref, start=None, end=None) for ref in sample.media))

    def media_settings(self, base: MediaSettings) -> MediaSettings:
        """``base`` with what the protocol sets; frames and sizes that it does not are those of the defaults."""
        seen = {key: MediaSettings.model_fields[key].get_default() for key in MEDIA_KEYS}
        return MediaSettings.model_validate({**base.model_dump(), **seen, **self.media})

    def prompt_settings(self, base: PromptSettings) -> PromptSettings:
        """``base`` with the protocol's length limit, and reading subtitles if the protocol shows any."""
        changes = {"max_prompt_tokens": self.max_prompt_tokens, "subtitles": self.subtitles != "none"}
        return base.model_copy(update=changes)

    def rollout_changes(self) -> dict[str, Any]:
        """What the protocol sets of section ``rollout``; everything else that changes what is drawn is switched off."""
        off = {"min_new_tokens": 0, "min_p": 0.0, "repetition_penalty": 1.0, "stop_token_ids": (), "stop_strings": ()}
        return {**self.sampling.model_dump(exclude={"seed"}), "max_new_tokens": self.max_new_tokens, **off}


def detail_text(value: Any) -> str:
    """A value of details as written in prompts: "" for null, 1 for 1.0, true and lists as JSON has them."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value, ensure_ascii=False)


# ---- templates ----

PLACEHOLDERS = ("question", "options", "subtitles")
DETAILS = "details."
_OPTIONAL = re.compile(r"\[\[|\]\]")
# A text, and the name of the placeholder behind it, if there is one.
Piece = tuple[str, str | None]


@dataclass(frozen=True)
class Template:
    """A text with placeholders, parsed. Every second part is left out where one of its placeholders is empty."""

    parts: tuple[tuple[Piece, ...], ...]

    @property
    def placeholders(self) -> tuple[str, ...]:
        """The names of all placeholders, in order."""
        return tuple(name for part in self.parts for _, name in part if name is not None)

    def fill(self, value: Callable[[str, bool], str]) -> str:
        """The text; ``value(name, is_optional)`` returns the content of a placeholder, "" for nothing."""
        texts: list[str] = []
        for number, part in enumerate(self.parts):
            is_optional = number % 2 == 1
            values = [None if name is None else value(name, is_optional) for _, name in part]
            if not (is_optional and "" in values):
                texts += [text + (filled or "") for (text, _), filled in zip(part, values, strict=True)]
        return "".join(texts)


def parse(text: str) -> Template:
    """The template that ``text`` writes.

    Raises:
        ValueError: an unknown placeholder (with the nearest known one), a lone brace, or unpaired brackets.
    """
    brackets = _OPTIONAL.findall(text)
    if brackets != ["[[", "]]"] * (len(brackets) // 2):
        raise ValueError(
            f"in the template {_shown(text)}, '[[' and ']]' do not follow each other in pairs. Parts that may be left "
            "out stand between them, not within each other. Correct the brackets."
        )
    return Template(tuple(_pieces(part, text) for part in _OPTIONAL.split(text)))


def _pieces(part: str, text: str) -> tuple[Piece, ...]:
    """``part`` of a template's ``text``, by the rules of Python's format strings."""
    try:
        parsed = list(Formatter().parse(part))
    except ValueError as error:
        raise ValueError(
            f"the template {_shown(text)} has a lone brace ({error}). A placeholder such as {{question}} is allowed. "
            "Write '{{' or '}}' for the brace itself."
        ) from None
    pieces: list[Piece] = []
    for literal, name, form, conversion in parsed:
        if name is not None:
            # Both may be in a key of details, too.
            name += (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            if name not in PLACEHOLDERS and not (name.startswith(DETAILS) and name != DETAILS):
                raise _unknown_placeholder(name, text)
        pieces.append((literal, name))
    return tuple(pieces)


def _unknown_placeholder(name: str, text: str) -> ValueError:
    near = difflib.get_close_matches(name, PLACEHOLDERS, n=1, cutoff=0.5)
    advice = f"Did you mean {{{near[0]}}}?" if near else "Correct it, or write '{{' and '}}' for braces themselves."
    known = ", ".join(f"{{{one}}}" for one in PLACEHOLDERS)
    return ValueError(
        f"the template {_shown(text)} names the placeholder {{{name}}}. Placeholders are {known} and "
        f"{{details.KEY}}. {advice}"
    )


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


_SETS = Path(__file__).parent / "sets"
# Common beginnings of variants of several sets; no set of its own.
_SHARED = "shared"


@cache
def _variants() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """The settings common to its file, and its own, of every bundled variant."""
    found = {}
    for path in sorted(_SETS.glob("*.yaml")):
        values = read_tree(path).values
        for variant, own in values["variants"].items():
            found[f"{path.stem}/{variant}"] = (values.get("common") or {}, own)
    return found


def protocol_names() -> list[str]:
    """SET/VARIANT of every bundled protocol, in order."""
    return [name for name in _variants() if not name.startswith(f"{_SHARED}/")]


def load_protocol(name: str) -> Protocol:
    """The bundled protocol SET/VARIANT, or that of a YAML file: ``load_protocol("video_mme/lmms")``.

    Args:
        name: a name, or a path that ends in .yaml or .yml.

    Raises:
        ConfigError: there is none of that name (the nearest are named), the file cannot be read, or its settings do not
            make a protocol.
    """
    if name.endswith((".yaml", ".yml")):
        path, shown = Path(name), printable(name, 300)
        values = dict(read_tree(path).values)
        if "variants" in values:
            raise ConfigError(
                f"{shown} has 'variants'. The settings of one protocol are expected. Write each variant into a file of "
                "its own."
            )
        return _protocol(_with_bases({}, values), path.stem, shown)
    if name not in protocol_names():
        raise ConfigError(_unknown(name))
    return _bundled(name)


@cache
def _bundled(name: str) -> Protocol:
    return _protocol(_with_bases(*_variants()[name]), name, f"the bundled protocol {name}")


def _protocol(values: Mapping[str, Any], name: str, source: str) -> Protocol:
    try:
        return Protocol.model_validate({"name": name, **values})
    except ValidationError as error:
        lines = describe(error, Protocol, {}, default_source=source)
        raise ConfigError(f"The protocol in {source} cannot be used:\n  " + "\n  ".join(lines)) from None


def _with_bases(common: Mapping[str, Any], variant: Mapping[str, Any]) -> dict[str, Any]:
    """The common settings, then those of each ``base``, then the variant's own."""
    own = dict(variant)
    bases = own.pop("base", [])
    merged = dict(common)
    for base in [bases] if isinstance(bases, str) else bases:
        if base not in _variants():
            raise ConfigError(f"'base' of a protocol cannot be used. {_unknown(str(base))}")
        merged = _merged(merged, _with_bases(*_variants()[base]))
    return _merged(merged, own)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**below, **above}
    if isinstance(merged.get("differs_also"), str):
        merged["differs"] = f"{merged.get('differs', '')} {merged.pop('differs_also')}".strip()
    for key in ("media", "sampling"):
        if isinstance(below.get(key), Mapping) and isinstance(above.get(key), Mapping):
            merged[key] = {**below[key], **above[key]}
    return merged


def _unknown(name: str) -> str:
    names = protocol_names()
    of_set = [one for one in names if one.partition("/")[0] == name.partition("/")[0]]
    near = difflib.get_close_matches(name, of_set or names, n=1, cutoff=0.5)
    advice = f"Did you mean {near[0]}? " if near else ""
    sets = dict.fromkeys(one.partition("/")[0] for one in names)
    advice += f"Of this set there are {', '.join(of_set)}." if of_set else f"Sets: {', '.join(sets)}."
    return (
        f"There is no protocol '{printable(name, 200)}'. SET/VARIANT of a bundled one, or a path that ends in .yaml, "
        f"is expected. {advice}"
    )
