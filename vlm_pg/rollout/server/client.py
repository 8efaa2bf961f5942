"""HTTP to one server: repeated requests, waiting for a server that is away, and stopping on request."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

import httpx2

from vlm_pg.rollout.server.errors import ServerError
from vlm_pg.rollout.settings import ServerSettings

T = TypeVar("T")

STOP_POLL_SECONDS = 0.2
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
PROBE_TIMEOUT_SECONDS = 5.0
SHOWN_CHARACTERS = 300


class ServerClient:
    """Requests to one server inside one event loop; an async context manager.

    Args:
        settings: ``url`` must be set.
        tell: shows one line to people.
    """

    def __init__(self, settings: ServerSettings, tell: Callable[[str], None]):
        assert settings.url is not None
        self._settings, self._tell = settings, tell
        self.url = settings.url.rstrip("/")
        key = settings.api_key or os.environ.get("OPENAI_API_KEY")
        self._http = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(
                settings.timeout_seconds, connect=min(PROBE_TIMEOUT_SECONDS, settings.timeout_seconds)
            ),
            limits=httpx2.Limits(max_connections=settings.concurrency + 1),
        )
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._waiting = asyncio.Lock()

    async def __aenter__(self) -> ServerClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def get(self, address: str) -> httpx2.Response:
        """The answer of any status; a server that is away is waited for.

        Raises:
            ServerError: it stayed away for ``wait_seconds``.
        """
        return await self._answered(lambda: self._http.get(address))

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON answer to a request.

        Raises:
            ServerError: refused (4xx), failed ``retries`` times more, no JSON, or the server stayed away.
        """
        address = f"{self.url}{path}"
        async with self._slots:
            response = await self._answered(lambda: self._http.post(address, json=body))
        if response.status_code >= 500 or response.status_code == 429:
            raise ServerError(
                f"The server failed {self._settings.retries + 1} times at POST {address}, {_shown(response)} Its log "
                "says why. The step is sampled again when the run is resumed (run.resume=auto)."
            )
        if response.status_code != 200:
            raise ServerError(
                f"The server refused POST {address}, {_shown(response)} Change the rollout setting it names, or use a "
                "server that knows it (docs/servers.md)."
            )
        return json_object(response)

    async def _answered(self, send: Callable[[], Coroutine[Any, Any, httpx2.Response]]) -> httpx2.Response:
        """Sent again after time-outs, broken connections and answers 5xx and 429, with growing pauses."""
        pause = FIRST_PAUSE_SECONDS
        for tries_left in range(self._settings.retries, -1, -1):
            try:
                response = await send()
            except httpx2.TransportError as error:
                # A server that takes a connection and says nothing is slow; all others may be away.
                slow = isinstance(error, httpx2.TimeoutException) and not isinstance(error, httpx2.ConnectTimeout)
                if not slow:
                    await self._wait_until_back(error)
                if not tries_left:
                    raise ServerError(
                        f"The server at {self.url} broke off {self._settings.retries + 1} times, last with "
                        f"{_named(error)}. Look at its log; a slow one needs a longer rollout.server.timeout_seconds "
                        f"({self._settings.timeout_seconds:g} now). run.resume=auto goes on from the last checkpoint."
                    ) from error
            else:
                if (response.status_code < 500 and response.status_code != 429) or not tries_left:
                    return response
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        raise AssertionError("the last try returns or raises")

    async def _wait_until_back(self, cause: Exception) -> None:
        wait = self._settings.wait_seconds
        deadline = time.monotonic() + wait
        async with self._waiting:  # one request asks for all of them
            told = False
            while True:
                try:
                    await self._http.get(f"{self.url}/models", timeout=PROBE_TIMEOUT_SECONDS)
                    break
                except httpx2.TransportError as error:
                    cause = error
                if time.monotonic() >= deadline:
                    raise ServerError(
                        f"The server at {self.url} has not answered for {wait:g} s ({_named(cause)}). Nothing is lost: "
                        "start it again and resume with run.resume=auto, which goes on from the last checkpoint and "
                        "samples the interrupted step again. rollout.server.wait_seconds says how long to wait."
                    ) from cause
                if not told:
                    self._tell(f"the server at {self.url} does not answer ({_named(cause)}); waiting up to {wait:g} s")
                    told = True
                await asyncio.sleep(1.0)
            if told:
                self._tell(f"the server at {self.url} answers again")


def run_until_stopped(work: Coroutine[Any, Any, T], should_stop: Callable[[], bool]) -> T:
    """Run ``work`` in an event loop of its own.

    Raises:
        InterruptedError: ``should_stop`` said so; connections are closed then.
    """

    async def watched() -> T:
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.wait({task}, timeout=STOP_POLL_SECONDS)
            if not task.done() and should_stop():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                raise InterruptedError("generation was asked to stop")
        return task.result()

    return asyncio.run(watched())


def json_object(response: httpx2.Response) -> dict[str, Any]:
    """The answer's JSON object; ServerError for anything else."""
    try:
        value = response.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ServerError(
            f"{response.request.url} gave no JSON object, {_shown(response)} rollout.server.url must be the base URL "
            "of an OpenAI-compatible server with its version, for example http://127.0.0.1:8000/v1."
        )
    return value


def _shown(response: httpx2.Response) -> str:
    words = " ".join(response.text.split())
    cut = words[:SHOWN_CHARACTERS] + (" ..." if len(words) > SHOWN_CHARACTERS else "")
    return f"status {response.status_code}: {cut!r}."


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
