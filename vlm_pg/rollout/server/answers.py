"""From a server's choice to the token ids the trainer learns from: those that were sampled, or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlm_pg.rollout.server.errors import AnswerError
from vlm_pg.rollout.server.schema import Choice, TokenLogprob, read_part, shown
from vlm_pg.rollout.stopping import StopStrings
from vlm_pg.types import FinishReason

# What servers call text they have cut out of a response.
PARSED_FIELDS = ("reasoning_content", "reasoning", "tool_calls", "function_call", "refusal")
# What bytes that are no UTF-8 become, in different numbers by different decoders.
REPLACEMENT = "\ufffd"


def turn_token_ids(tokenizer: Any, stop_token_ids: Sequence[int]) -> tuple[int, ...]:
    """Tokens that begin a turn of a Qwen conversation."""
    token = tokenizer.get_vocab().get("<|im_start|>")
    return () if token is None or token in stop_token_ids else (token,)


@dataclass(frozen=True)
class Answer:
    """Token ids of one response, the stop token included.

    ``exact``: they are the server's own ids, not those of its text. ``num_read``: how many there were before the
    response was cut to its longest allowed length. ``logprobs``: what the server says it sampled the first of them
    with, nats; None where it does not say.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    text: str
    exact: bool
    num_read: int
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True)
class AnswerReader:
    """Reads choices of chat completions.

    Args:
        tokenizer: of the policy.
        stop_token_ids: what ends a response; the first is appended where a server's text stopped and does not show it.
        stop_strings: what else ends one; the text of a response goes up to the first of them.
        max_new_tokens: longest response. The tokens of a text can be more than those that were sampled, and are cut.
        media_token_ids: may not be in a response.
        turn_token_ids: begin another turn of the conversation, and may not be in a response either.
        vocab_size: ids end below; None: not checked.
        min_new_tokens: stop strings that were complete before so many tokens do not end a response.
        stop_texts: the strings of ``stop_strings``.
    """

    tokenizer: Any
    stop_token_ids: Sequence[int]
    stop_strings: StopStrings | None
    max_new_tokens: int
    media_token_ids: Sequence[int]
    turn_token_ids: Sequence[int] = ()
    vocab_size: int | None = None
    min_new_tokens: int = 0
    stop_texts: tuple[str, ...] = ()

    def read(self, sample_id: str, choice: Any) -> Answer:
        """One choice as tokens and text.

        Raises:
            AnswerError: a response that was parsed, is empty, holds media tokens, ended for another reason than "stop"
                or "length", contradicts itself, or goes on behind its end.
        """
        try:
            return self._read(choice)
        except AnswerError as error:
            raise AnswerError(f"Sample {sample_id!r}: {error}") from None

    def _read(self, choice: Any) -> Answer:
        _check_whole(choice)
        said = read_part(Choice, choice, "a choice")
        if said.finish_reason not in ("stop", "length"):
            raise AnswerError(
                f"the server ended a response with finish_reason {shown(said.finish_reason)}; 'stop' and 'length' are "
                "known. Start it without tool calling and content filters."
            )
        exact = said.token_ids is not None
        ids = self._given(said) if said.token_ids is not None else self._tokens(said.message.content)
        words, stopped = self._words(ids)
        if said.finish_reason == "stop" and not stopped:
            if exact:
                raise AnswerError(
                    "a response ended with finish_reason 'stop', but its token_ids end in none of the stop tokens "
                    f"{list(self.stop_token_ids)} and complete no stop string: what was sampled is not known."
                )
            ids.append(self.stop_token_ids[0])
        if not ids:
            raise AnswerError(f"the server gave a response without tokens ({said.finish_reason!r}).")
        self._check_ids(ids, exact)
        logprobs = self._aligned(said, ids)
        if len(ids) <= self.max_new_tokens:
            ended = stopped or said.finish_reason == "stop"
            return Answer(tuple(ids), "stop" if ended else "length", words, exact, len(ids), logprobs)
        kept = ids[: self.max_new_tokens]
        words, stopped = self._words(kept)
        logprobs = None if logprobs is None else logprobs[: self.max_new_tokens]
        return Answer(tuple(kept), "stop" if stopped else "length", words, exact, len(ids), logprobs)

    def _given(self, said: Choice) -> list[int]:
        """The server's own ids, if they can be what its text says."""
        ids = list(said.token_ids or ())
        content = said.message.content
        if not ids and content:
            raise AnswerError(f"token_ids is empty beside the text {shown(content)}.")
        beyond = [token for token in ids if self.vocab_size is not None and token >= self.vocab_size]
        if beyond:
            raise AnswerError(f"token_ids has {beyond[0]}, beyond the model's vocabulary of {self.vocab_size}.")
        decoded: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        same = self._plain(decoded) == self._plain(content)
        if not same and not (said.finish_reason == "stop" and self._cut_at_stop(ids, content)):
            raise AnswerError(
                f"token_ids read {shown(decoded)}, the text beside them is {shown(content)}: one of them is of another "
                "response."
            )
        return ids

    def _cut_at_stop(self, ids: Sequence[int], content: str) -> bool:
        """Whether the text ends before or right behind a stop string that the last token completed.

        Servers cut the text there, within a token if need be, and keep the whole token.
        """
        decoded: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        held: str = self.tokenizer.decode(list(ids[:-1]), skip_special_tokens=False)
        # The last token may also have completed a character.
        known = len(held.rstrip(REPLACEMENT))
        for string in self.stop_texts:
            place = decoded.find(string, max(0, known - len(string) + 1))
            cuts = (decoded[:place], decoded[: place + len(string)])
            if place >= 0 and self._plain(content) in map(self._plain, cuts):
                return True
        return False

    def _plain(self, text: str) -> str:
        """Without special tokens, outer space and bytes that are no text: servers show or leave them out."""
        for token in self.tokenizer.all_special_tokens:
            text = text.replace(token, "")
        return text.replace(REPLACEMENT, "").strip()

    def _tokens(self, content: str) -> list[int]:
        ids: list[int] = self.tokenizer(content, add_special_tokens=False)["input_ids"]
        return ids

    def _words(self, ids: list[int]) -> tuple[str, bool]:
        """What the response says, without what ended it, and whether a stop token or string is there."""
        shown_stop = bool(ids) and ids[-1] in self.stop_token_ids
        words: str = self.tokenizer.decode(ids[:-1] if shown_stop else ids, skip_special_tokens=False)
        before = words if self.stop_strings is None else self.stop_strings.before_first(words)
        return before, shown_stop or len(before) < len(words)

    def _check_ids(self, ids: Sequence[int], exact: bool) -> None:
        whose = "" if exact else ", as its text is tokenized here"
        found = sorted(set(ids) & set(self.media_token_ids))
        if found:
            raise AnswerError(
                f"a response contains media tokens {found}{whose}, which only the processor may place. The request "
                "rules them out; use a server that honours logit_bias (docs/servers.md), and returns token ids, which "
                "tell a token from words that spell it."
            )
        within = sorted((set(ids[:-1]) & set(self.stop_token_ids)) | (set(ids) & set(self.turn_token_ids)))
        if within:
            raise AnswerError(
                f"a response goes on behind the tokens {within}{whose}, which end it or begin another turn. Use a "
                "server that stops at stop_token_ids and honours logit_bias (docs/servers.md)."
            )
        if self.stop_strings is None or self.min_new_tokens:
            return
        words: str = self.tokenizer.decode(list(ids[:-1]), skip_special_tokens=False)
        if exact and len(self.stop_strings.before_first(words)) < len(words):
            raise AnswerError("a response goes on behind a stop string. Use a server that stops there.")

    def _aligned(self, said: Choice, ids: Sequence[int]) -> tuple[float, ...] | None:
        """Log-probabilities of the first ids; None where it is not sure whose they are.

        Ids of broken characters read alike, so that their number may be all that tells a part from the whole.
        """
        entries: list[TokenLogprob] = (said.logprobs.content if said.logprobs is not None else None) or []
        if not entries:
            return None
        # Some servers have none for the stop token.
        if not len(ids) - 1 <= len(entries) <= len(ids):
            if said.token_ids is None:
                return None
            raise AnswerError(
                f"token_ids has {len(ids)} tokens, the log-probabilities beside them are of {len(entries)}: ids are "
                "missing or of another response."
            )
        if said.token_ids is None:
            written = [self.tokenizer.decode([token], skip_special_tokens=False) for token in ids[: len(entries)]]
            if written != [entry.token for entry in entries]:
                return None
        known = [entry.logprob for entry in entries if entry.logprob is not None and entry.token is not None]
        return tuple(known) if len(known) == len(entries) else None


def _check_whole(choice: Any) -> None:
    message = choice.get("message") if isinstance(choice, Mapping) else None
    parsed = [name for name in PARSED_FIELDS if isinstance(message, Mapping) and message.get(name)]
    if parsed:
        raise AnswerError(
            f"the server cut {' and '.join(parsed)} out of a response, so what the model said is not known. Start it "
            "without a reasoning parser and without tool calling."
        )
