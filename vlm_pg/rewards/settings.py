"""Settings of the reward."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from vlm_pg.answers.verdict import CheckerSettings as CheckerSettings
from vlm_pg.settings import Settings


class LengthSettings(Settings):
    """Section ``reward.length``: 1 for a response of min_tokens to max_tokens, falling to 0 outside."""

    weight: float = Field(0.0, ge=-100.0, le=100.0, description="Weight of this part; 0: off.")
    min_tokens: int = Field(0, ge=0, description="Shortest response that gets all of it; below, in proportion.")
    max_tokens: int = Field(512, ge=1, description="Longest response that gets all of it; nothing at twice as many.")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}; lower one or raise the other."
            )
        return self


class RepetitionSettings(Settings):
    """Section ``reward.repetition``: 1 minus the share of repeated word n-grams."""

    weight: float = Field(0.0, ge=-100.0, le=100.0, description="Weight of this part; 0: off.")
    ngram: int = Field(4, ge=1, le=64, description="Words (characters of scripts without spaces) per n-gram.")


class LanguageSettings(Settings):
    """Section ``reward.language``: share of the response's letters that are written in the language's script."""

    weight: float = Field(0.0, ge=-100.0, le=100.0, description="Weight of this part; 0: off.")
    script: Literal["latin", "han", "japanese", "hangul", "cyrillic", "greek", "arabic", "hebrew", "devanagari"] = (
        Field("latin", description="Script of the wanted language.")
    )


class JudgeSettings(Settings):
    """Section ``reward.judge``: a language model behind an OpenAI-compatible URL gives a number from 0 to 1."""

    weight: float = Field(0.0, ge=-100.0, le=100.0, description="Weight of this part; 0: off.")
    url: str | None = Field(None, description="Base URL with its version, for example http://127.0.0.1:8000/v1.")
    model: str | None = Field(None, description="Model name the server knows; default: the first one it lists.")
    api_key_variable: str = Field(
        "OPENAI_API_KEY",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="Environment variable with the key, sent as bearer token; the key is never stored.",
    )
    prompt: str | None = Field(
        None, description="Text file with the judge's instructions; {question}, {answer} and {response} are filled in."
    )
    timeout_seconds: float = Field(60.0, gt=0.0, description="Longest wait for one verdict; then it is no value.")
    retries: int = Field(2, ge=0, description="Times a request that failed is sent again.")
    concurrency: int = Field(16, ge=1, description="Requests in flight at a time.")


class FunctionSettings(Settings):
    """One entry of ``reward.functions``: the user's own reward."""

    function: str = Field(description="path/to/file.py:function or package.module:function.")
    name: str | None = Field(
        None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="Its name; default: the function's."
    )
    weight: float = Field(1.0, ge=-100.0, le=100.0, description="Weight of this part; 0 reports it only.")
    isolated: bool = Field(
        False, description="Run it in the checker's processes, with deadline and memory limit, one response a call."
    )


class RewardSettings(Settings):
    """reward = sum of weight * part. Parts without a weight are not computed, but for accuracy and format."""

    accuracy_weight: float = Field(
        default=1.0,
        ge=0.0,
        le=100.0,
        description="Weight of the answer's accuracy. 0 reports it without training on it.",
    )
    format_weight: float = Field(
        default=0.1,
        ge=0.0,
        le=100.0,
        description="Weight of the format: 1 for exactly one think block followed by one answer block, else 0.",
    )
    numerical_decimal_places: int = Field(
        default=2, ge=0, le=12, description="Numbers are equal if they are equal after rounding to this many places."
    )
    numerical_tolerance: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="Numbers are also equal if they differ by at most this share of the gold one.",
    )
    ocr_case_sensitive: bool = Field(
        default=True, description="Transcribed text (OCR) counts case; false: 'Open' is 'open'."
    )
    max_answer_characters: int = Field(
        default=4096,
        ge=1,
        le=100_000,
        description="An answer block longer than this is scored wrong without being read, with a note that says so.",
    )
    length: LengthSettings = Field(default_factory=LengthSettings, description="How long responses should be.")
    repetition: RepetitionSettings = Field(default_factory=RepetitionSettings, description="Against repetition.")
    language: LanguageSettings = Field(default_factory=LanguageSettings, description="Which script to write.")
    judge: JudgeSettings = Field(default_factory=JudgeSettings, description="A model that judges.")
    functions: tuple[FunctionSettings, ...] = Field((), description="Rewards of your own.")
    checker: CheckerSettings = Field(default_factory=CheckerSettings, description="Processes for risky checks.")

    def impossible(self) -> list[str]:
        sections = (self.length.weight, self.repetition.weight, self.language.weight, self.judge.weight)
        functions = (function.weight for function in self.functions)
        if any((self.accuracy_weight, self.format_weight, *sections, *functions)):
            return []
        return ["no part of the reward has a weight, so every reward is 0. Set reward.accuracy_weight=1.0."]
