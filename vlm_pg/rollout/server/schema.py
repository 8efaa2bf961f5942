"""What a chat completion must look like before anything in it is believed.

Only fields that are read are named; others may stand beside them. Types are strict: ``true`` is no token id, ``"7"`` no
number. What does not fit is an AnswerError that says where.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from vlm_pg.rollout.server.errors import AnswerError

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# Log-probabilities end at 0, but for rounding. What lies below the least, as SGLang writes minus infinity, is unknown.
LEAST_LOGPROB = -1e9
LogProbability = Annotated[float, Field(le=1e-3, ge=LEAST_LOGPROB, allow_inf_nan=False)]


def _check_unicode(text: str) -> str:
    """JSON can escape half of a surrogate pair, which no tokenizer and no file in UTF-8 takes."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("a lone surrogate is no Unicode text")
    return text


Text = Annotated[str, AfterValidator(_check_unicode)]
P = TypeVar("P", bound="_Part")
# Of what came, in messages.
SHOWN_CHARACTERS = 120


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class Message(_Part):
    """``content`` is there, if only as an empty string: ``null`` says that there is no text, not an empty one."""

    content: Text
    role: Literal["assistant"] | None = None


class TokenLogprob(_Part):
    """The log-probability of one sampled token, and how the server writes that token; None: it does not know.

    Nothing is trained on them, so an answer is as good without.
    """

    logprob: LogProbability | None
    token: str | None = ""

    @field_validator("logprob", mode="before")
    @classmethod
    def _unknown(cls, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value
        return None if value != value or value < LEAST_LOGPROB else value


class Logprobs(_Part):
    content: list[TokenLogprob] | None = None


class Choice(_Part):
    """One response. ``text`` and ``delta`` belong to answers of other kinds, in which ``message`` means nothing.

    Some servers fill a ``text`` they do not use with an empty string.
    """

    message: Message
    finish_reason: str | None = None
    index: Annotated[int, Field(ge=0)] | None = None
    token_ids: list[TokenId] | None = None
    logprobs: Logprobs | None = None
    text: Literal[""] | None = None
    delta: None = None


class Usage(_Part):
    prompt_tokens: Annotated[int, Field(ge=0)] | None = None
    completion_tokens: Annotated[int, Field(ge=0)] | None = None


class Completion(_Part):
    """A whole answer; its choices are read one by one, for a good one may stand beside a bad one."""

    choices: Annotated[list[Any], Field(min_length=1)]
    usage: Usage = Usage()
    prompt_token_ids: list[TokenId] | None = None

    @field_validator("usage", mode="before")
    @classmethod
    def _no_usage(cls, value: Any) -> Any:
        return {} if value is None else value


class ModelEntry(_Part):
    """One model of ``/models``."""

    id: Text
    owned_by: str | None = None


def read_part(kind: type[P], value: Any, what: str) -> P:
    """``value`` as a part of an answer.

    Args:
        what: how the message names it.

    Raises:
        AnswerError: it does not fit.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        found = "" if first["type"] == "missing" else f" (it has {shown(first['input'])})"
        raise AnswerError(f"{what} does not fit: {place}: {first['msg']}{found}.") from None


def shown(value: Any) -> str:
    """The beginning of a value, on one line."""
    text = repr(value[:SHOWN_CHARACTERS] if isinstance(value, str | list) else value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " ..."
