"""From a choice of a chat completion to the token ids that are trained on: those that were sampled, or none.

Only fields that are read are declared; others may stand beside them. Types are strict: ``true`` is no token id, ``"7"``
no number. A mismatch is an AnswerError that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from vlm_pg.errors import AnswerError
from vlm_pg.rollout.contracts import Answer
from vlm_pg.rollout.sampling import StopStrings

# Fields into which servers move text that they cut out of a response.
PARSED_FIELDS = ("reasoning_content", "reasoning", "tool_calls", "function_call", "refusal")
# Decoders replace invalid UTF-8 by different numbers of it.
REPLACEMENT = "\ufffd"
# vLLM writes no number below, SGLang minus infinity: both mean "unknown".
UNKNOWN_LOGPROB = -9999.0
SHOWN_CHARACTERS = 120


def _check_unicode(text: str) -> str:
    """JSON can escape half of a surrogate pair, which no tokenizer and no file in UTF-8 takes."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("a lone surrogate is no Unicode text")
    return text


Text = Annotated[str, AfterValidator(_check_unicode)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=0)]
P = TypeVar("P", bound="Part")


class Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class Message(Part):
    """``content`` is required, if only as an empty string: ``null`` means no text, not an empty one."""

    content: Text
    role: Literal["assistant"] | None = None


