"""Settings of the reward."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from vlm_pg.answers.verdict import CheckerSettings as CheckerSettings
from vlm_pg.settings import Settings


class LengthSettings(Settings):
    """Section ``reward.length``: 1 for a response of min_tokens to max_tokens, falling to 0 outside."""

    weight: float = Field(0.0, ge=-100.0, le=100.0, description="Weight of this part of the reward; 0: off.")
    min_tokens: int = Field(
        0, ge=0, description="Shortest response that gets the full value; a shorter one gets a proportional share."
    )
    max_tokens: int = Field(
        512, ge=1, description="Longest response that gets the full value; it falls to 0 at twice this length."
    )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}; lower one or raise the other."
            )
        return self


class RepetitionSettings(Settings):
    """Section ``reward.repetition``: 1 minus the share of repeated word n-grams."""

    weight: float = Field(0.0, ge=-100.0, le=100.0, description="Weight of this part of the reward; 0: off.")
    ngram: int = Field(4, ge=1, le=64, description="Words per n-gram (characters, in scripts without spaces).")


class LanguageSettings(Settings):
    """Section ``reward.language``: share of the response's letters that are written in the language's script."""

    weight: float = Field(0.0, ge=-100.0, le=100.0, description="Weight of this part of the reward; 0: off.")
    script: Literal["latin", "han", "japanese", "hangul", "cyrillic", "greek", "arabic", "hebrew", "devanagari"] = (
        Field("latin", description="Script of the wanted language.")
    )


class JudgeSettings(Settings):
    """Section ``reward.judge``: a language model behind an OpenAI-compatible URL gives a number from 0 to 1."""

    weight: float = Field(0.0, ge=-100.0, le=100.0, description="Weight of this part of the reward; 0: off.")
    url: str | None = Field(None, description="Base URL including the version, for example http://127.0.0.1:8000/v1.")
    model: str | None = Field(None, description="Model name at the server; default: the first one it lists.")
    api_key_variable: str = Field(
        "OPENAI_API_KEY",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="Environment variable that holds the key, sent as bearer token; the key is never stored.",
    )
    prompt: str | None = Field(
        None, description="Text file with the judge's instructions; {question}, {answer} and {response} are filled in."
    )
    timeout_seconds: float = Field(
        60.0, gt=0.0, description="Time limit for one verdict; without a verdict this part has no value."
    )
    retries: int = Field(2, ge=0, description="How often a failed request is repeated.")
    concurrency: int = Field(16, ge=1, description="Maximum number of concurrent requests.")


class FunctionSettings(Settings):
    """One entry of ``reward.functions``: the user's own reward."""

    function: str = Field(description="path/to/file.py:function or package.module:function.")
    name: str | None = Field(
        None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="Name of this part of the reward; default: the function's name.",
    )
    weight: float = Field(1.0, ge=-100.0, le=100.0, description="Weight of this part of the reward; 0: only reported.")
    isolated: bool = Field(
        False,
        description="Run the function in the checker's processes, with time and memory limits, one response per call.",
    )


class RewardSettings(Settings):
    """reward = sum of weight * part. Parts without a weight are not computed, but for accuracy and format."""

    accuracy_weight: float = Field(
        default=1.0, ge=0.0, le=100.0, description="Weight of the answer's accuracy. 0: reported, but not trained on."
    )
    format_weight: float = Field(
        default=0.1,
        ge=0.0,
        le=100.0,
        description="Weight of the format: 1 for exactly one think block followed by one answer block, else 0.",
    )
    numerical_decimal_places: int = Field(
        default=2, ge=0, le=12, description="Numbers are equal if they agree after rounding to this many places."
    )
    numerical_tolerance: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="Numbers are also equal if they differ by at most this share of the gold number.",
    )
    ocr_case_sensitive: bool = Field(
        default=True, description="Whether case matters in transcribed text (OCR); false: 'Open' equals 'open'."
    )
    max_answer_characters: int = Field(
        default=4096,
        ge=1,
        le=100_000,
        description="A longer answer block is scored as wrong without being parsed, with a note.",
    )
    length: LengthSettings = Field(default_factory=LengthSettings, description="Reward for the length of responses.")
    repetition: RepetitionSettings = Field(
        default_factory=RepetitionSettings, description="Reward for avoiding repetition."
    )
    language: LanguageSettings = Field(default_factory=LanguageSettings, description="Reward for writing in a script.")
    judge: JudgeSettings = Field(default_factory=JudgeSettings, description="Reward from a language model as judge.")
    functions: tuple[FunctionSettings, ...] = Field((), description="Your own reward functions.")
    checker: CheckerSettings = Field(
        default_factory=CheckerSettings, description="Separate processes for checks that may hang or use much memory."
    )

    def impossible(self) -> list[str]:
        sections = (self.length.weight, self.repetition.weight, self.language.weight, self.judge.weight)
        functions = (function.weight for function in self.functions)
        if any((self.accuracy_weight, self.format_weight, *sections, *functions)):
            return []
        return ["no part of the reward has a weight, so every reward is 0. Set reward.accuracy_weight=1.0."]
