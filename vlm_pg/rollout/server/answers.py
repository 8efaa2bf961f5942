"""From a server's choice to the token ids the trainer learns from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlm_pg.rollout.server.errors import ServerError
from vlm_pg.rollout.stopping import StopStrings
from vlm_pg.types import FinishReason

# What servers call text they have cut out of a response.
PARSED_FIELDS = ("reasoning_content", "reasoning", "tool_calls", "function_call", "refusal")


@dataclass(frozen=True)
class Answer:
    """Token ids of one response, the stop token included.

    ``exact``: they are the server's own ids, not those of its text. ``num_read``: how many there were before the
    response was cut to its longest allowed length.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    text: str
    exact: bool
    num_read: int


@dataclass(frozen=True)
class AnswerReader:
    """Reads choices of chat completions.

    Args:
        tokenizer: of the policy.
        stop_token_ids: what ends a response; the first is appended where a server stopped and does not show it.
        stop_strings: what else ends one; the text of a response goes up to the first of them.
        max_new_tokens: longest response. The tokens of a text can be more than those that were sampled, and are cut.
        media_token_ids: may not be in a response.
    """

    tokenizer: Any
    stop_token_ids: Sequence[int]
    stop_strings: StopStrings | None
    max_new_tokens: int
    media_token_ids: Sequence[int]

    def read(self, sample_id: str, choice: Mapping[str, Any]) -> Answer:
        """One choice as tokens and text.

        Raises:
            ServerError: a response that was parsed, is empty, holds media tokens, or ended for another reason than
                "stop" or "length".
        """
        message = choice.get("message") or {}
        _check_whole(sample_id, message)
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length"):
            raise ServerError(
                f"Sample {sample_id!r}: the server ended a response with finish_reason {reason!r}; 'stop' and 'length' "
                "are known. Start it without tool calling and content filters."
            )
        exact = choice.get("token_ids") is not None
        ids = list(choice["token_ids"]) if exact else self._tokens(message.get("content") or "")
        words, stopped = self._words(ids)
        if reason == "stop" and not stopped:
            ids.append(self.stop_token_ids[0])
        if not ids:
            raise ServerError(f"Sample {sample_id!r}: the server gave a response without tokens ({reason!r}).")
        self._check_media(sample_id, ids)
        if len(ids) <= self.max_new_tokens:
            return Answer(tuple(ids), "stop" if stopped or reason == "stop" else "length", words, exact, len(ids))
        kept = ids[: self.max_new_tokens]
        words, stopped = self._words(kept)
        return Answer(tuple(kept), "stop" if stopped else "length", words, exact, len(ids))

    def _tokens(self, content: str) -> list[int]:
        ids: list[int] = self.tokenizer(content, add_special_tokens=False)["input_ids"]
        return ids

    def _words(self, ids: list[int]) -> tuple[str, bool]:
        """What the response says, without what ended it, and whether a stop token or string is there."""
        shown = bool(ids) and ids[-1] in self.stop_token_ids
        words: str = self.tokenizer.decode(ids[:-1] if shown else ids, skip_special_tokens=False)
        before = words if self.stop_strings is None else self.stop_strings.before_first(words)
        return before, shown or len(before) < len(words)

    def _check_media(self, sample_id: str, ids: Sequence[int]) -> None:
        found = sorted(set(ids) & set(self.media_token_ids))
        if found:
            raise ServerError(
                f"Sample {sample_id!r}: a response contains media tokens {found}, which only the processor may place. "
                "The request rules them out; use a server that honours logit_bias (docs/servers.md)."
            )


def _check_whole(sample_id: str, message: Mapping[str, Any]) -> None:
    parsed = [name for name in PARSED_FIELDS if message.get(name)]
    if parsed:
        raise ServerError(
            f"Sample {sample_id!r}: the server cut {' and '.join(parsed)} out of a response, so what the model said is "
            "not known. Start it without a reasoning parser and without tool calling."
        )
