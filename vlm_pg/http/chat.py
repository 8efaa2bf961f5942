"""Chat requests to a judge behind an OpenAI-compatible URL: each yields a text, or the reason why there is none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from vlm_pg.errors import ConfigError
from vlm_pg.http.keys import read_key, without_key

if TYPE_CHECKING:
    from vlm_pg.http.client import Client

# After so many consecutive requests without any response, the remaining ones are not sent.
MAX_FAILURES_IN_A_ROW = 3
MAX_RESPONSE_MB = 64.0
CHAT_SETTINGS = {"url", "model", "timeout_seconds", "retries", "concurrency"}
_QUOTED_CHARACTERS = 80
_RETRIED = (408, 425, 429, 500, 502, 503, 504)
_REFUSED_MESSAGE = (400, 413, 422)


class NoReply(Exception):
    """Why a message has no reply.

    ``unreached``: no response at all, or not sent any more. ``of_message``: the server works and refuses this message
    (it may be too long), or cut its reply off.
    """

    def __init__(self, why: str, unreached: bool = False, of_message: bool = False):
        super().__init__(why)
        self.why, self.unreached, self.of_message = why, unreached, of_message


def judge_key(section: str, api_key_variable: str, how_to_disable: str) -> str | None:
    """The key of the judge that ``section`` configures.

    Raises:
        ConfigError: a key variable that is not set, or the client's package is not installed.
    """
    if find_spec("openai") is None:
        raise ConfigError(
            f"{section} needs openai, which is not installed. Install vlm-pg[server], or {how_to_disable}."
        )
    return read_key(section, api_key_variable)


class ChatServer:
    """One user message per request, at temperature 0; connects with the first one.

    Args:
        section: of the settings, for messages ("reward.judge"). The arguments after ``key`` are its ``CHAT_SETTINGS``.
        url: with its version, for example http://127.0.0.1:8000/v1.
        model: name on the server; None: the first one it lists.
        timeout_seconds: for one reply, retries included.
        concurrency: requests in flight.
    """

    def __init__(
        self,
        section: str,
        key: str | None,
        url: str,
        model: str | None,
        timeout_seconds: float,
        retries: int,
        concurrency: int,
    ):
        self._url, self._key, self._section = url.rstrip("/"), key, section
        self._timeout_seconds, self._retries, self._concurrency = timeout_seconds, retries, concurrency
        self._model = model

    @property
    def model(self) -> str | None:
        """The model's name, with the key masked; None while it is not known."""
        return None if self._model is None else without_key(self._model, self._key)

    def replies(
        self,
        messages: Sequence[str],
        should_stop: Callable[[], bool] | None = None,
        on_reply: Callable[[int, str | NoReply], None] = lambda index, reply: None,
    ) -> list[str | NoReply]:
        """The model's reply to each message, with the key masked, or the reason why there is none.

        Args:
            should_stop: polled.
            on_reply: called with a message's index and its reply as soon as that is known.

        Raises:
            InterruptedError: after ``should_stop``.
        """
        from vlm_pg.http.client import run_until_stopped

        return run_until_stopped(self._replies(messages, on_reply), should_stop, "scoring was stopped")

    def find_model(self) -> NoReply | None:
        """Query the model's name if none was given; why that fails."""
        from vlm_pg.http.client import run_until_stopped

        async def find() -> NoReply | None:
            async with self._client() as http:
                return await self._find_model(http)

        return run_until_stopped(find(), None, "")

    def _client(self) -> Client:
        from vlm_pg.http.client import Client

        return Client(self._key, self._timeout_seconds, self._timeout_seconds, self._concurrency, MAX_RESPONSE_MB)

    async def _replies(
        self, messages: Sequence[str], on_reply: Callable[[int, str | NoReply], None]
    ) -> list[str | NoReply]:
        slots = asyncio.Semaphore(self._concurrency)
        in_a_row = 0
        async with self._client() as http:
            no_model = await self._find_model(http)

            async def reply_to(index: int, message: str) -> str | NoReply:
                nonlocal in_a_row
                reply: str | NoReply
                try:
                    if no_model is not None:
                        raise no_model
                    async with slots:
                        if in_a_row >= MAX_FAILURES_IN_A_ROW:
                            raise NoReply(f"not asked, {in_a_row} requests in a row had no answer", unreached=True)
                        try:
                            reply = await self._reply(http, message)
                            in_a_row = 0
                        except NoReply as failure:
                            in_a_row = in_a_row + 1 if failure.unreached else 0
                            raise
                except NoReply as failure:
                    reply = failure
                on_reply(index, reply)
                return reply

            return await asyncio.gather(*(reply_to(index, message) for index, message in enumerate(messages)))

    async def _find_model(self, http: Client) -> NoReply | None:
        if self._model is not None:
            return None
        try:
            listed = await self._json(http, "/models")
        except NoReply as failure:
            return failure
        try:
            name = listed["data"][0]["id"]
            if not isinstance(name, str):
                raise TypeError
            self._model = name
        except (KeyError, IndexError, TypeError):
            return self._no_reply(f"the server lists no model: {self._quoted(listed)}; set {self._section}.model")
        return None

    async def _reply(self, http: Client, message: str) -> str:
        body = {"model": self._model, "messages": [{"role": "user", "content": message}], "temperature": 0.0}
        completion = await self._json(http, "/chat/completions", body)
        try:
            choice = completion["choices"][0]
            text, is_cut_off = choice["message"]["content"], choice.get("finish_reason") == "length"
        except (AttributeError, KeyError, IndexError, TypeError):
            raise self._no_reply(f"the server's answer holds no message: {self._quoted(completion)}") from None
        if is_cut_off:
            raise NoReply("the judge's answer was cut off at its longest (finish_reason length)", of_message=True)
        return without_key(text, self._key) if isinstance(text, str) else ""

    async def _json(self, http: Client, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON response within ``timeout_seconds``, retries included."""
        import httpx2

        from vlm_pg.http.client import INVALID_REQUEST, Outcome

        def should_retry(outcome: Outcome) -> bool:
            return not isinstance(outcome, httpx2.Response) or outcome.status_code in _RETRIED

        data = None if body is None else json.dumps(body).encode()  # in ASCII, which can hold lone surrogates
        call = f"{'GET' if body is None else 'POST'} {path}"
        try:
            async with asyncio.timeout(self._timeout_seconds):
                outcome = await http.request(f"{self._url}{path}", data, self._retries, should_retry)
        except TimeoutError:
            raise NoReply(f"no verdict within {self._timeout_seconds:g} s", unreached=True) from None
        except INVALID_REQUEST as error:
            raise self._no_reply(f"{call} failed, {type(error).__name__}: {error}", unreached=True) from None
        if not isinstance(outcome, httpx2.Response):
            raise self._no_reply(f"{call} failed, {type(outcome).__name__}: {outcome}", unreached=True)
        if outcome.status_code != 200:
            why = f"{call} failed, status {outcome.status_code}: {self._quoted(outcome.text)}"
            raise self._no_reply(why, of_message=outcome.status_code in _REFUSED_MESSAGE)
        try:
            return outcome.json()
        except (ValueError, RecursionError):
            raise self._no_reply(f"the server's answer is no JSON: {self._quoted(outcome.text)}") from None

    def _no_reply(self, why: str, unreached: bool = False, of_message: bool = False) -> NoReply:
        return NoReply(without_key(why, self._key), unreached, of_message)

    def _quoted(self, response: object) -> str:
        """The beginning of a response; the key is masked first, or half of it might remain."""
        text = without_key(str(response), self._key)
        return repr(text if len(text) <= _QUOTED_CHARACTERS else text[:_QUOTED_CHARACTERS] + "...")
