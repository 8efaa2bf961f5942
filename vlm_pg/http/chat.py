"""Questions to a language model behind an OpenAI-compatible URL, each answered with a text or with why there is none.

What judges have in common: those of rewards and those of evaluation differ in what they ask and in how they read it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlm_pg.http.keys import without_key

if TYPE_CHECKING:
    from vlm_pg.http.client import Client, Outcome

# So many requests of a call in a row without any answer of the server: the others are not sent.
MAX_FAILURES_IN_A_ROW = 3
MOST_ANSWER_MB = 64.0
_QUOTED_CHARACTERS = 80
# A failure of the server, or too many requests: worth asking again.
_TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)
# What is asked cannot be answered.
_OF_MESSAGE = (400, 413, 422)


@dataclass(frozen=True)
class NoReply:
    """Why there is no text. ``unreached``: nothing at all came from the server, or it was not asked any more.

    ``of_message``: the server works, and refuses this message (it may be too long) or does not end its answer to it.
    """

    why: str
    unreached: bool
    of_message: bool = False


class _Failed(Exception):
    """Why there is no text."""


class _OfMessage(_Failed):
    """The server works; asked again, the message would fare alike."""


class _Unreachable(_Failed):
    """No answer at all came from the server."""


class ChatServer:
    """One user's message a request, at temperature 0; connects when the first is sent.

    Args:
        url: with its version, for example http://127.0.0.1:8000/v1.
        model: the name the server knows; None: the first one it lists.
        section: of the settings, for messages ("reward.judge").
        timeout_seconds: for one text, repetitions included.
        retries: times a request that failed is sent again.
        concurrency: requests in flight at a time.
    """

    def __init__(
        self,
        url: str,
        model: str | None,
        key: str | None,
        section: str,
        timeout_seconds: float,
        retries: int,
        concurrency: int,
    ):
        self._url, self._key, self._section = url.rstrip("/"), key, section
        self._timeout_seconds, self._retries, self._concurrency = timeout_seconds, retries, concurrency
        self._model = model

    @property
    def model(self) -> str | None:
        """The name of the model, as it may be printed and recorded; None: not known yet."""
        return None if self._model is None else without_key(self._model, self._key)

    def replies(
        self,
        messages: Sequence[str],
        should_stop: Callable[[], bool] | None = None,
        on_reply: Callable[[int, str | NoReply], None] = lambda place, reply: None,
    ) -> list[str | NoReply]:
        """What the model writes to each message, without the key, or why nothing.

        After three time-outs or failed connections in a row, the messages that still wait are not sent.

        Args:
            should_stop: asked now and then.
            on_reply: told a message's place and what came of it, as soon as it is known.

        Raises:
            InterruptedError: ``should_stop`` said so.
        """
        from vlm_pg.http.client import run_until_stopped

        return run_until_stopped(self._replies(messages, on_reply), should_stop, "scoring was stopped")

    def find_model(self) -> NoReply | None:
        """Ask for the model's name where none was given; why there is none."""
        from vlm_pg.http.client import run_until_stopped

        async def found() -> NoReply | None:
            async with self._client() as http:
                return await self._find_model(http)

        return run_until_stopped(found(), None, "")

    def _client(self) -> Client:
        from vlm_pg.http.client import Client

        return Client(self._key, self._timeout_seconds, self._timeout_seconds, self._concurrency, MOST_ANSWER_MB)

    async def _replies(
        self, messages: Sequence[str], on_reply: Callable[[int, str | NoReply], None]
    ) -> list[str | NoReply]:
        slots = asyncio.Semaphore(self._concurrency)
        in_a_row = 0
        async with self._client() as http:
            missing = await self._find_model(http)

            async def reply_to(message: str) -> str | NoReply:
                nonlocal in_a_row
                if missing is not None:
                    return missing
                async with slots:
                    if in_a_row >= MAX_FAILURES_IN_A_ROW:
                        return NoReply(f"not asked, {in_a_row} requests in a row had no answer", unreached=True)
                    try:
                        async with asyncio.timeout(self._timeout_seconds):
                            text = await self._ask(http, message)
                    except (TimeoutError, _Failed) as error:
                        failure = self._no_reply(error)
                        in_a_row = in_a_row + 1 if failure.unreached else 0
                        return failure
                    in_a_row = 0
                    return text

            async def told(place: int, message: str) -> str | NoReply:
                reply = await reply_to(message)
                on_reply(place, reply)
                return reply

            return await asyncio.gather(*(told(place, message) for place, message in enumerate(messages)))

    async def _find_model(self, http: Client) -> NoReply | None:
        if self._model is not None:
            return None
        try:
            async with asyncio.timeout(self._timeout_seconds):
                listed = await self._answered(http, "GET", "/models")
        except (TimeoutError, _Failed) as error:
            return self._no_reply(error)
        try:
            name = listed["data"][0]["id"]
            if not isinstance(name, str):
                raise TypeError
            self._model = name
        except (KeyError, IndexError, TypeError):
            why = f"the server lists no model: {self._cut(listed)}; set {self._section}.model"
            return NoReply(without_key(why, self._key), unreached=False)
        return None

    async def _ask(self, http: Client, message: str) -> str:
        body = {"model": self._model, "messages": [{"role": "user", "content": message}], "temperature": 0.0}
        answer = await self._answered(http, "POST", "/chat/completions", body)
        try:
            choice = answer["choices"][0]
            text, is_cut_off = choice["message"]["content"], choice.get("finish_reason") == "length"
        except (AttributeError, KeyError, IndexError, TypeError):
            raise _Failed(f"the server's answer holds no message: {self._cut(answer)}") from None
        if is_cut_off:
            raise _OfMessage("the judge's answer was cut off at its longest (finish_reason length)")
        return without_key(text, self._key) if isinstance(text, str) else ""

    async def _answered(self, http: Client, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON answer; sent again after failures that may pass, with growing pauses."""
        import httpx2

        from vlm_pg.http.client import HOPELESS
        from vlm_pg.http.outcomes import text_of

        def is_final(outcome: Outcome, tries_left: int) -> bool:
            return isinstance(outcome, httpx2.Response) and outcome.status_code not in _TRY_AGAIN

        # In ASCII: httpx2 cannot send lone surrogates.
        content = None if body is None else json.dumps(body).encode()
        headers = None if body is None else {"Content-Type": "application/json"}
        try:
            outcome: Outcome | Exception = await http.answered(
                lambda client: client.request(method, f"{self._url}{path}", content=content, headers=headers),
                self._retries,
                is_final,
            )
        except HOPELESS as error:
            outcome = error
        if not isinstance(outcome, httpx2.Response):
            raise _Unreachable(f"{method} {path} failed, {type(outcome).__name__}: {outcome}")
        if outcome.status_code != 200:
            kind = _OfMessage if outcome.status_code in _OF_MESSAGE else _Failed
            raise kind(f"{method} {path} failed, status {outcome.status_code}: {self._cut(text_of(outcome))}")
        try:
            return outcome.json()
        except (ValueError, RecursionError):
            raise _Failed(f"the server's answer is no JSON: {self._cut(text_of(outcome))}") from None

    def _no_reply(self, error: Exception) -> NoReply:
        """The failure in words."""
        if isinstance(error, TimeoutError):
            return NoReply(f"no verdict within {self._timeout_seconds:g} s", unreached=True)
        why = without_key(str(error), self._key)
        return NoReply(why, isinstance(error, _Unreachable), isinstance(error, _OfMessage))

    def _cut(self, answered: object) -> str:
        """The beginning of what a server answered, without the key: masked first, or half of it might be left."""
        text = without_key(str(answered), self._key)
        return repr(text if len(text) <= _QUOTED_CHARACTERS else text[:_QUOTED_CHARACTERS] + "...")