class TokenLogprob(Part):
    """Log-probability of one sampled token (0 up to rounding is the largest), and its text; None: unknown.

    The loss's ratio takes them where all tokens of a response have one.
    """

    logprob: Annotated[float, Field(le=1e-3, gt=UNKNOWN_LOGPROB, allow_inf_nan=False)] | None
    token: str | None = ""

    @field_validator("logprob", mode="before")
    @classmethod
    def _unknown(cls, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value
        return None if value != value or value <= UNKNOWN_LOGPROB else value


class Logprobs(Part):
    content: list[TokenLogprob] | None = None


class Choice(Part):
    """One response. ``text`` and ``delta`` belong to other kinds of completions, whose ``message`` means nothing.

    Some servers fill an unused ``text`` with an empty string.
    """

    message: Message
    finish_reason: str | None = None
    index: Count | None = None
    token_ids: list[TokenId] | None = None
    logprobs: Logprobs | None = None
    text: Literal[""] | None = None
    delta: None = None


class WeightVersions(Part):
    """Weights of this version sampled the tokens ``start`` to ``end``, which is exclusive."""

    version: str
    start: Count
    end: Count


class TokensChoice(Part):
    """One response of vLLM's ``/inference/v1/generate``, which has no text."""

    token_ids: list[TokenId]
    logprobs: Logprobs
    weight_versions: list[WeightVersions]
    finish_reason: str | None = None
    index: Count | None = None


class Usage(Part):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None


class Completion(Part):
    """A whole completion; choices are parsed one by one, since a valid one may stand beside an invalid one."""

    choices: Annotated[list[Any], Field(min_length=1)]
    usage: Usage = Usage()
    prompt_token_ids: list[TokenId] | None = None

    @field_validator("usage", mode="before")
    @classmethod
    def _no_usage(cls, value: Any) -> Any:
        return {} if value is None else value


class ModelEntry(Part):
    """One model of ``/models``."""

    id: Text
    owned_by: str | None = None


@dataclass(frozen=True)
class Begun:
    """A response up to where loading weights has interrupted it, with the version that sampled each token."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    versions: tuple[str, ...] = ()

    def __add__(self, choice: TokensChoice) -> Begun:
        versions = [span.version for span in choice.weight_versions for _ in range(span.start, span.end)]
        entries = choice.logprobs.content or ()
        return Begun((*self.token_ids, *choice.token_ids), (*self.logprobs, *entries), (*self.versions, *versions))


class Interrupted(AnswerError):
    """A response has ended because the server was given other weights."""

    def __init__(self, begun: Begun):
        super().__init__("the server ended a response with finish_reason 'abort' again and again.")
        self.begun = begun


def parse_part(kind: type[P], value: Any, name: str) -> P:
    """``value`` as a part of a completion, which messages call ``name``. Raises AnswerError: it does not match."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(map(str, first["loc"])) or "the whole"
        found = "" if first["type"] == "missing" else f" (it has {_shown(first['input'])})"
        raise AnswerError(f"{name} does not fit: {field}: {first['msg']}{found}.") from None


def _shown(value: Any) -> str:
    """The beginning of a value, on one line."""
    text = repr(value[:SHOWN_CHARACTERS] if isinstance(value, str | list) else value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " ..."


def turn_token_ids(tokenizer: Any, stop_token_ids: Sequence[int]) -> tuple[int, ...]:
    """Tokens that begin a turn of a Qwen conversation."""
    token = tokenizer.get_vocab().get("<|im_start|>")
    return () if token is None or token in stop_token_ids else (token,)


@dataclass(frozen=True)
class AnswerReader:
    """Parses choices of chat completions.

    Args:
        tokenizer: of the policy.
        stop_token_ids: end a response; the first is appended where a server's text stopped without it.
        stop_strings: end one as well; a response's text goes up to the first of them.
        max_new_tokens: longest response. A text may have more tokens than were sampled, which are cut off.
        media_token_ids, turn_token_ids: not allowed in a response; the latter begin another turn.
        vocab_size: upper bound of ids; None: not checked.
        min_new_tokens: stop strings complete before so many tokens do not end a response.
        needs_logprobs: a response without the log-probability of every token is an error.
    """

    tokenizer: Any
    stop_token_ids: Sequence[int]
    stop_strings: StopStrings | None
    max_new_tokens: int
    media_token_ids: Sequence[int]
    turn_token_ids: Sequence[int] = ()
    vocab_size: int | None = None
    min_new_tokens: int = 0
    needs_logprobs: bool = False

    def read(self, raw: Any) -> Answer:
        """One choice as tokens and text.

        Raises:
            AnswerError: a response that was parsed, is empty, contains media tokens, ended for another reason than
                "stop" or "length", contradicts itself, or goes on after its end.
        """
        message = raw.get("message") if isinstance(raw, Mapping) else None
        parsed = [name for name in PARSED_FIELDS if isinstance(message, Mapping) and message.get(name)]
        if parsed:
            raise AnswerError(
                f"the server cut {' and '.join(parsed)} out of a response, so what the model wrote is not known. Start "
                "it without a reasoning parser and without tool calling."
            )
        choice = parse_part(Choice, raw, "a choice")
        if choice.finish_reason not in ("stop", "length"):
            raise AnswerError(
                f"the server ended a response with finish_reason {_shown(choice.finish_reason)}; 'stop' and 'length' "
                "are known. Start it without tool calling and content filters."
            )
        exact = choice.token_ids is not None
        ids: list[int]
        if exact:
            ids = self._checked_ids(choice)
        else:
            ids = self.tokenizer(choice.message.content, add_special_tokens=False)["input_ids"]
        text, stopped = self._text(ids)
        if choice.finish_reason == "stop" and not stopped:
            if exact:
                raise AnswerError(
                    "a response ended with finish_reason 'stop', but its token_ids end in none of the stop tokens "
                    f"{list(self.stop_token_ids)} and complete no stop string: what was sampled is not known."
                )
            ids.append(self.stop_token_ids[0])
            stopped = True
        if not ids:
            raise AnswerError(f"the server gave a response without tokens ({choice.finish_reason!r}).")
        self._check_ids(ids, exact)
        logprobs, longest = self._aligned(choice, ids), self.max_new_tokens
        if self.needs_logprobs and (logprobs is None or len(logprobs) < len(ids)):
            raise AnswerError(
                f"a response of {len(ids)} tokens has no log-probability of {len(ids) - len(logprobs or ())} of them. "
                "With rollout.server.weights=keep the weights that sampled are known by nothing else; use a server "
                "that reports logprobs of every token, or one that loads the weights of the run (docs/servers.md)."
            )
        if len(ids) > longest:
            text, stopped = self._text(ids[:longest])
            logprobs = None if logprobs is None else logprobs[:longest]
        return Answer(tuple(ids[:longest]), "stop" if stopped else "length", text, exact, len(ids), logprobs)

    def read_tokens(self, raw: Any, begun: Begun) -> Answer:
        """One choice of tokens, behind those that were sampled before.

        Raises:
            Interrupted: there is more to sample.
            AnswerError: as ``read``.
        """
        choice = parse_part(TokensChoice, raw, "a choice")
        whole = begun + choice
        if choice.finish_reason == "abort":
            raise Interrupted(whole)
        text = self.tokenizer.decode(list(whole.token_ids), skip_special_tokens=False)
        entries = [entry.model_dump() for entry in whole.logprobs]
        known = {"message": {"content": text}, "token_ids": [*whole.token_ids], "logprobs": {"content": entries}}
        answer = self.read(known | {"finish_reason": choice.finish_reason})
        return replace(answer, weight_versions=whole.versions[: len(answer.token_ids)])

    def _checked_ids(self, choice: Choice) -> list[int]:
        """The server's own ids, which must decode to its text."""
        ids = list(choice.token_ids or ())
        content = choice.message.content
        if not ids and content:
            raise AnswerError(f"token_ids is empty beside the text {_shown(content)}.")
        beyond = [token for token in ids if self.vocab_size is not None and token >= self.vocab_size]
        if beyond:
            raise AnswerError(f"token_ids has {beyond[0]}, beyond the model's vocabulary of {self.vocab_size}.")
        decoded: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        same = self._plain(decoded) == self._plain(content)
        if not same and not (choice.finish_reason == "stop" and self._cut_at_stop(ids, content)):
            raise AnswerError(
                f"token_ids read {_shown(decoded)}, the text beside them is {_shown(content)}: one of them is of "
                "another response."
            )
        return ids

    def _cut_at_stop(self, ids: Sequence[int], content: str) -> bool:
        """Whether the text ends before or right after a stop string that the last token completed.

        Servers cut the text there, even within a token, and keep the whole token.
        """
        decoded: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        held: str = self.tokenizer.decode(list(ids[:-1]), skip_special_tokens=False)
        # The last token may also have completed a character.
        known = len(held.rstrip(REPLACEMENT))
        for string in self.stop_strings.strings if self.stop_strings is not None else ():
            start = decoded.find(string, max(0, known - len(string) + 1))
            cuts = (decoded[:start], decoded[: start + len(string)])
            if start >= 0 and self._plain(content) in map(self._plain, cuts):
                return True
        return False

    def _plain(self, text: str) -> str:
        """Without special tokens, outer whitespace and invalid bytes, which servers show or omit."""
        for token in self.tokenizer.all_special_tokens:
            text = text.replace(token, "")
        return text.replace(REPLACEMENT, "").strip()

    def _text(self, ids: list[int]) -> tuple[str, bool]:
        """The response's text up to its stop token or string, and whether there is one."""
        shown_stop = bool(ids) and ids[-1] in self.stop_token_ids
        text: str = self.tokenizer.decode(ids[:-1] if shown_stop else ids, skip_special_tokens=False)
        before = text if self.stop_strings is None else self.stop_strings.before_first(text)
        return before, shown_stop or len(before) < len(text)

    def _check_ids(self, ids: Sequence[int], exact: bool) -> None:
        whose = "" if exact else ", as its text is tokenized here"
        found = sorted(set(ids) & set(self.media_token_ids))
        if found:
            raise AnswerError(
                f"a response contains media tokens {found}{whose}, which only the processor may insert. The request "
                "rules them out; use a server that honours logit_bias (docs/servers.md), and returns token ids, which "
                "distinguish a token from text that spells it."
            )
        within = sorted((set(ids[:-1]) & set(self.stop_token_ids)) | (set(ids) & set(self.turn_token_ids)))
        if within:
            raise AnswerError(
                f"a response goes on behind the tokens {within}{whose}, which end it or begin another turn. Use a "
                "server that stops at stop_token_ids and honours logit_bias (docs/servers.md)."
            )
        if self.stop_strings is None or self.min_new_tokens:
            return
        text: str = self.tokenizer.decode(list(ids[:-1]), skip_special_tokens=False)
        if exact and len(self.stop_strings.before_first(text)) < len(text):
            raise AnswerError("a response goes on behind a stop string. Use a server that stops there.")

    def _aligned(self, choice: Choice, ids: Sequence[int]) -> tuple[float, ...] | None:
        """Log-probabilities of the first ids; None if they may belong to others.

        Ids of broken characters decode alike, so only their number may distinguish a part from the whole.
        """
        entries: list[TokenLogprob] = (choice.logprobs.content if choice.logprobs is not None else None) or []
        if not entries:
            return None
        # Some servers have none for the stop token.
        if not len(ids) - 1 <= len(entries) <= len(ids):
            if choice.token_ids is None:
                return None
            raise AnswerError(
                f"token_ids has {len(ids)} tokens, the log-probabilities beside them are of {len(entries)}: ids are "
                "missing or of another response."
            )
        if choice.token_ids is None:
            written = [self.tokenizer.decode([token], skip_special_tokens=False) for token in ids[: len(entries)]]
            if written != [entry.token for entry in entries]:
                return None
        known = [entry.logprob for entry in entries if entry.logprob is not None and entry.token is not None]
        return tuple(known) if len(known) == len(entries) else None
