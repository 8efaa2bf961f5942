"""What the user can choose about prompts, and our own prompt texts."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from vlm_pg.settings import Settings
from vlm_pg.types import ANSWER_KINDS, CONTROL_TOKEN, AnswerKind

_THINK = (
    "Work it out step by step between <think> and </think>. Then write the result between <answer> and </answer>, and "
    "nothing after it. "
)
DEFAULT_INSTRUCTIONS: dict[AnswerKind, str] = {
    "multiple_choice": _THINK + "The result is the letter of the right option, for example <answer>C</answer>.",
    "multiple_select": _THINK + "The result is the letters of all right options, for example <answer>A, C</answer>, or "
    "<answer>none</answer>.",
    "numerical": _THINK + "The result is one number in digits, for example <answer>12</answer>.",
    "ocr": _THINK + "The result is the text exactly as it can be read, for example <answer>No entry</answer>.",
    "free_form": _THINK + "The result is a short reply in words, for example <answer>a red lorry</answer>.",
    "regression": _THINK + "The result is one number, with decimals where needed, for example <answer>3.25</answer>.",
    "mean_relative_accuracy": _THINK
    + "The result is your best estimate, one number, for example <answer>2.7</answer>.",
    "mathematics": _THINK
    + "The result is the final number or expression, in LaTeX where it needs notation, for example "
    r"<answer>\frac{3}{4}</answer>.",
    "box": _THINK + "The result is one box as its left, top, right and bottom edge, for example "
    "<answer>[40, 60, 200, 180]</answer>.",
    "time_span": _THINK + "The result is when it begins and ends, in seconds, for example <answer>[12.5, 30]</answer>.",
    "exact": _THINK + "The result is the word or phrase asked for and nothing else, for example <answer>blue</answer>.",
    "yes_no": _THINK + "The result is yes or no, for example <answer>yes</answer>.",
}


def refuse_control_tokens(value: Any) -> Any:
    """A text, or a mapping to texts, without the control tokens of any model. Raises ValueError."""
    for text in value.values() if isinstance(value, dict) else (value,):
        if found := CONTROL_TOKEN.search(text):
            raise ValueError(
                f"contains the control token '{found[0]}'. Plain text is allowed; the chat template adds the control "
                "tokens. Remove it."
            )
    return value


class PromptSettings(Settings):
    """The words around a question, and how long a prompt may become."""

    system: str = Field("", description="System message; empty: none is passed, and the model's chat template decides.")
    instructions: dict[AnswerKind, str] = Field(
        default_factory=lambda: dict(DEFAULT_INSTRUCTIONS),
        description="Text added after the question, by answer kind; kinds left out keep the built-in text.",
    )
    subtitles: bool = Field(
        True,
        description="Add the subtitles that a record names before its question: those within the clip, with their "
        "times. false: subtitle files are not read.",
    )
    max_prompt_tokens: int = Field(
        16_384,
        ge=1,
        description="A sample with a longer prompt (text and visual tokens) is unusable; prompts are never truncated.",
    )

    @field_validator("instructions", mode="before")
    @classmethod
    def _fill_in(cls, value: Any) -> Any:
        return (
            {**DEFAULT_INSTRUCTIONS, **value} if isinstance(value, dict) and set(value) <= set(ANSWER_KINDS) else value
        )

    _no_control_tokens = field_validator("system", "instructions")(refuse_control_tokens)
