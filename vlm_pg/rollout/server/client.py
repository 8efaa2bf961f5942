"""``ServerClient``: requests to the sampling server, which may fail, disappear for a while, or ask for a pause."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any, TypeVar

import httpx2

from vlm_pg.errors import ServerError
from vlm_pg.http.client import INVALID_REQUEST, UNAVAILABLE, Client, Outcome, json_of, may_be_away
from vlm_pg.http.keys import read_key
from vlm_pg.rollout.settings import ServerSettings

T = TypeVar("T")

RUN_GOES_ON = "run.resume=auto goes on from the last checkpoint, and samples an interrupted step again."

PROBE_TIMEOUT_SECONDS = 5.0
PROBE_EVERY_SECONDS = 1.0
SHOWN_CHARACTERS = 300
# Longer pauses are logged: nothing else is seen of the run meanwhile.
LOGGED_PAUSE_SECONDS = 5.0


class ServerClient(Client):
    """Requests to one server inside one event loop; an async context manager.

    A ServerError that leaves it names the URL, with the key masked.

    Args:
        settings: ``url`` must be set.
        log: prints one line.
        log_once: prints the first line of a topic.
        advice: a sentence for errors: how to continue once the server works.
        takes_aborts: a response with choices of the reason "abort" is valid.

    Raises:
        ConfigError: a key that cannot be sent.
    """

    def __init__(
        self,
        settings: ServerSettings,
        log: Callable[[str], None],
        log_once: Callable[[str, str], None],
        advice: str = RUN_GOES_ON,
        takes_aborts: bool = False,
    ):
        assert settings.url is not None
        self._settings, self._log, self._log_once, self._advice = settings, log, log_once, advice
        self.url = settings.url.rstrip("/")
        # Where servers have what is not OpenAI's.
        self.root = self.url.removesuffix("/v1")
        super().__init__(
            read_key("rollout.server", settings.api_key_variable),
            settings.timeout_seconds,
            min(PROBE_TIMEOUT_SECONDS, settings.timeout_seconds),
            settings.concurrency + 1,
            settings.max_answer_mb,
            "rollout.server.max_answer_mb",
        )
        self._takes_aborts = takes_aborts
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._waiting = asyncio.Lock()
        self._absent_seconds = 0.0
        self._back_at = float("-inf")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        if isinstance(error, ServerError):
            # A server may repeat the key in its responses.
            raise ServerError(f"Server {self.url}: {self.without_key(str(error))}") from error.__cause__

    async def post(self, url: str, make_body: Callable[[], Awaitable[dict[str, Any] | bytes]]) -> dict[str, Any]:
        """The JSON object that a request yields.

        Args:
            url: of an endpoint of this server.
            make_body: awaited when a slot is free, so that no more than ``concurrency`` bodies are held.

        Raises:
            ServerError: refused (4xx); failed or gave no JSON object ``retries`` + 1 times; or the server stayed away.
        """
        async with self._slots:
            body = await make_body()
            # In a thread: encoding many pictures would block all other requests, and a stop.
            data = body if isinstance(body, bytes) else await asyncio.to_thread(_as_json, body)
            response = await self.response(url, data)
        path = url.removeprefix(self.url)
        if self._has_failed(response):
            raise ServerError(
                f"It failed {self._settings.retries + 1} times at POST {path}, {self._shown(response)} Its log says "
                f"why. {self._advice}"
            )
        if response.status_code != 200:
            raise ServerError(
                f"It refused POST {path}, {self._shown(response)} Change the rollout setting it names, or use a server "
                "that knows it (docs/servers.md)."
            )
        self._absent_seconds = 0.0
        return self.json_object(response)

    async def control(self, path: str, body: dict[str, Any] | None = None, once: bool = False) -> dict[str, Any]:
        """The JSON object of a GET, or of a POST of ``body``, to an endpoint that controls the server; empty where the
        response is none.

        Args:
            path: after the host.
            once: no retry and no waiting for a server that is away: it may have lost what the request builds on.

        Raises:
            ServerError: any other status than 200; or as ``post``.
        """
        data = None if body is None else json.dumps(body).encode()
        if once:
            outcome = await self.attempt(f"{self.root}{path}", data)
            if not isinstance(outcome, httpx2.Response):
                raise ServerError(f"{path} failed: {self._named(outcome)}.")
            response = outcome
        else:
            response = await self.response(f"{self.root}{path}", data, any_body=True)
        if response.status_code != 200:
            raise ServerError(f"{path} failed, {self._shown(response)}")
        value = json_of(response)
        return value if isinstance(value, dict) else {}

    def json_object(self, response: httpx2.Response) -> dict[str, Any]:
        """The response's JSON object; ServerError for anything else."""
        value = json_of(response)
        if not isinstance(value, dict):
            raise ServerError(
                f"{response.request.url} gave no JSON object, {self._shown(response)} rollout.server.url must be the "
                "base URL of an OpenAI-compatible server with its version, for example http://127.0.0.1:8000/v1."
            )
        return value

    def excerpt(self, text: str) -> str:
        """The beginning of a server's text, on one line, with the key masked."""
        # Before whitespace is joined and after it: a key may contain some.
        words = self.without_key(" ".join(self.without_key(text[: 100 * SHOWN_CHARACTERS]).split()))
        return words[:SHOWN_CHARACTERS] + (" ..." if len(words) > SHOWN_CHARACTERS else "")

    def retry_pause(self, outcome: Outcome, longest_seconds: float) -> float:
        """As requested, but never longer than a server that is away is waited for."""
        seconds = super().retry_pause(outcome, max(longest_seconds, self._settings.wait_seconds))
        if seconds > LOGGED_PAUSE_SECONDS and isinstance(outcome, httpx2.Response):
            self._log_once(
                "pause",
                f"the server at {self.url} asks for a pause (status {outcome.status_code}, Retry-After): waiting "
                f"{seconds:.0f} s, and again without a line whenever it asks",
            )
        return seconds

    def _shown(self, response: httpx2.Response) -> str:
        return f"status {response.status_code}: {self.excerpt(response.text)!r}."

    def _named(self, error: Exception) -> str:
        return self.without_key(": ".join(filter(None, (type(error).__name__, str(error)))))

    async def response(self, url: str, data: bytes | None = None, any_body: bool = False) -> httpx2.Response:
        """The response of any status to a GET, or to a POST of ``data``; a server that is away is waited for.

        Retried after time-outs, broken connections and failures; a POST also after status 200 without a JSON object,
        unless ``any_body``.

        Raises:
            ServerError: the request cannot be sent, broke off ``retries`` + 1 times, or the server stayed away for
                ``wait_seconds``.
        """

        def should_retry(outcome: Outcome) -> bool:
            if not isinstance(outcome, httpx2.Response) or self._has_failed(outcome):
                return True
            if data is None or outcome.status_code != 200 or any_body:
                return False
            return not isinstance(json_of(outcome), dict)

        async def wait_until_back(outcome: Outcome) -> bool:
            return may_be_away(outcome) and await self._wait_until_back()

        try:
            outcome = await self.request(url, data, self._settings.retries, should_retry, wait_until_back)
        except INVALID_REQUEST as error:
            raise ServerError(
                f"The request cannot be sent, or its answer not be read ({type(error).__name__}). Check "
                "rollout.server.url, and proxies set in the environment."
            ) from None
        if isinstance(outcome, httpx2.Response):
            return outcome
        raise ServerError(
            f"It broke off {self._settings.retries + 1} times, last with {self._named(outcome)}. Look at its "
            "log; a slow one needs a longer rollout.server.timeout_seconds "
            f"({self._settings.timeout_seconds:g} now). {self._advice}"
        ) from outcome

    def _has_failed(self, response: httpx2.Response) -> bool:
        """Whether the server is at fault, and a retry may succeed."""
        if response.status_code >= 500 or response.status_code == 429:
            return True
        if self._takes_aborts or response.status_code != 200 or b'"abort"' not in response.content:
            return False
        # vLLM and SGLang end the choices of a dropped request with the reason "abort".
        body = json_of(response)
        choices = body.get("choices") if isinstance(body, dict) else None
        reasons = [c.get("finish_reason") for c in choices if isinstance(c, dict)] if isinstance(choices, list) else []
        return "abort" in reasons

    async def _wait_until_back(self) -> bool:
        """Wait until the server responds; False if it does so at once.

        Absences add up until a request succeeds: one that takes the server down with it is not sent for ever.
        """
        failed_at = time.monotonic()
        wait = self._settings.wait_seconds
        async with self._waiting:  # one request probes for all of them
            if self._back_at > failed_at:
                return True
            since, logged = time.monotonic(), False
            while (failure := await self._probe()) is not None:
                if self._absent_seconds + time.monotonic() - since >= wait:
                    raise ServerError(
                        f"It has not answered for {wait:g} s ({failure}). Nothing is lost: start it again. "
                        f"{self._advice} rollout.server.wait_seconds says how long to wait."
                    )
                if not logged:
                    self._log(f"the server at {self.url} does not answer ({failure}); waiting up to {wait:g} s")
                    logged = True
                await asyncio.sleep(PROBE_EVERY_SECONDS)
            if logged:
                self._back_at = time.monotonic()
                self._absent_seconds += self._back_at - since
                self._log(f"the server at {self.url} answers again")
            return logged

    async def _probe(self) -> str | None:
        """Why the server is away; None if it is not."""
        outcome = await self.attempt(f"{self.url}/models", timeout_seconds=PROBE_TIMEOUT_SECONDS)
        if not isinstance(outcome, httpx2.Response):
            return self._named(outcome)
        return f"status {outcome.status_code}" if outcome.status_code in UNAVAILABLE else None


def _as_json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, allow_nan=False).encode()


async def gather_or_cancel(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order; the first error cancels the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
